"""What a daemon leaves to the next one: everything committed, nothing else, and never a wrong byte.

``HPKV_TEST_KILL_ROUNDS`` makes the rounds under load more than the few of a quick run.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hpkv_client.client import BlockCache
from hpkv_client.transport import Channel
from hpkv_daemon.pool.ledger import RECORDS_AT
from tests.daemons import DaemonFactory, DaemonHandle, hpkvd, refusal
from tests.support import Child, Observed, Rank, content, hashes, is_gone, observed_daemon, plain_shard, wait_until

ROUNDS = int(os.environ.get("HPKV_TEST_KILL_ROUNDS", "8"))
SIZE = 4096
BLOCKS = hashes(*range(20))


def filled(socket: Path, name: str = "name", size: int = SIZE) -> None:
    """Store the blocks."""
    with BlockCache(name, size, socket=socket) as cache:
        assert cache.put({key: content(key, size) for key in BLOCKS}) == len(BLOCKS)


def found(socket: Path, name: str = "name", size: int = SIZE) -> int:
    """How many of the blocks are there, every byte right."""
    with BlockCache(name, size, socket=socket) as cache:
        there = cache.get(BLOCKS)
    assert all(got in (None, content(key, size)) for key, got in zip(BLOCKS, there, strict=True))
    return len(BLOCKS) - there.count(None)


def asked(handle: DaemonHandle, verb: str) -> dict[str, Any]:
    """What the daemon that runs now answers."""
    channel = Channel(handle.socket)
    try:
        return channel.call(verb, {}, 30.0)
    finally:
        channel.close()


def last_life(handle: DaemonHandle) -> list[str]:
    """What the last daemon said about the pool that it found."""
    said = handle.text().split("configuration ")[-1].splitlines()
    return [line for line in said if "restored" in line or "starting cold" in line]


# -- what survives ------------------------------------------------------------------------------------------


def end_by_kill(handle: DaemonHandle) -> None:
    handle.kill()
    handle.restart()


def end_by_signal(handle: DaemonHandle) -> None:
    assert handle.stop() == 0
    handle.restart()


def end_by_stop(handle: DaemonHandle) -> None:
    assert hpkvd("stop", env=handle.env).returncode == 0
    handle.process.wait()
    handle.restart()


@pytest.mark.parametrize("end", [end_by_kill, end_by_signal, end_by_stop])
def test_the_next_daemon_serves_every_block_and_says_so(
    running: DaemonHandle, end: Callable[[DaemonHandle], None]
) -> None:
    filled(running.socket)
    filled(running.socket, "large", 100_000)
    epochs = {asked(running, "ping")["epoch"]}
    for _ in range(2):
        end(running)
        epochs.add(asked(running, "ping")["epoch"])
        pool = asked(running, "info")["pool"]
        assert (pool["restored_blocks"], pool["resident_blocks"]) == (40, 40)
        models = {(namespace["model"], namespace["blocks"]) for namespace in asked(running, "info")["namespaces"]}
        assert models == {("name", 20), ("large", 20)}
        (line,) = last_life(running)
        assert re.search(rf"restored 40 blocks \({20 * (SIZE + 100_000)} bytes\) in \d+ ms", line)
        assert found(running.socket) == found(running.socket, "large", 100_000) == 20
        assert asked(running, "check")["ok"] is True
    assert len(epochs) == 3


def test_hpkvd_restart_keeps_the_blocks(daemon: DaemonFactory) -> None:
    env = daemon.environment()
    socket = Path(env["HPKV_SOCKET"])
    try:
        assert hpkvd("start", env=env).returncode == 0
        filled(socket)
        assert hpkvd("restart", env=env).returncode == 0
        assert found(socket) == 20
    finally:
        assert hpkvd("stop", "--discard", env=env).returncode == 0


def test_a_block_that_was_only_reserved_is_not_there_and_its_room_is_free() -> None:
    with observed_daemon() as live:
        rank = Rank(live.socket, plain_shard(SIZE, 8)).register().ready()
        assert rank.store(hashes(0, 1), [0, 1]) == 2
        live.faults("store@3=delay:30")
        rank.ask_store(hashes(2, 3, 4), [2, 3, 4], parent=hashes(1)[0])
        wait_until(lambda: live.stats()["pool_reserved_blocks"] == 3)
        live.handle.kill()
        rank.drop()
        live.handle.restart()
        live.faults("")
        with Rank(live.socket, plain_shard(SIZE, 8)).register().ready() as again:
            assert again.match(hashes(*range(5)))[0] == 2
            stats = asked(live.handle, "stats")
            assert (stats["pool_resident_blocks"], stats["pool_reserved_blocks"]) == (2, 0)
            assert again.store(hashes(2, 3, 4), [2, 3, 4], parent=hashes(1)[0]) == 3


def test_what_was_cleared_stays_cleared(running: DaemonHandle) -> None:
    filled(running.socket)
    filled(running.socket, "other")
    namespace = next(n["id"] for n in asked(running, "info")["namespaces"] if n["model"] == "name")
    assert hpkvd("clear", "--namespace", namespace, env=running.env).returncode == 0
    end_by_kill(running)
    assert found(running.socket) == 0
    assert found(running.socket, "other") == 20


def test_quotas_hold_over_a_restart(daemon: DaemonFactory) -> None:
    handle = daemon(HPKV_QUOTAS="name=25%:50%, *=:60%", HPKV_KV_MEM_POOL_SIZE="4m")
    filled(handle.socket)
    filled(handle.socket, "flood", 80_000)
    before = asked(handle, "info")["quotas"]
    assert {quota["model"] for quota in before} == {"name", "flood", "(all others)"}
    end_by_kill(handle)
    assert asked(handle, "info")["quotas"] == before
    with BlockCache("flood", 80_000, socket=handle.socket) as flood:
        more = hashes(*range(100, 200))
        flood.put({key: content(key, 80_000) for key in more})
    assert found(handle.socket) == 20
    assert asked(handle, "check")["ok"] is True


# -- what does not ------------------------------------------------------------------------------------------


def rewrite(at: int, new: bytes) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        with (directory / "index").open("r+b") as file:
            file.seek(at)
            file.write(new)

    return change


def replace_pool(directory: Path) -> None:
    size = (directory / "pool").stat().st_size
    (directory / "pool").rename(directory / "old")
    (directory / "pool").write_bytes(bytes(size))
    (directory / "old").unlink()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rewrite(8, b"\x63"), "another format"),
        (rewrite(0, os.urandom(8192)), "is not one"),
        (rewrite(40, bytes(16)), "the machine has been restarted"),
        (lambda directory: os.truncate(directory / "index", RECORDS_AT + 64), "damaged"),
        (lambda directory: os.truncate(directory / "index", 0), "has no index"),
        (lambda directory: (directory / "index").unlink(), "has no index"),
        (lambda directory: (directory / "pool").unlink(), "has no pool"),
        (replace_pool, "another pool file"),
        (lambda directory: os.truncate(directory / "pool", 1 << 20), "not 67108864"),
    ],
)
def test_what_cannot_be_trusted_is_not_and_one_line_says_why(
    running: DaemonHandle, change: Callable[[Path], None], reason: str
) -> None:
    filled(running.socket)
    running.kill()
    change(running.pool_directory)
    running.restart()
    (line,) = last_life(running)
    assert "starting cold: " in line
    assert reason in line
    assert asked(running, "info")["pool"]["restored_blocks"] == 0
    assert found(running.socket) == 0
    filled(running.socket)
    end_by_kill(running)
    assert found(running.socket) == 20


def test_a_pool_of_another_size_starts_cold_in_its_place(running: DaemonHandle) -> None:
    filled(running.socket)
    running.kill()
    for size in ("32m", "80m"):
        running.env["HPKV_KV_MEM_POOL_SIZE"] = size
        running.restart()
        (line,) = last_life(running)
        assert re.search(r"starting cold: the pool there has \d+ bytes, not \d+", line)
        assert found(running.socket) == 0
        filled(running.socket)
        running.kill()


def test_the_first_daemon_of_all_says_that_it_starts_cold(running: DaemonHandle) -> None:
    (line,) = last_life(running)
    assert "starting cold: there was none" in line


def test_discard_forgets_whether_a_daemon_runs_or_not(daemon: DaemonFactory) -> None:
    handle = daemon()
    for politely in (True, False):
        filled(handle.socket)
        if not politely:
            handle.kill()
        done = hpkvd("stop", "--discard", env=handle.env)
        assert done.returncode == 0
        assert re.search(r"64(\.\d+)? MiB .* are free again", done.stderr)
        handle.process.wait()
        assert list(handle.pool_directory.glob("[!.]*")) == []
        handle.restart()
        assert found(handle.socket) == 0
    assert hpkvd("stop", "--discard", env=handle.env).returncode == 0
    assert "nothing to stop" in refusal("stop", "--discard", env=handle.env, exit_code=3)


def test_nobody_discards_or_takes_the_pool_of_a_daemon_that_runs(daemon: DaemonFactory, running: DaemonHandle) -> None:
    filled(running.socket)
    env = daemon.environment(HPKV_SHARE_MEM_FILE_PATH=running.pool_directory)
    assert f"pid {running.pid}" in refusal("stop", "--discard", env=env, exit_code=75)
    assert f"pid {running.pid}" in refusal("serve", env=env, exit_code=75)
    env["HPKV_KV_MEM_POOL_SIZE"] = "32m"
    assert f"pid {running.pid}" in refusal("serve", env=env, exit_code=75)
    assert found(running.socket) == 20
    end_by_kill(running)
    assert found(running.socket) == 20


def test_a_start_that_fails_keeps_what_was_there_and_leaves_nothing_new(daemon: DaemonFactory) -> None:
    env = daemon.environment()
    in_the_way = {"HPKV_SOCKET_GROUP": "no-such-group"}
    refusal("serve", env=env | in_the_way, exit_code=78)
    assert list(Path(env["HPKV_SHARE_MEM_FILE_PATH"]).iterdir()) == []
    handle = daemon()
    filled(handle.socket)
    handle.kill()
    refusal("serve", env=handle.env | in_the_way, exit_code=78)
    handle.restart()
    assert found(handle.socket) == 20


def test_a_full_tmpfs_ends_what_survives_and_not_the_daemon(
    daemon: DaemonFactory, tmpfs: Callable[[str], Path]
) -> None:
    # Room for the pool, its lock, and one page more.
    directory = tmpfs("65548k")
    handle = daemon(HPKV_SHARE_MEM_FILE_PATH=directory)
    filled(handle.socket)
    assert found(handle.socket) == 20
    assert "the index beside the pool cannot grow" in handle.text()
    end_by_kill(handle)
    assert found(handle.socket) == 0


# -- the mover of a dead daemon -----------------------------------------------------------------------------


def test_a_stopped_mover_of_a_dead_daemon_is_killed_and_nothing_waits_for_it() -> None:
    with observed_daemon() as live:
        rank = Rank(live.socket, plain_shard(SIZE, 8)).register().ready()
        assert rank.store(hashes(0, 1), [0, 1]) == 2
        mover = live.mover()
        os.kill(mover, signal.SIGSTOP)
        rank.ask_store(hashes(2), [2])
        live.handle.kill()
        rank.drop()
        started = time.monotonic()
        live.handle.restart()
        assert time.monotonic() - started < 15.0
        assert is_gone(mover)
        with Rank(live.socket, plain_shard(SIZE, 8)).register().ready() as again:
            assert again.match(hashes(0, 1, 2))[0] == 2


# -- kills at random moments under load ---------------------------------------------------------------------

PUTTER = """
import random, select
name, size, strict = {name!r}, {size}, {strict}
cache = BlockCache(name, size, arena_blocks=16, timeout=1.0, socket=socket)
acked, fresh, number, keys = [], [], 0, []

def patiently(call):
    deadline = time.monotonic() + 15
    while True:
        try:
            return call()
        except HpkvError:
            if time.monotonic() > deadline: raise
            time.sleep(0.02)

def verdict():
    there = patiently(lambda: cache.contains(acked)) if acked else []
    lost = [key for key, here in zip(acked, there) if not here]
    sample = fresh[-200:] + random.sample(acked, min(100, len(acked)))
    wanted = [key for key in dict.fromkeys(sample) if strict or key not in set(lost)]
    wrong, absent = 0, wanted
    deadline = time.monotonic() + 5
    while absent and time.monotonic() < deadline:
        got = dict(zip(absent, patiently(lambda: cache.get(absent))))
        wrong += sum(block is not None and block != content(key, size) for key, block in got.items())
        absent = [key for key, block in got.items() if block is None] if strict else []
    return len(acked), max(len(lost), len(absent)), wrong

say("ready")
while True:
    if select.select([sys.stdin], [], [], 0)[0]:
        order = wait()
        if order == "verify":
            say(*verdict())
            fresh = []
            if wait() == "forget": acked = []
        continue
    try:
        # What a kill cut short is put again: it must not be there already with half of its bytes.
        keys = keys or [f"{{name}} {{number + i}}".encode() for i in range(8)]
        if cache.put({{key: content(key, size) for key in keys}}) == 8:
            acked = (acked + keys)[-60_000:]
            fresh += keys
        number, keys = number + 8, []
        some = random.sample(acked, min(6, len(acked)))
        for key, block in zip(some, cache.get(some)):
            if block is not None and block != content(key, size):
                say("wrong bytes under", key)
    except HpkvError:
        time.sleep(0.01)
"""

CHAINER = """
import random, select
strict, size, blocks = {strict}, 12000, 8
rank, life, chains, number, grown, added = None, 0, [], 0, [], []
# A daemon that was killed never answers.
Rank.reply.__defaults__ = (1.0,)

def connected():
    global rank, life
    while True:
        try:
            life += 1
            rank = Rank(socket, plain_shard(size, blocks), engine=f"chainer {{life}}").register().ready()
            return
        except (HpkvError, AssertionError):
            time.sleep(0.02)

def safely(call):
    while True:
        try:
            return call()
        except (HpkvError, AssertionError):
            rank.drop()
            connected()

def wrong_in(chain):
    hit, lease = rank.match(chain)
    wrong = 0
    for first in range(0, hit, blocks):
        part = chain[first : min(hit, first + blocks)]
        rank.memory[:] = 0
        rank.load(lease, range(len(part)), first=first)
        wrong += sum(bytes(rank.block(i)) != content(key, size) for i, key in enumerate(part))
    if hit: rank.call("release", lease=lease)
    return len(chain) - hit, wrong

def verdict():
    lost = wrong = 0
    for chain in chains[-40:] + random.sample(chains, min(10, len(chains))):
        missing, bad = safely(lambda: wrong_in(chain))
        lost, wrong = lost + missing, wrong + bad
    return sum(map(len, chains)), lost, wrong

connected()
say("ready")
while True:
    if select.select([sys.stdin], [], [], 0)[0]:
        order = wait()
        if order == "verify":
            say(*verdict())
            if wait() == "forget": chains, added = [], []
        continue
    try:
        if not added:
            grown = random.choice(chains) if chains and random.random() < 0.6 else []
            if len(grown) > 40: grown = []
            added = hashes(*(("chain", number + i) for i in range(4)))
            number += 4
        for i, key in enumerate(added):
            rank.block(i)[:] = np.frombuffer(content(key, size), np.uint8)
        parent = grown[-1] if grown else None
        if rank.store(added, range(4), parent=parent) == 4:
            if grown in chains: chains.remove(grown)
            chains.append(grown + added)
        added = []
    except (HpkvError, AssertionError):
        rank.drop()
        connected()
"""


@pytest.fixture(params=["roomy", "crowded", "demoting"])
def variant(request: pytest.FixtureRequest, storage: Path) -> Iterator[tuple[bool, Observed]]:
    """A daemon with room for everything, so that nothing may be missing; one that evicts all the time; one that also
    demotes to its disk, and brings back from there."""
    strict = request.param == "roomy"
    settings: dict[str, Any] = {"HPKV_KV_MEM_POOL_SIZE": "256m" if strict else "4m"}
    if request.param == "demoting":
        settings |= {"HPKV_KV_STORAGE_PATH": storage, "HPKV_STORAGE_SIZE": "128m"}
        settings |= {"HPKV_STORAGE_WRITE": "demote", "HPKV_STORAGE_IDLE_SECONDS": 0.5}
    with observed_daemon(**settings) as live:
        yield strict, live
        if request.param == "demoting":
            assert live.ask("info")["storage"]["blocks"] > 0


def test_kills_at_random_moments_under_load_lose_no_block_and_spoil_no_byte(variant: tuple[bool, Observed]) -> None:
    strict, live = variant
    generator = random.Random()
    restored = verified = 0
    with ExitStack() as stack:
        codes = [PUTTER.format(name=name, size=size, strict=strict) for name, size in (("a", 4096), ("b", 30_000))]
        codes.append(CHAINER.format(strict=strict))
        children = [stack.enter_context(Child(live.handle, code)) for code in codes]
        for child in children:
            assert child.heard() == "ready"
        for round_number in range(ROUNDS):
            # In every other round copies take so long that the kill comes in the middle of some.
            live.faults("store=delay:0.002" if round_number % 2 else "")
            time.sleep(generator.uniform(0.05, 0.5))
            if generator.random() < 0.8:
                live.handle.kill()
            else:
                assert live.handle.stop() == 0
            live.faults("")
            live.handle.restart()
            for child in children:
                child.tell("verify")
            for child in children:
                kept, lost, wrong = map(int, child.heard(60.0).split())
                assert wrong == 0, f"round {round_number}: {wrong} wrong blocks"
                assert not (strict and lost), f"round {round_number}: {lost} of {kept} blocks lost"
                verified += kept
            assert asked(live.handle, "check")["ok"] is True
            pool = asked(live.handle, "info")["pool"]
            restored += pool["restored_blocks"]
            full = strict and pool["resident_bytes"] > pool["size_bytes"] // 3
            if full:
                asked(live.handle, "clear")
            for child in children:
                child.tell("forget" if full else "go on")
    assert restored > 0
    assert verified > 0
    assert "Traceback" not in live.handle.text()
    print(json.dumps({"rounds": ROUNDS, "strict": strict, "restored": restored, "verified": verified}))  # noqa: T201
