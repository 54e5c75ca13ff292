"""The doctor's checks on made-up facts: each can be well, and each can be ill."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpkv_daemon.cli.doctor import layout, report
from hpkv_daemon.doctor import checks
from hpkv_daemon.doctor.findings import Facts, GpuFacts, Level, SocketFacts, StorageFacts
from hpkv_daemon.doctor.gather import socket_facts, storage_facts
from tests.outputs import assert_golden, assert_golden_json, rendered

GIB = 1 << 30
SERVING = SocketFacts("/run/hpkv/hpkvd.sock", "serving", "", 990, 991, "hpkv", 0o660, 4242)
DISK = StorageFacts("/var/lib/hpkv", "xfs", 500 * GIB, 100 * GIB, True, "", 2.5e9)
WELL = Facts(
    kernel=(6, 8),
    uid=0,
    groups=frozenset({0}),
    ram_bytes=64 * GIB,
    pool_path="/dev/shm/hpkv",
    pool_bytes=8 * GIB,
    pool_file_system="tmpfs",
    pool_available_bytes=32 * GIB,
    shmem_huge_pages="within_size",
    memlock_bytes=None,
    open_files=65536,
    numa_nodes=1,
    clock_source="tsc",
    clock_behind=False,
    container=False,
    socket=SERVING,
    round_trip="",
    storage=DISK,
    gpu=GpuFacts("580.65.06", "13.0", 8),
    vllm="0.32.0",
    vllm_least=(0, 31),
    enabled=True,
    hash_seed="",
    allocator="",
    settings_problem="",
)
MISSING = SocketFacts("/run/hpkv/hpkvd.sock", "missing")


def ill(**facts: object) -> Facts:
    return replace(WELL, **facts)


CASES = [
    (checks.settings, ill(settings_problem="unknown setting"), "fail", "config check"),
    (checks.kernel, ill(kernel=(5, 4)), "fail", "Linux 5.6"),
    (checks.pool, ill(pool_available_bytes=GIB, socket=MISSING), "fail", "HPKV_KV_MEM_POOL_SIZE"),
    (checks.pool, ill(pool_available_bytes=GIB, socket=MISSING, container=True), "fail", "--shm-size"),
    (checks.pool, ill(ram_bytes=GIB), "fail", "to less"),
    (checks.pool, ill(pool_file_system="ext4"), "warn", "/dev/shm"),
    (checks.huge_pages, ill(shmem_huge_pages="never"), "warn", "huge=within_size"),
    (checks.locked_memory, ill(memlock_bytes=8 << 20), "warn", "LimitMEMLOCK"),
    (checks.open_files, ill(open_files=1024), "warn", "LimitNOFILE"),
    (checks.socket, ill(socket=MISSING), "warn", "hpkvd start"),
    (checks.socket, ill(socket=replace(SERVING, state="stale")), "warn", "hpkvd start"),
    (checks.socket, ill(socket=replace(SERVING, state="not a socket")), "fail", "move the file away"),
    (checks.socket, ill(socket=replace(SERVING, state="denied")), "fail", "group hpkv"),
    (checks.socket, ill(socket=replace(SERVING, state="hanging")), "fail", "hpkvd restart"),
    (checks.socket, ill(socket=replace(SERVING, state="untrusted")), "fail", "only root"),
    (checks.socket_access, ill(socket=replace(SERVING, mode=0o666)), "warn", "HPKV_SOCKET_MODE=0660"),
    (checks.socket_access, ill(uid=1000), "fail", "usermod -aG hpkv"),
    (checks.stale_lock, ill(socket=replace(SERVING, stale_lock=True)), "warn", "takes it over"),
    (checks.namespaces, ill(socket=replace(SERVING, same_pid_namespace=False)), "fail", "--pid=host"),
    (checks.round_trip, ill(round_trip="it is gone"), "fail", "log"),
    (checks.numa, ill(numa_nodes=2), "warn", "mpol=interleave"),
    (checks.gpu, ill(gpu=GpuFacts("580.65.06", "", 8)), "fail", "libcuda"),
    (checks.allocator, ill(allocator="expandable_segments:True"), "warn", "without expandable_segments"),
    (checks.storage, ill(storage=replace(DISK, problem="Read-only file system")), "fail", "HPKV_KV_STORAGE_PATH"),
    (checks.storage, ill(storage=replace(DISK, free_bytes=GIB)), "fail", "HPKV_STORAGE_SIZE"),
    (checks.storage, ill(storage=replace(DISK, file_system="tmpfs")), "warn", "on a disk"),
    (checks.storage, ill(storage=replace(DISK, direct=False)), "warn", "O_DIRECT"),
    (checks.storage, ill(storage=replace(DISK, write_bytes_per_second=1e8)), "warn", "NVMe"),
    (checks.vllm, ill(vllm="0.9.2"), "fail", "0.31"),
    (checks.enabled, ill(enabled=False), "warn", "engine is started"),
    (checks.hash_seed, ill(hash_seed="7"), "warn", "everywhere or nowhere"),
    (checks.clock, ill(clock_behind=True), "warn", "set-ntp"),
    (checks.clock, ill(clock_source="hpet"), "warn", "tsc"),
]


def test_every_check_can_be_ill_and_is_well_on_a_good_machine() -> None:
    every = {*checks.NODE, *checks.ENGINE}
    assert {check for check, *_ in CASES} == every
    assert {check(WELL).level for check in every} == {Level.OK}


@pytest.mark.parametrize(("check", "facts", "level", "advice"), CASES)
def test_what_is_ill_is_told_with_what_to_do(check: checks.Check, facts: Facts, level: str, advice: str) -> None:
    finding = check(facts)
    assert finding.level == level
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("check", "facts"),
    [
        (checks.pool, ill(pool_available_bytes=0)),
        (checks.huge_pages, ill(pool_file_system="hugetlbfs", shmem_huge_pages="never")),
        (checks.locked_memory, ill(memlock_bytes=8 << 20, gpu=GpuFacts())),
        (checks.gpu, ill(gpu=GpuFacts())),
        (checks.allocator, ill(gpu=GpuFacts(), allocator="expandable_segments:True")),
        (checks.socket_access, ill(uid=1000, groups=frozenset({991}))),
        (checks.socket_access, ill(uid=1000, socket=MISSING)),
        (checks.round_trip, ill(round_trip=None)),
        (checks.storage, ill(storage=None)),
        (checks.storage, ill(storage=replace(DISK, write_bytes_per_second=None))),
        (checks.vllm, ill(vllm="")),
        (checks.clock, ill(clock_source="")),
    ],
)
def test_what_does_not_matter_here_is_well(check: checks.Check, facts: Facts) -> None:
    assert check(facts).level == Level.OK


def test_the_report_in_both_forms() -> None:
    findings = checks.examine(ill(pool_bytes=128 * GIB, socket=MISSING, round_trip=None), checks.NODE)
    found = report(findings)
    assert (found["ok"], found["failed"], found["warned"]) == (False, 1, 1)
    assert_golden_json("doctor.json", found)
    assert_golden("doctor.txt", rendered(layout(findings), width=200))
    assert "\x1b[1;31mfail" in rendered(layout(findings), terminal=True)


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    ticks = iter((0.0, 0.5))
    facts = storage_facts(tmp_path / "not" / "there", 1 << 20, lambda: next(ticks))
    assert facts.problem == ""
    assert facts.free_bytes > 0
    if facts.direct:
        assert facts.write_bytes_per_second == 2 * (64 << 20)
    assert list(tmp_path.iterdir()) == []


def test_a_socket_that_is_none_and_a_lock_that_nobody_holds(tmp_path: Path) -> None:
    path = tmp_path / "hpkvd.sock"
    assert socket_facts(path, 1.0).state == "missing"
    path.write_text("")
    assert socket_facts(path, 1.0).state == "not a socket"
    lock = tmp_path / "hpkvd.sock.lock"
    lock.touch(0o600)
    assert os.access(lock, os.R_OK)
    assert socket_facts(path, 1.0).stale_lock
