"""Memory without handles, mapped page by page: it travels as descriptors, and nobody keeps one."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hpkv_vllm.cuda_export import export
from hpkv_vllm.regions import GpuMemory

from hpkv_client import descriptors
from hpkv_client.errors import LayoutRefused, NotPermitted
from hpkv_client.session import SessionKeeper
from hpkv_client.wire import handle_to_wire
from tests.cuda.gpus import (
    DEVICE_BYTES,
    FIRST,
    PAGE_BYTES,
    SECOND,
    FakeCuda,
    GpuNode,
    GpuRank,
    ImpatientGpuDaemon,
    gpu_tensor,
)
from tests.support import content, hashes, observed_daemon, plain_shard, wait_until

BLOCKS = 6
PREFIX = hashes(*range(BLOCKS))
BLOCK = 1 << 20
"""Blocks lie across the borders of the pieces."""
SIZE = 8192
DESCRIPTOR, FABRIC = 1, 8
MANY = 150
"""Pieces: more than travel at once."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Whoever is entered here leaves before the daemon is looked at."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mover on a busy machine takes its time to start."""
    monkeypatch.setattr(descriptors, "ANSWER_SECONDS", 60.0)


def a_rank(node: GpuNode, stack: ExitStack, name: str, paged: int = 3, gpu: str = FIRST) -> GpuRank:
    return stack.enter_context(node.rank(plain_shard(BLOCK, BLOCKS), engine=name, gpu=gpu, paged=paged))


def fill(rank: GpuRank) -> None:
    for number, key in enumerate(PREFIX):
        rank.block(number)[:] = np.frombuffer(content(key, BLOCK), np.uint8)


def assert_all_works(writer: GpuRank, reader: GpuRank) -> None:
    fill(writer)
    assert writer.store(PREFIX, range(BLOCKS)) == BLOCKS
    hit, lease = reader.match(PREFIX)
    assert hit == BLOCKS
    reader.memory[:] = 0
    places = [3, 0, 5, 1, 4, 2]
    assert reader.load(lease, places) == BLOCKS
    assert [reader.block(n).tobytes() for n in places] == [content(key, BLOCK) for key in PREFIX]
    assert reader.call("release", lease=lease)["released"]


def open_files(pid: int) -> set[str]:
    """What a process holds open of a GPU's memory."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(f"{entry.name} {entry.readlink()}")
    return {one for one in found if "/memory-" in one}


def mapped_bytes(pid: int, cuda: FakeCuda) -> int:
    """Memory of GPUs that a process maps."""
    lines = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if str(cuda.directory) in line]
    ranges = [line.split()[0].split("-") for line in lines]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


@pytest.mark.parametrize(("writer", "reader"), [(3, 3), (3, 0), (0, 3), (1, 7)])
def test_blocks_across_pieces_are_stored_and_loaded_byte_for_byte(
    node: GpuNode, stack: ExitStack, writer: int, reader: int
) -> None:
    ranks = [
        a_rank(node, stack, "writer", writer).register(),
        a_rank(node, stack, "reader", reader, SECOND).register(),
    ]
    for rank in ranks:
        if rank.paged:
            rank.hand_over()
        rank.ready()
    assert_all_works(ranks[0], ranks[1])


def test_nobody_keeps_a_descriptor_and_who_leaves_is_unmapped(node: GpuNode, stack: ExitStack, cuda: FakeCuda) -> None:
    stayer = a_rank(node, stack, "stayer", paged=0).register().ready()
    mover = node.observed.mover()
    # The fake keeps its own handle on what is mapped; nothing may come on top of it.
    held, ours, free = open_files(mover), open_files(os.getpid()), cuda.free_bytes()
    mapped = mapped_bytes(mover, cuda)
    rank = node.rank(plain_shard(BLOCK, BLOCKS), engine="paged", paged=3)
    own = len(open_files(os.getpid()) - ours)
    rank.register().hand_over().ready()
    assert len(open_files(os.getpid()) - ours) == own
    assert len(open_files(mover) - held) == 3
    assert mapped_bytes(mover, cuda) == mapped + 4 * PAGE_BYTES
    assert not open_files(node.observed.handle.pid)
    rank.call("unregister")
    # Unmapped first, then closed.
    wait_until(lambda: mapped_bytes(mover, cuda) == mapped and open_files(mover) == held)
    rank.close()
    assert cuda.free_bytes() == free
    assert node.observed.mover() == mover
    assert stayer.call("heartbeat")["ready"]


def test_what_takes_many_pieces_comes_in_many_parcels(node: GpuNode, stack: ExitStack, cuda: FakeCuda) -> None:
    # More than this GPU has room for: what counts is that nothing is kept while they come.
    rank = a_rank(node, stack, "refused", paged=3).register()
    name = wait_until(lambda: rank.call("heartbeat")["descriptors"])
    seen = []

    def no_memory(index: int) -> int:
        seen.append(index)
        return os.open("/dev/null", os.O_RDONLY)

    with pytest.raises(LayoutRefused, match="cuMemImportFromShareableHandle"):
        descriptors.hand_over(node.socket.with_name(name), rank.pages._name, [PAGE_BYTES] * MANY, no_memory)
    assert seen == list(range(descriptors.MOST_DESCRIPTORS))
    assert re.search(r"cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE \(1\)", rank.problem())
    assert rank.call("heartbeat")["descriptors"] == ""
    rank.register().hand_over().ready()
    assert mapped_bytes(node.observed.mover(), cuda) == 4 * PAGE_BYTES


def test_an_engine_killed_in_the_middle_leaves_nothing_behind(node: GpuNode, stack: ExitStack, cuda: FakeCuda) -> None:
    stayer = a_rank(node, stack, "stayer", paged=0).register().ready()
    mover, before = node.observed.mover(), cuda.free_bytes()
    held = open_files(mover)
    code = (
        f"one = rank(plain_shard({BLOCK}, {BLOCKS}), engine='first', paged=4).register()\n"
        "path = socket.with_name(wait_until(lambda: one.call('heartbeat')['descriptors']))\n"
        "from hpkv_client import descriptors\n"
        "descriptors.MOST_DESCRIPTORS = 2\n"
        "send = one.pages._open\n"
        "def half(index):\n"
        "    if index == 2: say('half'); wait()\n"
        "    return send(index)\n"
        "one.pages._open = half\n"
        "while not one.pages.hand_over(path): pass\n"
    )
    with node.child(code) as first:
        assert first.heard() == "half"
        wait_until(lambda: len(open_files(mover) - held) == 2)
        assert cuda.free_bytes() == before - 4 * PAGE_BYTES
        first.signal(signal.SIGKILL)
        first.ended()
    wait_until(lambda: cuda.free_bytes() == before, 30, "somebody still maps the memory of an engine that is gone")
    assert open_files(mover) == held
    assert stayer.call("heartbeat")["ready"]


def test_the_memory_of_a_killed_engine_is_free_for_the_next(node: GpuNode, stack: ExitStack, cuda: FakeCuda) -> None:
    stayer = a_rank(node, stack, "stayer", paged=0).register().ready()
    before = cuda.free_bytes()
    code = (
        f"one = rank(plain_shard({BLOCK}, {BLOCKS}), engine='first', paged=3).register().hand_over().ready()\n"
        "say(one.store(hashes(0, 1), [0, 1])); wait()"
    )
    with node.child(code) as first:
        assert first.heard() == "2"
        first.signal(signal.SIGKILL)
        first.ended()
    wait_until(lambda: cuda.free_bytes() == before, 30, "somebody still maps the memory of an engine that is gone")
    second = a_rank(node, stack, "second").register().hand_over().ready()
    assert second.match(PREFIX[:2])[0] == 2
    assert stayer.call("heartbeat")["ready"]


def test_a_mover_that_was_killed_is_given_the_descriptors_again(node: GpuNode, stack: ExitStack) -> None:
    writer, reader = (a_rank(node, stack, name).register().hand_over().ready() for name in ("writer", "reader"))
    before = node.observed.mover()
    os.kill(before, signal.SIGKILL)
    for rank in (writer, reader):
        rank.hand_over().ready()
    assert node.observed.mover() != before
    assert_all_works(writer, reader)


def test_the_engines_keeper_hands_over_when_it_is_asked_also_by_the_next_daemon(cuda: FakeCuda) -> None:
    with observed_daemon(ImpatientGpuDaemon, **cuda.environment()) as observed:
        node = GpuNode(observed, cuda)
        with node.rank(plain_shard(BLOCK, BLOCKS), engine="keeper", paged=3) as rank:
            memory = GpuMemory(cuda.driver, lambda: None)
            body = rank.registration()
            body["regions"] = [handle_to_wire(memory.find(gpu_tensor(cuda, rank.pointer, rank.size)).handle)]
            hello = {"name": "keeper", "engine": "keeper"}
            keeper = SessionKeeper(node.socket, hello, body, hand_over=memory.hand_over)
            keeper.start()
            try:
                first = keeper.wait(30.0, lambda link: link.usable)
                assert first.usable
                observed.handle.kill()
                observed.handle.restart()
                second = keeper.wait(30.0, lambda link: link.usable and link.epoch != first.epoch)
                assert second.usable
            finally:
                keeper.stop()
        # Also the socket that the killed daemon left behind.
        wait_until(lambda: not node.socket.with_name(f"{node.socket.name}.{FIRST}").exists())
        observed.assert_sound()


def test_a_handing_over_that_was_interrupted_goes_on_with_what_is_missing(
    node: GpuNode, stack: ExitStack, cuda: FakeCuda
) -> None:
    rank, other = a_rank(node, stack, "two").hello(), a_rank(node, stack, "its other memory")
    cuda.driver.enter(cuda.devices[FIRST])
    memory = GpuMemory(cuda.driver, lambda: None)
    regions = [memory.find(gpu_tensor(cuda, one.pointer, one.size)) for one in (rank, other)]
    rank.call("register", **rank.registration(regions=[handle_to_wire(region.handle) for region in regions]))
    path = node.socket.with_name(wait_until(lambda: rank.call("heartbeat")["descriptors"], 10))
    first = regions[0].pages
    assert first is not None
    wait_until(lambda: first.hand_over(path), 10)
    assert not rank.call("heartbeat")["ready"]
    memory.hand_over(path)
    rank.ready()


def test_memory_that_the_engine_took_away_is_refused_in_its_words(
    node: GpuNode, stack: ExitStack, cuda: FakeCuda
) -> None:
    rank = a_rank(node, stack, "asleep").register()
    cuda.unmap_pages(rank._allocation)
    with pytest.raises(Exception, match="cuMemRetainAllocationHandle"):
        rank.hand_over()
    assert re.search(
        r"the engine cannot share its memory: cuMemRetainAllocationHandle: CUDA_ERROR_INVALID_VALUE", rank.problem()
    )


# -- who may, and what is refused -----------------------------------------------------------------------------


def test_a_stranger_is_not_listened_to_and_nonsense_ends_only_its_connection(node: GpuNode, stack: ExitStack) -> None:
    rank = a_rank(node, stack, "paged").register()
    path = node.socket.with_name(wait_until(lambda: rank.call("heartbeat")["descriptors"]))
    assert path.stat().st_mode & 0o777 == node.socket.stat().st_mode & 0o777
    code = (
        "import socket as s; from hpkv_client import descriptors; from hpkv_client.errors import HpkvError\n"
        "try: descriptors.hand_over(Path(wait()), wait(), [1 << 21], lambda i: os.open('/dev/null', 0))\n"
        "except HpkvError as problem: say(type(problem).__name__)\n"
    )
    with node.child(code) as stranger:
        stranger.tell(path)
        stranger.tell(rank.pages._name)
        assert stranger.heard() == "Unreachable"
    for packet in (b"\xc1", msgpack.packb(7), msgpack.packb(["x", 1, [1], ""]), msgpack.packb(["x", -1, [], "p"])):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.settimeout(20)
            channel.connect(str(path))
            channel.send(packet)
            assert "makes no sense" in msgpack.unpackb(channel.recv(4096))[0]
            assert channel.recv(4096) == b""
    assert not descriptors.hand_over(path, "another", [1 << 21], lambda _: os.open("/dev/null", os.O_RDONLY))
    rank.hand_over().ready()
    assert not rank.pages.hand_over(path)


def test_memory_of_another_process_is_refused(node: GpuNode, stack: ExitStack) -> None:
    rank = a_rank(node, stack, "paged").hello()
    (handle,) = rank.registration()["regions"]
    with pytest.raises(NotPermitted, match="another process than the sender"):
        rank.register(regions=[handle | {"pid": os.getppid()}])


def test_a_region_behind_the_end_of_its_pieces_is_refused(node: GpuNode, stack: ExitStack) -> None:
    rank = a_rank(node, stack, "paged").hello()
    body = rank.registration()
    body["regions"][0]["offset"] = 2 * PAGE_BYTES
    rank.call("register", **body)
    rank.hand_over()
    assert "in an allocation of" in rank.problem()


@pytest.mark.parametrize(
    ("types", "words"),
    [
        (0, r"for one process alone; .*--enable-cumem-allocator.*TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1"),
        (FABRIC, r"over a fabric alone; start vLLM without .*expandable_segments:True"),
    ],
)
def test_memory_that_was_not_made_for_it_is_found_out_at_once_and_the_setting_is_named(
    cuda: FakeCuda, types: int, words: str
) -> None:
    pointer = cuda.map_pages(SIZE, types)
    with pytest.raises(LayoutRefused, match=words):
        export(cuda.driver, pointer, SIZE)
    cuda.free(pointer)
    assert cuda.free_bytes() == DEVICE_BYTES


def test_an_export_names_the_process_the_memory_and_the_place_in_it(cuda: FakeCuda) -> None:
    pointer = cuda.map_pages(5 * PAGE_BYTES, pieces=3)
    before = len(os.listdir("/proc/self/fd"))
    device, handle, pages = export(cuda.driver, pointer + PAGE_BYTES + 4096, 4 * PAGE_BYTES - 4096)
    assert (device, handle.kind, handle.pid) == (f"cuda:{FIRST}", "cuda_fd", os.getpid())
    assert (handle.offset, handle.size) == (PAGE_BYTES + 4096, 4 * PAGE_BYTES - 4096)
    assert pages is not None
    assert [piece.size for piece in pages._pieces] == [2 * PAGE_BYTES, 2 * PAGE_BYTES, PAGE_BYTES]
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(Exception, match="cuMemGetAddressRange_v2"):
        export(cuda.driver, pointer + PAGE_BYTES, 5 * PAGE_BYTES)
    cuda.free(pointer)


@pytest.mark.parametrize("call", ["cuMemExportToShareableHandle", "cuMemRetainAllocationHandle"])
def test_an_export_that_the_driver_refuses_says_so_while_the_engine_starts(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    pointer = cuda.map_pages(SIZE)
    with cuda.failing(monkeypatch, f"{call} 1 801"), pytest.raises(LayoutRefused) as caught:
        export(cuda.driver, pointer, SIZE)
    assert f"{call}: CUDA_ERROR_NOT_SUPPORTED (801)" in str(caught.value)
    cuda.free(pointer)
