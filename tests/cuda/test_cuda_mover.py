"""The mover of a GPU under a driver that runs late and refuses what is not allowed: bytes, order, lives."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpkv_client.errors import CopyFailed, NoSuchDevice
from tests.cuda.gpus import DEVICE_BYTES, FIRST, PART, SECOND, FakeCuda, GpuKvRank, GpuNode, ImpatientGpuDaemon
from tests.support import (
    KvRank,
    Observed,
    Rank,
    canonical_block,
    content,
    hashes,
    is_gone,
    observed_daemon,
    plain_shard,
    wait_until,
)

BLOCKS = 6
PREFIX = hashes(*range(BLOCKS))
BIG = 150 << 10

LAYOUTS = {
    "head-major": {"order": "hnd"},
    "token-major": {"order": "nhd"},
    "latent": {"latent": True},
}
STRATEGIES = [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((2, 2), (1, 2)), ((1, 2), (2, 1))]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Whoever is entered here leaves before the daemon is looked at."""
    with ExitStack() as stack:
        yield stack


def engine(node: GpuNode, stack: ExitStack, name: str, tp: int, pp: int, gpu: str, **layout: Any) -> list[GpuKvRank]:
    """All ranks of an engine, registered and ready."""
    share = KvRank.LAYERS // pp
    ranks = [
        stack.enter_context(
            node.kv_rank(
                gpu, engine=name, tp=(t, tp), pp=(p, pp), layers=(p * share, (p + 1) * share), blocks=BLOCKS, **layout
            )
        )
        for p in range(pp)
        for t in range(tp)
    ]
    for rank in ranks:
        rank.register()
    for rank in ranks:
        rank.ready()
    return ranks


def store_and_load(writers: list[Any], readers: list[Any], order: str, heads: int) -> None:
    """What one engine stores is what the other loads, into other blocks, in another order."""
    blocks = [canonical_block(n, order, heads) for n in range(BLOCKS)]
    for rank in writers:
        for n, block in enumerate(blocks):
            rank.fill(n, block)
    asked = [(rank, rank.ask_store(PREFIX, range(BLOCKS), job=1)) for rank in writers]
    kept = [rank.reply(request).result()["kept"] for rank, request in asked]
    assert max(kept) == BLOCKS
    hit, lease = readers[0].match(PREFIX)
    assert hit == BLOCKS
    places = [3, 0, 5, 1, 4, 2]
    for rank in readers:
        rank.memory[:] = 0xEE
    loads = [(rank, rank.ask_load(lease, places, job=1)) for rank in readers]
    for rank, request in loads:
        assert rank.reply(request).result()["loaded"] == BLOCKS
        # At once: whatever comes later comes too late.
        assert all(rank.holds(place, block) for place, block in zip(places, blocks, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("writer", "reader"), STRATEGIES)
def test_every_layout_is_stored_and_loaded_byte_for_byte(
    node: GpuNode, stack: ExitStack, layout: str, writer: tuple[int, int], reader: tuple[int, int]
) -> None:
    options = LAYOUTS[layout]
    heads = 1 if "latent" in options else KvRank.HEADS
    writers = engine(node, stack, "writer", *writer, FIRST, **options)
    readers = engine(node, stack, "reader", *reader, SECOND, **options)
    store_and_load(writers, readers, options.get("order", "hnd"), heads)  # type: ignore[arg-type]


def fill(rank: Rank) -> None:
    for number, key in enumerate(PREFIX):
        rank.block(number)[:] = np.frombuffer(content(key, rank.shard.block_bytes), np.uint8)


def big_pair(node: GpuNode, stack: ExitStack, gpu: str = FIRST) -> tuple[Rank, Rank]:
    """A writer that holds the contents of the prefix, and a reader; blocks lie over borders of page-locked pieces."""
    writer, reader = (
        stack.enter_context(node.rank(plain_shard(BIG, BLOCKS), engine=name, gpu=gpu)).register().ready()
        for name in ("big writer", "big reader")
    )
    fill(writer)
    return writer, reader


def assert_all_works(writer: Rank, reader: Rank) -> None:
    assert writer.store(PREFIX, range(BLOCKS)) == BLOCKS
    hit, lease = reader.match(PREFIX)
    assert hit == BLOCKS
    reader.memory[:] = 0
    assert reader.load(lease, range(BLOCKS)) == BLOCKS
    assert [reader.block(n).tobytes() for n in range(BLOCKS)] == [content(key, BIG) for key in PREFIX]
    assert reader.call("release", lease=lease)["released"]


@pytest.mark.parametrize("order", ["hnd", "nhd"])
def test_short_pieces_are_gathered_by_the_device(node: GpuNode, stack: ExitStack, order: str) -> None:
    # Token-major under TP is put in order by the CPU besides. No copy goes in a batch, which would fail.
    node.fail("cuMemcpyBatchAsync 0 2")
    writers = engine(node, stack, "writer", 2, 1, FIRST, order=order)
    readers = engine(node, stack, "reader", 1, 1, SECOND, order=order)
    store_and_load(writers, readers, order, KvRank.HEADS)


def test_a_cpu_engine_finds_what_a_gpu_engine_stored(node: GpuNode, stack: ExitStack) -> None:
    writer, _ = big_pair(node, stack)
    reader = stack.enter_context(Rank(node.socket, plain_shard(BIG, BLOCKS), engine="cpu")).register().ready()
    assert_all_works(writer, reader)
    assert {mover["device"] for mover in node.observed.ask("info")["movers"]} == {"cpu", f"cuda:{FIRST}"}


def test_a_part_of_a_gpu_is_a_device_of_its_own(node: GpuNode, stack: ExitStack) -> None:
    assert_all_works(*big_pair(node, stack, PART))
    (mover,) = node.observed.ask("info")["movers"]
    assert mover["device"] == f"cuda:{PART}"


@pytest.mark.parametrize("version", [12040, 12080])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_driver_without_batches_copies_the_same_bytes(cuda: FakeCuda, layout: str, version: int) -> None:
    options = LAYOUTS[layout]
    heads = 1 if "latent" in options else KvRank.HEADS
    with observed_daemon(ImpatientGpuDaemon, **cuda.environment(FAKE_CUDA_VERSION=version)) as observed:
        node = GpuNode(observed, cuda)
        if version == 12080:
            # It has the entry point, and refuses to use it.
            node.fail("cuMemcpyBatchAsync 0 801")
        with ExitStack() as stack:
            writers = engine(node, stack, "writer", 2, 1, FIRST, **options)
            readers = engine(node, stack, "reader", 1, 1, FIRST, **options)
            store_and_load(writers, readers, options.get("order", "hnd"), heads)  # type: ignore[arg-type]
            assert_all_works(*big_pair(node, stack))
        node.calm()
        observed.assert_sound()


def test_the_pool_is_page_locked_in_the_background(node: GpuNode, stack: ExitStack) -> None:
    big_pair(node, stack)
    size = node.observed.ask("info")["pool"]["size_bytes"]
    wait_until(lambda: node.observed.ask("info")["movers"][0]["page_locked_bytes"] == size, 20)


def test_a_pool_that_cannot_be_page_locked_fails_copies_and_says_why_once(node: GpuNode, stack: ExitStack) -> None:
    node.fail("cuMemHostRegister_v2 0 2")
    writer, _ = big_pair(node, stack)
    for _ in range(3):
        assert writer.store(PREFIX, range(BLOCKS)) == 0
    (line,) = [line for line in node.observed.handle.text().splitlines() if "copies fail" in line]
    assert f"mover cuda:{FIRST}: copies fail: memory cannot be page-locked: cuMemHostRegister_v2: CUDA_ERROR" in line
    node.calm()
    assert writer.store(PREFIX, range(BLOCKS)) == BLOCKS


def test_only_the_mover_loads_the_driver(node: GpuNode, stack: ExitStack) -> None:
    big_pair(node, stack)
    assert "libcuda" in node.observed.maps()
    assert "libcuda" not in Path(f"/proc/{node.observed.handle.pid}/maps").read_text()


# -- lives --------------------------------------------------------------------------------------------------


def in_a_store(node: GpuNode, writer: Rank, reader: Rank) -> None:
    node.observed.faults("store=delay:0.05")
    request = writer.ask_store(PREFIX, range(BLOCKS))
    wait_until(lambda: not writer.control.quiet())
    os.kill(node.observed.mover(), signal.SIGKILL)
    assert writer.reply(request, 15.0).result()["kept"] == 0
    del reader


def in_a_load(node: GpuNode, writer: Rank, reader: Rank) -> None:
    assert writer.store(PREFIX, range(BLOCKS)) == BLOCKS
    _, lease = reader.match(PREFIX)
    node.observed.faults("load=delay:0.05")
    request = reader.ask_load(lease, range(BLOCKS))
    wait_until(lambda: not reader.control.quiet())
    os.kill(node.observed.mover(), signal.SIGKILL)
    with pytest.raises(CopyFailed, match=r"mover cuda:GPU-\S+ ended.*recompute"):
        reader.reply(request, 15.0).result()
    assert reader.call("release", lease=lease)["released"]


@pytest.mark.parametrize("kill", [in_a_store, in_a_load])
def test_a_killed_mover_fails_its_copies_and_is_replaced(node: GpuNode, stack: ExitStack, kill: Any) -> None:
    writer, reader = big_pair(node, stack)
    pid = node.observed.mover()
    kill(node, writer, reader)
    node.observed.faults("")
    for rank in (writer, reader):
        rank.ready()
    assert is_gone(pid)
    assert node.observed.mover() != pid
    assert_all_works(writer, reader)


def test_the_memory_of_an_engine_that_left_is_free_for_the_next(node: GpuNode, stack: ExitStack) -> None:
    cuda, most = node.cuda, DEVICE_BYTES - (8 << 20)
    stayer = stack.enter_context(node.rank(plain_shard(4096, 1), engine="stayer")).register().ready()
    mover = node.observed.mover()
    block = most // BLOCKS // 4096 * 4096
    code = (
        f"one = rank(plain_shard({block}, {BLOCKS}), engine='first').register().ready()\n"
        f"say(one.store(hashes(0, 1), [0, 1])); wait()"
    )
    with node.child(code) as first:
        assert first.heard() == "2"
        with pytest.raises(MemoryError):
            cuda.allocate(most)
        first.signal(signal.SIGKILL)
        first.ended()
    wait_until(lambda: cuda.free_bytes() >= most, 30, "somebody still maps the memory of an engine that is gone")
    second = stack.enter_context(node.rank(plain_shard(block, BLOCKS), engine="second")).register().ready()
    assert second.match(PREFIX[:2])[0] == 2
    assert node.observed.mover() == mover
    assert stayer.call("heartbeat")["ready"]


def test_an_engine_that_leaves_in_the_middle_of_a_copy_is_let_go_when_the_device_is_done(
    node: GpuNode, stack: ExitStack
) -> None:
    stayer = stack.enter_context(node.rank(plain_shard(4096, 1), engine="stayer")).register().ready()
    before = node.cuda.free_bytes()
    writer = node.rank(plain_shard(BIG, BLOCKS), engine="writer").register().ready()
    fill(writer)
    node.observed.faults("store=delay:0.02")
    writer.ask_store(PREFIX, range(BLOCKS))
    wait_until(lambda: not writer.control.quiet())
    writer.close()
    wait_until(lambda: node.cuda.free_bytes() == before)
    assert stayer.call("heartbeat")["ready"]
    assert node.observed.stats()["pool_resident_blocks"] == 0


def test_a_withdrawn_store_is_never_kept_and_a_withdrawn_load_writes_no_more(node: GpuNode, stack: ExitStack) -> None:
    writer, reader = big_pair(node, stack)
    node.observed.faults("store=delay:0.03;load=delay:0.03")
    job = writer.next_job()
    request = writer.ask_store(PREFIX, range(BLOCKS), job=job)
    wait_until(lambda: not writer.control.quiet())
    writer.control.withdraw_through(job)
    wait_until(writer.control.quiet)
    writer.memory[:] = 0xAB
    assert writer.reply(request).result()["kept"] == 0
    fill(writer)
    assert writer.store(PREFIX, range(BLOCKS)) == BLOCKS
    _, lease = reader.match(PREFIX)
    job = reader.next_job()
    request = reader.ask_load(lease, range(BLOCKS), job=job)
    wait_until(lambda: not reader.control.quiet())
    reader.control.withdraw_through(job)
    wait_until(reader.control.quiet)
    reader.memory[:] = 0xCD
    with pytest.raises(CopyFailed):
        reader.reply(request).result()
    assert (reader.memory == 0xCD).all()
    assert reader.call("release", lease=lease)["released"]
    node.observed.faults("")
    assert_all_works(writer, reader)


# -- refusals -----------------------------------------------------------------------------------------------


def test_what_cannot_be_opened_is_refused_in_one_line(node: GpuNode, stack: ExitStack) -> None:
    rank = stack.enter_context(node.rank(plain_shard(4096, 2), engine="strange")).hello()
    where = rank._where()
    (handle,) = where["regions"]
    rank.register(regions=[handle | {"token": bytes(64)}])
    assert re.search(r"cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_HANDLE \(400\); run hpkvd in", rank.problem())
    rank.register(regions=[handle | {"token": b"short"}])
    assert "token of 5 bytes" in rank.problem()
    rank.register(regions=[handle | {"offset": DEVICE_BYTES}])
    assert "in an allocation of" in rank.problem()
    with pytest.raises(NoSuchDevice, match="maps memory of kind cuda_ipc or cuda_fd, not memfd"):
        rank.register(regions=[rank.registration()["control"]])
    elsewhere = "cuda:GPU-12345678-0000-4000-8000-000000000001"
    rank.register(device=elsewhere)
    assert re.search(r"no GPU GPU-12345678-\S+ here|CUDA_ERROR_NO_DEVICE", rank.problem())
    rank.register().ready()
    assert rank.store(hashes("x"), [0]) == 1


def test_a_node_without_a_driver_says_so(cuda: FakeCuda) -> None:
    with observed_daemon(ImpatientGpuDaemon, **cuda.environment(LD_LIBRARY_PATH="")) as observed:
        node = GpuNode(observed, cuda)
        with node.rank(plain_shard(4096, 1)) as rank:
            rank.register()
            assert re.search(
                r"no NVIDIA driver here: .*libcuda.so.1.*; run hpkvd where nvidia-smi works", rank.problem()
            )
        observed.assert_sound()


OPENING = [
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetUuid",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuStreamCreate",
    "cuEventCreate",
    "cuGetProcAddress_v2",
    "cuIpcOpenMemHandle_v2",
]
CODES = [2, 999, 801]


@pytest.mark.parametrize(("call", "code"), [(call, CODES[n % len(CODES)]) for n, call in enumerate(OPENING)])
def test_a_call_that_fails_while_a_gpu_is_opened_refuses_it_and_may_be_tried_again(
    node: GpuNode, stack: ExitStack, call: str, code: int
) -> None:
    node.fail(f"{call} 1 {code}")
    rank = stack.enter_context(node.rank(plain_shard(BIG, BLOCKS), engine="writer")).register()
    problem = rank.problem()
    assert f"{call}: CUDA_ERROR_" in problem
    assert f"({code}); " in problem
    node.calm()
    rank.register().ready()
    fill(rank)
    assert rank.store(PREFIX, range(BLOCKS)) == BLOCKS


COPYING = ["cuMemcpyBatchAsync", "cuEventRecord", "cuEventQuery", "cuMemHostRegister_v2"]


@pytest.mark.parametrize(("nth", "code"), [(1, 2), (2, 700)])
@pytest.mark.parametrize("call", COPYING)
def test_a_call_that_fails_during_copies_costs_copies_and_no_byte(
    node: GpuNode, stack: ExitStack, call: str, nth: int, code: int
) -> None:
    writer, reader = big_pair(node, stack)
    node.fail(f"{call} {nth} {code}")
    assert writer.store(PREFIX, range(BLOCKS)) in (0, BLOCKS)
    node.calm()
    for rank in (writer, reader):
        wait_until(lambda rank=rank: rank.call("heartbeat")["ready"])  # type: ignore[misc]
    assert writer.store(PREFIX, range(BLOCKS)) == BLOCKS
    hit, lease = reader.match(PREFIX)
    assert hit == BLOCKS
    node.fail(f"{call} {nth} {code}")
    reply = reader.reply(reader.ask_load(lease, range(BLOCKS)))
    if reply.ok:
        assert [reader.block(n).tobytes() for n in range(BLOCKS)] == [content(key, BIG) for key in PREFIX]
    else:
        assert re.search(rf"{call}: CUDA_ERROR_\w+ \({code}\); ", reply.body["message"])
    node.calm()
    reader.call("release", lease=lease)
    for rank in (writer, reader):
        wait_until(lambda rank=rank: rank.call("heartbeat")["ready"])  # type: ignore[misc]
    assert_all_works(writer, reader)


def test_a_handle_that_cannot_be_closed_ends_the_mover_and_with_it_the_mapping(node: GpuNode, stack: ExitStack) -> None:
    writer, reader = big_pair(node, stack)
    pid = node.observed.mover()
    node.fail("cuIpcCloseMemHandle 1 1")
    writer.call("unregister")
    wait_until(lambda: is_gone(pid))
    node.calm()
    reader.ready()
    observed: Observed = node.observed
    assert observed.mover() != pid
