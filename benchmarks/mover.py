"""How fast the mover process copies blocks, against a plain memcpy of such blocks between the same memories.

The engine's memory is laid out as an engine lays it out: one plane a layer, so that a block is one run in each of
56 planes. Every sample copies blocks that nobody touched for a whole lap through memory far larger than the cache.
"""

from __future__ import annotations

import random
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle, islice
from unittest.mock import patch

from benchmarks.floor import MemcpyFloor
from benchmarks.memory import affordable, await_mapped, shared
from benchmarks.paired import Pairs, alternate
from benchmarks.report import Aim, Found, Measure, main, ratio, say, speeds
from hpkv_client.control import PAGE_BYTES
from hpkv_client.memory import SharedMemory
from hpkv_client.topology import canonical_layout, place
from hpkv_client.types import Layer, RankShard, Run
from hpkv_daemon.movers import host, parent
from hpkv_daemon.movers.base import Attached, Attachment, CopyJob, Direction, Done, Event, Outcome

RUNS = 56
"""Layers, and so runs of a block."""
SIDE_BYTES = 2 << 30
"""Engine memory, and as much pool."""
SMALLEST_SIDE_BYTES = 512 << 20
SAMPLE_BYTES = 512 << 20
PLAIN, STREAMING = "plain copies", "non-temporal"
AIMS = {
    (PLAIN, 32 << 10): Aim(0.92),
    (PLAIN, 128 << 10): Aim(0.95),
    (PLAIN, 1 << 20): Aim(0.97),
    (STREAMING, 128 << 10): Aim(1.2),
}
RUN_BYTES = (32 << 10, 128 << 10, 1 << 20)
WAIT_SECONDS = 120.0

Walk = Iterator[tuple[list[int], list[int]]]
"""Block ids and pool offsets of one sample after another."""


class Layout:
    """One plane a layer in the engine's memory; a block is one run of each. In the pool it is contiguous."""

    def __init__(self, side_bytes: int, run: int) -> None:
        self.run = run
        self.blocks = side_bytes // RUNS // run
        self.plane = self.blocks * run
        self.block_bytes = run * RUNS
        self.sample_blocks = max(1, min(self.blocks // 4, SAMPLE_BYTES // self.block_bytes))
        self.sample_bytes = self.sample_blocks * self.block_bytes
        self.lap_samples = -(-self.blocks // self.sample_blocks)

    def attachment(self, engine: SharedMemory, control: SharedMemory) -> Attachment:
        """What the daemon tells a mover about an engine of this layout."""
        layers = [Layer(f"layers.{i}", self.run, (Run(0, i * self.plane, self.run, 0, self.run),)) for i in range(RUNS)]
        shard = RankShard(tuple(layers), self.blocks)
        runs = place(shard, canonical_layout([shard]))
        return Attachment((engine.handle,), control.handle, runs, self.blocks)

    def walk(self, seed: int) -> Walk:
        """Blocks and pool offsets of one sample after another: all of them in random order, lap by lap."""
        order = random.Random(seed)
        blocks, slots = list(range(self.blocks)), [slot * self.block_bytes for slot in range(self.blocks)]
        order.shuffle(blocks)
        order.shuffle(slots)
        pairs = cycle(zip(blocks, slots, strict=True))
        while True:
            sample = list(islice(pairs, self.sample_blocks))
            yield [block for block, _ in sample], [slot for _, slot in sample]


class TimedMover:
    """The real mover process behind the daemon's side of its link, one job at a time."""

    def __init__(self, mover: host.HostMover) -> None:
        self._mover = mover
        self._attachment = 0
        self._jobs = 0

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._mover.pid

    def attach(self, what: Attachment) -> None:
        """Map a rank's memory in place of the one before."""
        if self._attachment:
            self._mover.detach(self._attachment)
        self._attachment += 1
        self._mover.attach(self._attachment, what)
        event = self._next()
        if not isinstance(event, Attached) or event.problem:
            raise RuntimeError(f"the mover did not attach: {event}")

    def copy(self, direction: Direction, blocks: Sequence[int], slots: Sequence[int]) -> float:
        """Seconds from handing over a job until its end is known here."""
        self._jobs += 1
        job = CopyJob(self._attachment, direction, self._jobs, tuple(slots), tuple(blocks))
        started = time.perf_counter()
        self._mover.submit(job)
        event = self._next()
        taken = time.perf_counter() - started
        if not isinstance(event, Done) or event.outcome is not Outcome.OK:
            raise RuntimeError(f"the mover did not copy: {event}")
        return taken

    def _next(self) -> Event:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            self._mover.flush()
            select.select([self._mover], [], [], 1.0)
            for event in self._mover.poll():
                return event
        raise RuntimeError(f"the mover said nothing for {WAIT_SECONDS:.0f} s")


@contextmanager
def mover_process(pool: SharedMemory, tunables: str) -> Iterator[TimedMover]:
    """A mover under these tunables of glibc."""
    with patch.object(parent, "_TUNABLES", tunables):
        mover = host.HostMover(pool.handle.fd, pool.handle.size)
    try:
        yield TimedMover(mover)
    finally:
        mover.close()
        mover.ended(WAIT_SECONDS)


def prove_equal(layout: Layout, floor: MemcpyFloor, mover: TimedMover, engine: SharedMemory) -> None:
    """Raise unless floor and mover understand blocks alike: what one stores, the other loads."""
    starts = [i * layout.plane for i in range(RUNS)]
    source, target = (slice(block * layout.run, (block + 1) * layout.run) for block in (1, 2))
    planes = [memoryview(engine.mapping)[start : start + layout.plane] for start in starts]
    for i, plane in enumerate(planes):
        plane[source] = random.Random(i).randbytes(layout.run)
        plane[target] = bytes(layout.run)
    floor.copy(True, [1], [0], layout.run, RUNS, layout.plane)
    mover.copy(Direction.LOAD, [2], [0])
    same = all(plane[source] == plane[target] for plane in planes)
    for plane in planes:
        plane.release()
    if not same:
        raise RuntimeError("floor and mover copy different bytes")


def measure(layout: Layout, engine: SharedMemory, pool: SharedMemory, rounds: int) -> list[Measure]:
    """Stores and loads with one length of runs."""
    found = []
    with ExitStack() as stack:
        control = stack.enter_context(shared(PAGE_BYTES))
        memories = (engine.handle.fd, engine.handle.size, pool.handle.fd, pool.handle.size)
        floor = stack.enter_context(MemcpyFloor(*memories))
        movers = {
            PLAIN: stack.enter_context(mover_process(pool, "")),
            STREAMING: stack.enter_context(mover_process(pool, parent._TUNABLES)),
        }
        for mover in movers.values():
            mover.attach(layout.attachment(engine, control))
            prove_equal(layout, floor, mover, engine)
        for mover in movers.values():
            await_mapped(mover.pid)
        for direction in Direction:
            store = direction is Direction.STORE
            floor_sample = partial(_floor_sample, floor, store, layout, layout.walk(0))
            samples = {
                name: partial(_mover_sample, mover, direction, layout.walk(seed))
                for seed, (name, mover) in enumerate(movers.items(), 1)
            }
            alternate(floor_sample, samples, layout.lap_samples)
            for name, pairs in alternate(floor_sample, samples, rounds).items():
                found.append(_measure(direction, layout, name, pairs))
                say(f"{found[-1].name}: {found[-1].value:.3f}")
    return found


def _floor_sample(floor: MemcpyFloor, store: bool, layout: Layout, walk: Walk) -> float:
    return floor.copy(store, *next(walk), layout.run, RUNS, layout.plane)


def _mover_sample(mover: TimedMover, direction: Direction, walk: Walk) -> float:
    return mover.copy(direction, *next(walk))


def _measure(direction: Direction, layout: Layout, name: str, pairs: Pairs) -> Measure:
    return ratio(
        f"{direction.name.lower()}, runs of {layout.run >> 10} KiB, {name}",
        pairs.speed,
        AIMS.get((name, layout.run), Aim()),
        speeds(pairs, layout.sample_bytes),
    )


def run(quick: bool) -> Found:
    """All lengths of runs."""
    side_bytes = affordable(SIDE_BYTES, 2, SMALLEST_SIDE_BYTES)
    rounds = 5 if quick else 60
    measures: list[Measure] = []
    with shared(side_bytes) as engine, shared(side_bytes) as pool:
        for length in RUN_BYTES:
            measures += measure(Layout(side_bytes, length), engine, pool, rounds)
    return measures, {"engine_bytes": side_bytes, "pool_bytes": side_bytes, "rounds": rounds}


if __name__ == "__main__":
    sys.exit(main("mover", __doc__, run))
