"""How fast the disk process writes and reads blocks, against plain direct I/O of the same blocks in the same run.

Both sides write into files whose space was written before, make every batch durable, and verify nothing that the other
does not; the floor is pwritev and preadv from and to the same memory, in the call sizes and thread counts that were
fastest in a short trial. Recovery is measured on segments of which only headers and footers are really there (sparse
files): it reads nothing else, so what it costs per 100 GB of blocks can be told without writing them.
"""

from __future__ import annotations

import mmap
import os
import random
import select
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.memory import affordable, shared
from benchmarks.paired import Pairs, Spread, alternate
from benchmarks.report import Aim, Found, Measure, Unfit, main, ratio, say, speeds
from hpkv_client.memory import SharedMemory
from hpkv_client.types import Keys, typed_digest
from hpkv_daemon.tiers.base import BlockJob, Done, Outcome, Recovered
from hpkv_daemon.tiers.disk import format as layout
from hpkv_daemon.tiers.disk.directory import StorageDirectory
from hpkv_daemon.tiers.disk.format import PAGE, Kind, Place, Record
from hpkv_daemon.tiers.disk.index import DiskIndex
from hpkv_daemon.tiers.disk.segments import file_name
from hpkv_daemon.tiers.disk.tier import DiskTier

BLOCK_BYTES = (256 << 10, 2 << 20, 16 << 20)
READERS = (1, 2, 4)
POOL_BYTES = 256 << 20
SAMPLE_BYTES = 128 << 20
SEGMENT_BYTES = 256 << 20
BUDGET = 5 * SEGMENT_BYTES
"""Small, so that segments are used again from the second lap on: the state that a tier is in for most of its life."""
LARGE_BYTES, LARGE_AIM = 2 << 20, Aim(0.95)
"""Blocks of this size and more should cost no more than the device."""
LOOKED_UP, INDEXED = 2_000, 1_000_000
RECOVERED_BYTES = 100 * 10**9
WAIT_SECONDS = 60.0


class DirectIO:
    """The floor: one file, written before, and plain calls on it."""

    def __init__(self, path: Path, pool: mmap.mmap) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._pool = memoryview(pool)
        os.posix_fallocate(self._fd, 0, SAMPLE_BYTES)
        for offset in range(0, SAMPLE_BYTES, 16 << 20):
            os.pwritev(self._fd, [self._pool[offset : offset + (16 << 20)]], offset, os.RWF_DSYNC)

    def move(self, write: bool, call_bytes: int, threads: int) -> float:
        """Seconds for one sample in calls of so many bytes."""
        offsets = range(0, SAMPLE_BYTES, call_bytes)

        def one(offset: int) -> None:
            view = [self._pool[offset : offset + call_bytes]]
            moved = os.pwritev(self._fd, view, offset, os.RWF_DSYNC) if write else os.preadv(self._fd, view, offset)
            if moved != call_bytes:
                raise RuntimeError(f"{moved} of {call_bytes} bytes were moved")

        started = time.perf_counter()
        if threads == 1:
            for offset in offsets:
                one(offset)
        else:
            with ThreadPoolExecutor(threads) as workers:
                list(workers.map(one, offsets))
        return time.perf_counter() - started

    def best(self, write: bool, block: int) -> tuple[int, int]:
        """Call size (at least a block) and threads of the fastest way in a short trial."""
        ways = [(call, threads) for call in (block, max(block, 8 << 20)) for threads in (1, 2, 4)]
        return min(ways, key=lambda way: min(self.move(write, *way) for _ in range(2)))

    def close(self) -> None:
        """Close the file."""
        self._pool.release()
        os.close(self._fd)


class TimedTier:
    """The real tier and its process, one batch at a time."""

    def __init__(self, path: Path, pool: SharedMemory, block: int, readers: int) -> None:
        options = {"segment_bytes": SEGMENT_BYTES, "readers": readers, "queue_bytes": POOL_BYTES}
        self.tier = DiskTier(StorageDirectory.open(path), BUDGET, pool.handle.fd, pool.handle.size, **options)  # type: ignore[arg-type]
        self.tier.recover()
        self._wait(lambda event: isinstance(event, Recovered) and event.done == event.total)
        self._block = block
        self._space = typed_digest("benchmark", block)
        self._next = 0
        self.seconds = 0.0

    def write(self) -> float:
        """Seconds until one sample of new blocks is durable."""
        self._next += 1
        return self._move(True)

    def read(self) -> float:
        """Seconds until the latest sample is back in the pool, verified."""
        return self._move(False)

    def _move(self, write: bool) -> float:
        count = SAMPLE_BYTES // self._block
        jobs = [
            BlockJob(self._space, struct.pack("<QQQQ", self._next, slot, 0, 0), None, self._block, slot * self._block)
            for slot in range(count)
        ]
        started = time.perf_counter()
        ticket = self.tier.write(jobs) if write else self.tier.read(jobs)
        done = self._wait(lambda event: isinstance(event, Done) and event.ticket == ticket)
        taken = time.perf_counter() - started
        if not isinstance(done, Done) or set(done.outcomes) != {Outcome.OK}:
            raise RuntimeError(f"the tier did not move the blocks: {done}")
        return taken

    def _wait(self, condition: Callable[[object], bool]) -> object:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            self.tier.flush()
            select.select([self.tier], [], [], 0.2)
            for event in self.tier.poll():
                if condition(event):
                    return event
        raise RuntimeError(f"the tier said nothing for {WAIT_SECONDS:.0f} s: {self.tier.usage()}")

    def cpu_seconds(self) -> float:
        """Processor time of the disk process so far."""
        fields = Path(f"/proc/{self.tier.usage().pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def timed_tier(path: Path, pool: SharedMemory, block: int, readers: int) -> Iterator[TimedTier]:
    """A tier in a directory of its own that has been through its budget once."""
    tier = TimedTier(path, pool, block, readers)
    try:
        for _ in range(BUDGET // SAMPLE_BYTES + 1):
            tier.write()
        yield tier
    finally:
        tier.tier.close(5.0)
        shutil.rmtree(path)


def measure(directory: Path, pool: SharedMemory, block: int, rounds: int, readers: Sequence[int]) -> list[Measure]:
    """Writes and reads of one size of blocks."""
    found = []
    floor = DirectIO(directory / "floor", pool.mapping)
    try:
        for threads in readers:
            with timed_tier(directory / "tier", pool, block, threads) as tier:
                for verb in ("write", "read") if threads == readers[-1] else ("read",):
                    write = verb == "write"
                    way = floor.best(write, block)
                    spent = tier.cpu_seconds()
                    sample = tier.write if write else tier.read
                    pairs = alternate(lambda: floor.move(write, *way), {verb: sample}, rounds)[verb]  # noqa: B023
                    cores = (tier.cpu_seconds() - spent) / sum(pairs.samples)
                    found.append(_measure(verb, block, threads, pairs, cores))
                    say(f"{found[-1].name}: {found[-1].value:.3f}")
    finally:
        floor.close()
    return found


def checksum(pool: SharedMemory, block: int) -> Measure:
    """What no code in front of the device can save: one thread that reads every byte once, out of a cold cache."""
    payloads = memoryview(pool.mapping)
    taken = []
    for first in range(0, POOL_BYTES, SAMPLE_BYTES):
        started = time.thread_time()
        for offset in range(first, first + SAMPLE_BYTES, block):
            layout.digest(payloads[offset : offset + block])
        taken.append(time.thread_time() - started)
    payloads.release()
    seconds = Spread.of(taken).median * 1e9 / SAMPLE_BYTES
    context = {"gb_per_second": 1 / seconds}
    return Measure("the checksum alone, processor time for 1 GB", seconds, "s", context=context)


def _measure(verb: str, block: int, threads: int, pairs: Pairs, cores: float) -> Measure:
    size = f"{block >> 10} KiB" if block < 1 << 20 else f"{block >> 20} MiB"
    name = f"{verb}, blocks of {size}" + (f", {threads} readers" if verb == "read" else "")
    aim = LARGE_AIM if block >= LARGE_BYTES and (verb == "write" or threads == READERS[-1]) else Aim()
    return ratio(name, pairs.speed, aim, speeds(pairs, SAMPLE_BYTES) | {"cores": cores})


def recovery(directory: Path, pool: SharedMemory, block: int, total: int) -> Measure:
    """Seconds to know all blocks of sealed segments that hold ``total`` bytes in all, most of which is not there."""
    path = directory / "sparse"
    storage = StorageDirectory.open(path)
    size = 1 << 30
    each = (size - 2 * PAGE) // (layout.record_bytes(block) + 128)
    segments = -(-total // (each * block))
    space = typed_digest("recovery")
    for number in range(segments):
        place = Place(storage.identity, number, number + 1, size)
        records = [
            Record(Kind.BLOCK, i, PAGE + i * layout.record_bytes(block), space, typed_digest(number, i), b"", block, 0)
            for i in range(each)
        ]
        with (path / file_name(number)).open("wb") as file:
            file.write(layout.pack_segment(place))
            footer = layout.pack_footer(place, records)
            file.seek(size - len(footer))
            file.write(footer)
    budget = (segments + 2) * size
    tier = DiskTier(storage, budget, pool.handle.fd, pool.handle.size, segment_bytes=size)
    started = time.perf_counter()
    longest = blocks = 0.0
    try:
        tier.recover()
        over = False
        while not over:
            select.select([tier], [], [], 1.0)
            # Processor time: how long others kept the loop from running is not the tier's doing.
            before = time.thread_time()
            events = list(tier.poll())
            longest = max(longest, time.thread_time() - before)
            over = any(isinstance(event, Recovered) and event.done == event.total for event in events)
        taken = time.perf_counter() - started
        blocks = tier.usage().blocks
    finally:
        tier.close(0.0)
        shutil.rmtree(path)
    scale = RECOVERED_BYTES / (segments * each * block)
    return Measure(
        f"recovery of 100 GB in blocks of {block >> 10} KiB",
        taken * scale,
        "s",
        Aim(at_most=20.0),
        note="segments are sparse files: only what recovery reads is there",
        context={"blocks": blocks * scale, "longest_poll_ms": longest * 1e3},
    )


def lookups(rounds: int) -> Measure:
    """A prefix of 2,000 keys, looked up among a million blocks and, as the floor, among so many as it has."""
    space = typed_digest("lookups")

    def filled(blocks: int) -> DiskIndex:
        index = DiskIndex(1 << 40, 64 << 20)
        index.end_recovery()
        segment = index.begin(0)
        for number in range(blocks):
            if not segment.fits(PAGE):
                index.seal()
                segment = index.begin(len(index.segments))
            index.commit(segment, index.place(Kind.BLOCK, space, typed_digest(number), b"", PAGE), 1)
        return index

    def prefix(first: int) -> Keys:
        return Keys.of([typed_digest(first + number) for number in range(LOOKED_UP)])

    small, large = filled(LOOKED_UP), filled(INDEXED)
    pairs = Pairs()
    for _ in range(rounds * 10):
        taken = []
        for index, keys in ((small, prefix(0)), (large, prefix(random.randrange(INDEXED - LOOKED_UP)))):
            started = time.perf_counter()
            found = index.match(space, keys)
            taken.append(time.perf_counter() - started)
            assert found == LOOKED_UP
        pairs.add(taken[0], taken[1], taken[0])
    context = {"p50_us": 1e6 * Spread.of(pairs.samples).median, "floor_p50_us": 1e6 * Spread.of(pairs.floors).median}
    return ratio(f"match of {LOOKED_UP:,} keys among {INDEXED:,} blocks", pairs.cost, Aim(at_most=2.0), context)


def run(quick: bool) -> Found:
    """All sizes of blocks and counts of readers."""
    rounds = 3 if quick else 20
    affordable(POOL_BYTES, 1, POOL_BYTES)
    directory = Path(tempfile.mkdtemp(prefix="hpkv-disk-", dir=os.environ.get("HPKV_BENCH_DISK")))
    try:
        if shutil.disk_usage(directory).free < 4 * BUDGET:
            raise Unfit(f"{directory} has too little room; HPKV_BENCH_DISK names another directory")
        measures: list[Measure] = []
        with shared(POOL_BYTES) as pool:
            for offset in range(0, POOL_BYTES, 1 << 20):
                pool.mapping[offset : offset + (1 << 20)] = os.urandom(1 << 20)
            for block in BLOCK_BYTES:
                measures += measure(directory, pool, block, rounds, READERS[-1:] if quick else READERS)
            measures.append(checksum(pool, LARGE_BYTES))
            measures.append(lookups(rounds))
            measures.append(recovery(directory, pool, 256 << 10, RECOVERED_BYTES // (10 if quick else 1)))
    finally:
        shutil.rmtree(directory)
    return measures, {"segment_bytes": SEGMENT_BYTES, "sample_bytes": SAMPLE_BYTES, "rounds": rounds}


if __name__ == "__main__":
    sys.exit(main("disk", __doc__, run))
