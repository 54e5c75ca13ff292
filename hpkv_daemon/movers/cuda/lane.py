"""The copies of one direction: queued jobs, cut into slices, at most two of which the device works at."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hpkv_client.cuda import NOT_SUPPORTED, CudaError, Driver
from hpkv_daemon.faults import Faults
from hpkv_daemon.movers.base import Direction, Outcome
from hpkv_daemon.movers.cuda.device import AttachedRank, Bytes, Limits, PinnedMemory
from hpkv_daemon.movers.cuda.plan import cut, rows_of

_DEPTH = 2
"""The link is never idle while the next slice is prepared."""

Integers = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Job:
    """Blocks to copy: ``offsets`` in the pool, ``blocks`` of the rank. ``done`` blocks were handed to the device."""

    ticket: int
    rank: AttachedRank
    attachment: int
    direction: Direction
    number: int
    offsets: Integers
    blocks: Integers
    done: int = 0
    in_flight: int = 0
    problem: str = ""
    void: str = ""
    started: float = 0.0


@dataclass(slots=True, eq=False)
class _Slice:
    job: Job
    offsets: Integers
    event: int
    staging: PinnedMemory | None


@dataclass(slots=True)
class _Buffers:
    """Page-locked memory of this lane through which short runs pass."""

    free: list[PinnedMemory] = field(default_factory=list)
    made: int = 0


OnEnd = Callable[[Job, Outcome, str, float], None]


class Lane:
    """One direction of a device: a stream, and what waits for it. Raises ``CudaError`` only when all is lost."""

    def __init__(
        self,
        direction: Direction,
        driver: Driver,
        pool: PinnedMemory,
        limits: Limits,
        faults: Faults,
        on_end: OnEnd,
    ) -> None:
        self.direction = direction
        self._driver = driver
        self._pool = pool
        self._limits = limits
        self._faults = faults
        self._on_end = on_end
        self._stream = driver.stream()
        self._events = [driver.event() for _ in range(_DEPTH)]
        self._queue: deque[Job] = deque()
        self._flight: deque[_Slice] = deque()
        self._buffers = _Buffers()
        self._batches = driver.batches

    @property
    def waiting(self) -> bool:
        """Whether some job is queued."""
        return bool(self._queue)

    @property
    def in_flight(self) -> bool:
        """Whether the device works."""
        return bool(self._flight)

    def add(self, job: Job) -> None:
        """Queue a job."""
        self._queue.append(job)

    def cancel(self, matches: Callable[[Job], bool]) -> None:
        """End the jobs as VOID, those of which the device works at a slice when it has done that."""
        under_way = {id(one.job): one.job for one in self._flight}
        for job in [job for job in (*self._queue, *under_way.values()) if matches(job)]:
            job.void = job.void or "cancelled"
        for job in [job for job in self._queue if job.void]:
            self._queue.remove(job)
            if not job.in_flight:
                self._end(job)

    def poll(self) -> None:
        """Take back the slices that are done."""
        while self._flight and self._driver.passed(self._flight[0].event):
            done = self._flight.popleft()
            self._events.append(done.event)
            job, rank = done.job, done.job.rank
            job.in_flight -= 1
            rank.in_flight -= 1
            if not rank.in_flight and rank.control is not None:
                rank.control.leave()
            if done.staging is not None:
                if self.direction is Direction.STORE and not job.problem:
                    for buffer, offset in zip(_slots(done.staging, rank), done.offsets.tolist(), strict=False):
                        rank.plan.scatter(buffer, self._pool.bytes, offset)
                self._buffers.free.append(done.staging)
            if not job.in_flight and (job.problem or job.void or job.done == len(job.blocks)):
                self._end(job)

    def submit(self) -> bool:
        """Hand the next slices to the device; True if it was worth calling."""
        worked = False
        while self._queue and self._events:
            job = self._queue[0]
            if not job.done and not job.in_flight:
                job.started = time.perf_counter()
            if self._withdrawn(job):
                self._queue.popleft()
                job.void = "withdrawn by the engine"
                if not job.in_flight:
                    self._end(job)
                continue
            worked = True
            if not self._prepare(job):
                break
            self._queue.popleft()
            self._start(job)
            if not job.problem and job.done < len(job.blocks):
                self._queue.append(job)
        return worked

    def _withdrawn(self, job: Job) -> bool:
        """Announce the copy to the engine, unless it is announced already; whether the engine does not want it."""
        control = job.rank.control
        if control is None:
            return False
        if job.rank.in_flight:
            return control.withdrawn(job.number)
        return not control.enter(job.number)

    def _retract(self, rank: AttachedRank) -> None:
        if not rank.in_flight and rank.control is not None:
            rank.control.leave()

    def _prepare(self, job: Job) -> bool:
        """Page-lock what the next slice needs, one extent a call; whether it can start."""
        offsets, _ = self._next(job)
        missing = None
        if not job.rank.plan.staged:
            missing = self._pool.lacks(offsets, job.rank.plan.reach)
        try:
            if missing is not None:
                self._pool.lock(missing)
            elif job.rank.plan.staged and not self._buffers.free and self._buffers.made < _DEPTH:
                size = self._limits.staging_bytes
                buffer = PinnedMemory(self._driver, mmap.mmap(-1, size), size)
                buffer.lock(0)
                self._buffers.made += 1
                self._buffers.free.append(buffer)
        except CudaError as problem:
            self._retract(job.rank)
            if problem.lost:
                raise
            job.problem = f"memory cannot be page-locked: {problem}"
            self._queue.popleft()
            if not job.in_flight:
                self._end(job)
            return False
        ready = missing is None and (not job.rank.plan.staged or bool(self._buffers.free))
        if not ready:
            self._retract(job.rank)
        return ready

    def _next(self, job: Job) -> tuple[Integers, Integers]:
        plan, limits = job.rank.plan, self._limits
        count = min(limits.slice_bytes // max(1, plan.block_bytes), limits.slice_pieces // max(1, plan.pieces))
        if plan.by_rows or not self._batches:
            count = min(count, limits.slice_calls // max(1, len(plan.rows)))
        if plan.staged:
            count = min(count, limits.staging_bytes // plan.staged_bytes)
        if self._faults.possible:
            count = 1
        end = job.done + max(1, count)
        return job.offsets[job.done : end], job.blocks[job.done : end]

    def _start(self, job: Job) -> None:
        offsets, blocks = self._next(job)
        rank, plan = job.rank, job.rank.plan
        staging = self._buffers.free.pop() if plan.staged else None
        one = _Slice(job, offsets, self._events.pop(), staging)
        job.in_flight += 1
        rank.in_flight += 1
        self._flight.append(one)
        job.done += len(blocks)
        try:
            job.problem = self._fault()
            if not job.problem:
                self._copy(one, offsets, blocks)
        except CudaError as problem:
            if problem.lost:
                raise
            job.problem = str(problem)
        except (ValueError, IndexError, TypeError) as problem:
            job.problem = f"block {blocks[0]}: {problem}"
        # Also after a failure: a part of it may be in the stream.
        self._driver.record(one.event, self._stream)

    def _copy(self, one: _Slice, offsets: Integers, blocks: Integers) -> None:
        plan, memory = one.job.rank.plan, one.staging or self._pool
        if one.staging is None:
            hosts = offsets + self._pool.address
        else:
            hosts = one.staging.address + np.arange(len(blocks), dtype=np.int64) * plan.staged_bytes
            if self.direction is Direction.LOAD:
                for buffer, offset in zip(_slots(one.staging, one.job.rank), offsets.tolist(), strict=False):
                    plan.gather(self._pool.bytes, offset, buffer)
        if not plan.pieces or not len(blocks):
            return
        if self._batches and not plan.by_rows:
            device, host, size = cut(plan.batch(blocks, hosts), memory.address, memory.extent_bytes)
            to, source = (host, device) if self.direction is Direction.STORE else (device, host)
            try:
                self._driver.copy_batch(to.ctypes.data, source.ctypes.data, size.ctypes.data, len(size), self._stream)
                return
            except CudaError as problem:
                if problem.result != NOT_SUPPORTED:
                    raise
                self._batches = False
        for block, host_address in zip(blocks.tolist(), hosts.tolist(), strict=True):
            for rows in rows_of(plan, block, host_address, memory.address, memory.extent_bytes):
                device_side, host_side = (rows.device, rows.device_step), (rows.host, rows.host_step)
                to_side, source_side = (
                    (host_side, device_side) if self.direction is Direction.STORE else (device_side, host_side)
                )
                if rows.pieces == 1:
                    self._driver.copy(to_side[0], source_side[0], rows.width, self._stream)
                else:
                    self._driver.copy_rows(*to_side, *source_side, rows.width, rows.pieces, self._stream)

    def _fault(self) -> str:
        if not self._faults.possible:
            return ""
        point = "load" if self.direction is Direction.LOAD else "store"
        fault = self._faults.at(point)
        if fault.delay:
            time.sleep(fault.delay)
        return f"fault hook failed a {point}" if fault.fail else ""

    def _end(self, job: Job) -> None:
        control = job.rank.control
        seconds = time.perf_counter() - job.started if job.started else 0.0
        if job.void:
            self._on_end(job, Outcome.VOID, job.void, seconds)
        elif job.problem:
            self._on_end(job, Outcome.FAILED, job.problem, seconds)
        elif control is not None and control.withdrawn(job.number):
            self._on_end(job, Outcome.VOID, "withdrawn by the engine", seconds)
        else:
            self._on_end(job, Outcome.OK, "", seconds)


def _slots(staging: PinnedMemory, rank: AttachedRank) -> list[Bytes]:
    size = rank.plan.staged_bytes
    return [staging.bytes[i * size : (i + 1) * size] for i in range(len(staging.bytes) // size)]
