"""Copies touch the bytes that were registered and no other: pages that nobody may touch lie on both sides of them.

A byte too many is the end of a process here, so the copies run in one of their own.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from signal import SIGSEGV
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpkv_client.errors import ProtocolError
from hpkv_client.memory import SharedMemory, map_shared
from hpkv_client.topology import canonical_layout, place
from hpkv_client.types import Layer, MemoryHandle, RankShard, Run
from hpkv_client.wire import decode_request, encode_request, handle_to_wire, shard_from_wire, shard_to_wire
from hpkv_daemon.movers.copier import AttachedRank

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = mmap.PAGESIZE
PROT_NONE = 0

Bytes = npt.NDArray[np.uint8]


def forbid(mapping: mmap.mmap, offset: int) -> None:
    """From now on whoever touches the page at this offset through this mapping is ended."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + offset
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")


class Guarded:
    """``size`` bytes in shared memory with a page on either side that can be forbidden. A context manager.

    They end where the page behind them begins, or begin where the page before them ends; random bytes fill what is
    left between the pages.
    """

    def __init__(self, size: int, flush_end: bool, seed: int) -> None:
        between = -(-size // PAGE) * PAGE
        self.start = PAGE + (between - size if flush_end else 0)
        self.size = size
        self._behind = PAGE + between
        self.shared = SharedMemory(between + 2 * PAGE)
        self.between: Bytes = np.frombuffer(self.shared.mapping, np.uint8)[PAGE : self._behind]
        """All between the two pages."""
        self.between[:] = np.random.default_rng(seed).integers(0, 256, between, np.uint8)
        self.bytes: Bytes = self.between[self.start - PAGE :][:size]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self.bytes, self.between
        self.shared.close()

    def guard(self, mapping: mmap.mmap) -> mmap.mmap:
        """Forbid both pages in a mapping of the memory."""
        forbid(mapping, 0)
        forbid(mapping, self._behind)
        return mapping


def over_the_wire(shard: RankShard, sizes: list[int]) -> RankShard:
    """The shard as a daemon reads it from the request of a rank whose memory regions have these sizes."""
    handles = [MemoryHandle("memfd", size, pid=1, fd=1, name="hpkv-") for size in sizes]
    body: dict[str, Any] = {
        "rank": 0,
        "world": 1,
        "namespace": bytes(32),
        "model": "m",
        "device": "cpu",
        "regions": [handle_to_wire(handle) for handle in handles],
        **shard_to_wire(shard),
    }
    return shard_from_wire(decode_request(encode_request("register", 1, 1, body)).body)


def needed(shard: RankShard) -> list[int]:
    """The smallest regions that the shard fits into."""
    runs = [run for layer in shard.layers for run in layer.runs]
    sizes = [1] * (1 + max(run.region for run in runs))
    for run in runs:
        sizes[run.region] = max(sizes[run.region], run.last_local_byte(shard.blocks))
    return sizes


sizes_of_fragments = st.integers(1, 70) | st.sampled_from((PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5))
blocks_of_engines = st.integers(1, 4)


@st.composite
def any_shards(draw: st.DrawFn) -> RankShard:
    """Runs of which nothing is true but that they stay inside and do not move more than there is."""
    layers = []
    for number in range(draw(st.integers(1, 3))):
        runs = []
        for _ in range(draw(st.integers(1, 3))):
            fragment = draw(sizes_of_fragments)
            steps = st.integers(0, 3 * fragment)
            runs.append(
                Run(
                    region=draw(st.integers(0, 1)),
                    local_offset=draw(st.integers(0, 100)),
                    block_stride=draw(st.integers(0, 5 * fragment + 100)),
                    canonical_offset=draw(st.integers(0, 50)),
                    fragment=fragment,
                    count=draw(st.integers(1, 5)),
                    local_step=draw(steps),
                    canonical_step=draw(steps),
                )
            )
        room = max(max(run.last_canonical_byte() for run in runs), sum(run.size for run in runs))
        room += draw(st.integers(0, 9))
        layers.append(Layer(f"layer.{number}", room, tuple(runs)))
    return RankShard(tuple(layers), draw(blocks_of_engines))


@st.composite
def whole_shards(draw: st.DrawFn) -> RankShard:
    """Runs that make up whole blocks, as those of engines do: interleaved fragments, with gaps in the rank's memory."""
    layers = []
    for number in range(draw(st.integers(1, 3))):
        ways, count, fragment = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(sizes_of_fragments)
        gap, first = draw(st.integers(0, 40)), draw(st.integers(0, 40))
        step = ways * (fragment + gap)
        stride = count * step + draw(st.integers(0, 40))
        runs = [
            Run(
                region=number % 2,
                local_offset=first + way * (fragment + gap),
                block_stride=stride,
                canonical_offset=way * fragment,
                fragment=fragment,
                count=count,
                local_step=step,
                canonical_step=ways * fragment,
            )
            for way in range(ways)
        ]
        layers.append(Layer(f"layer.{number}", ways * count * fragment, tuple(runs)))
    return RankShard(tuple(layers), draw(blocks_of_engines))


def placed(shard: RankShard) -> tuple[Run, ...]:
    """The runs with their place in the slot, layer after layer."""
    runs, base = [], 0
    for layer in shard.layers:
        runs += [replace(run, canonical_offset=base + run.canonical_offset) for run in layer.runs]
        base += layer.canonical_bytes
    return tuple(runs)


class Copy:
    """What a copy of one block makes of memory regions and slot, byte by byte."""

    def __init__(self, regions: list[Bytes], slot: Bytes, runs: tuple[Run, ...], block: int, load: bool) -> None:
        self.regions = [region.copy() for region in regions]
        self.slot = slot.copy()
        targets = self.regions if load else [self.slot]
        self._writers = {id(target): np.zeros(len(target), int) for target in targets}
        for run in runs:
            for number in range(run.count):
                local = run.local_offset + block * run.block_stride + number * run.local_step
                canonical = run.canonical_offset + number * run.canonical_step
                memory = self.regions[run.region][local : local + run.fragment]
                part = self.slot[canonical : canonical + run.fragment]
                target, into = (self.regions[run.region], local) if load else (self.slot, canonical)
                self._writers[id(target)][into : into + run.fragment] += 1
                (memory if load else part)[:] = part if load else memory

    def check(self, regions: list[Bytes], slot: Bytes) -> None:
        """Nothing else has changed, and what has is right; bytes that are written twice have no order."""
        for wanted, seen in zip((*self.regions, self.slot), (*regions, slot), strict=True):
            sure = self._writers.get(id(wanted), np.zeros(len(wanted), int)) < 2
            assert (wanted[sure] == seen[sure]).all()


def check_limits(shard: RankShard) -> None:
    """A daemon takes the shard for regions that it just fits into, and for none that is a byte smaller."""
    sizes = needed(shard)
    assert over_the_wire(shard, sizes) == shard
    for region in {run.region for layer in shard.layers for run in layer.runs}:
        smaller = [size - (number == region) for number, size in enumerate(sizes)]
        if smaller[region]:
            with pytest.raises(ProtocolError, match="leaves its region"):
                over_the_wire(shard, smaller)


def check_copies(shard: RankShard, runs: tuple[Run, ...], flush_end: bool) -> None:
    """Store and load the first and the last block between guarded memory and a guarded slot; look at every byte."""
    slot_bytes = sum(layer.canonical_bytes for layer in shard.layers)
    with ExitStack() as stack:
        regions = [stack.enter_context(Guarded(size, flush_end, seed)) for seed, size in enumerate(needed(shard))]
        slot = stack.enter_context(Guarded(slot_bytes, flush_end, len(regions)))
        pool = slot.guard(map_shared(slot.shared.handle))
        inside = [replace(run, local_offset=run.local_offset + regions[run.region].start) for run in runs]
        rank = AttachedRank([region.shared.handle for region in regions], None, inside, shard.blocks)
        for region, mapping in zip(regions, rank._mappings, strict=True):
            region.guard(mapping)
        for block in {0, shard.blocks - 1}:
            for load in (False, True):
                slot.bytes[:] = np.random.default_rng(block).integers(0, 256, slot_bytes, np.uint8)
                wanted = Copy([region.bytes for region in regions], slot.bytes, runs, block, load)
                fillers = [filler(memory) for memory in (*regions, slot)]
                (rank.load if load else rank.store)(pool, slot.start, block)
                wanted.check([region.bytes for region in regions], slot.bytes)
                assert [filler(memory) for memory in (*regions, slot)] == fillers
        rank.close()
        pool.close()


def filler(memory: Guarded) -> bytes:
    """What lies between the bytes and the page that they are not flush with."""
    first = memory.start - PAGE
    return memory.between[:first].tobytes() + memory.between[first + memory.size :].tobytes()


# -- what runs in a process of its own ----------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(any_shards(), st.booleans())
def check_any_shard(shard: RankShard, flush_end: bool) -> None:
    """Whatever the daemon lets a rank register."""
    sys.stderr.write(f"{shard} {flush_end}\n")
    check_limits(shard)
    check_copies(shard, placed(shard), flush_end)


@settings(deadline=None, max_examples=150)
@given(whole_shards(), st.booleans())
def check_whole_shard(shard: RankShard, flush_end: bool) -> None:
    """With the runs that the daemon makes of an engine's."""
    sys.stderr.write(f"{shard} {flush_end}\n")
    check_limits(shard)
    check_copies(shard, place(shard, canonical_layout([shard])), flush_end)


def copy_beside(load: bool, where: str) -> None:
    """Copy one block by runs that begin or end a byte outside."""
    shard = RankShard((Layer("layer.0", 100, (Run(0, 0, 100, 0, 100),)),), 2)
    local = {"before the memory": -1, "behind the memory": 1}.get(where, 0)
    canonical = {"before the slot": -1, "behind the slot": 1}.get(where, 0)
    run = replace(shard.layers[0].runs[0], local_offset=local, canonical_offset=canonical)
    flush_end = where.startswith("behind")
    memory, slot = Guarded(200, flush_end, 0), Guarded(100, flush_end, 1)
    pool = slot.guard(map_shared(slot.shared.handle))
    run = replace(run, local_offset=memory.start + local)
    rank = AttachedRank([memory.shared.handle], None, [run], shard.blocks)
    memory.guard(rank._mappings[0])
    (rank.load if load else rank.store)(pool, slot.start, shard.blocks - 1 if flush_end else 0)


# -- the tests ----------------------------------------------------------------------------------------------


def run_apart(call: str) -> subprocess.CompletedProcess[str]:
    """Run a function of this module in a process of its own."""
    code = f"from tests.unit.test_guard_pages import *; {call}"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("check", ["check_any_shard", "check_whole_shard"])
def test_a_copy_touches_the_registered_bytes_and_the_slot_and_nothing_beside_them(check: str) -> None:
    done = run_apart(f"{check}()")
    last = "\n".join(done.stderr.splitlines()[-20:])
    assert done.returncode == 0, f"exit status {done.returncode} after {last}"
    assert done.stderr.count("RankShard") >= 100


@pytest.mark.parametrize("load", [False, True], ids=["store", "load"])
@pytest.mark.parametrize(
    "where", ["nowhere", "before the memory", "behind the memory", "before the slot", "behind the slot"]
)
def test_a_single_byte_beside_them_ends_the_process(where: str, load: bool) -> None:
    done = run_apart(f"copy_beside({load}, {where!r})")
    assert done.returncode == (0 if where == "nowhere" else -SIGSEGV), done.stderr
