"""The mover process of one GPU.

``python -m hpkv_daemon.movers.cuda.process UUID LISTENER_FD LINK_FD POOL_FD POOL_BYTES FAULTS``; -1 for no listener.
One thread. It hands copies to the device and looks at their events; it never waits for one. Whatever the driver says
about a context that is lost ends the process: its end is what stops every copy for certain.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import sys
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from hpkv_client.cuda import CudaError, Driver
from hpkv_client.types import MemoryHandle, Run
from hpkv_daemon.child import belong_to_daemon, claim_priority
from hpkv_daemon.faults import Faults
from hpkv_daemon.link import Link
from hpkv_daemon.movers.base import Direction, Outcome
from hpkv_daemon.movers.cuda.device import AttachedRank, Limits, PinnedMemory, open_device, stay_near
from hpkv_daemon.movers.cuda.lane import Job, Lane
from hpkv_daemon.movers.cuda.paged import MemoryName, PagedMemories

_LOOK_SECONDS = 50e-6
"""Between two looks at the events while the device works."""
_LOCK_SECONDS = 5e-3
"""Between two extents that are page-locked ahead of use: an engine that starts needs the machine, too."""
_MOST_NOTICES = 32


class _Gpu:
    """The device, once it is open, and its two lanes."""

    def __init__(
        self,
        name: str,
        pool: mmap.mmap,
        limits: Limits,
        faults: Faults,
        on_end: Any,
        listener: socket.socket | None,
    ) -> None:
        self.driver = Driver()
        device = open_device(self.driver, name)
        stay_near(self.driver.bus_of(device))
        self.pool = PinnedMemory(self.driver, pool, limits.extent_bytes)
        self.paged = PagedMemories(self.driver, device, listener)
        ways = (Direction.LOAD, Direction.STORE)
        self.lanes = {way: Lane(way, self.driver, self.pool, limits, faults, on_end) for way in ways}


@dataclass(frozen=True, slots=True)
class _Request:
    """A rank that is to be attached."""

    regions: list[MemoryHandle]
    control: MemoryHandle | None
    runs: list[Run]
    blocks: int


class MoverProcess:
    """State of the process: the device, attached ranks, and how much of the pool is page-locked."""

    def __init__(
        self,
        name: str,
        link: Link,
        pool: mmap.mmap,
        limits: Limits,
        faults: Faults,
        listener: socket.socket | None = None,
    ) -> None:
        self._name = name
        self._link = link
        self._pool = pool
        self._limits = limits
        self._faults = faults
        self._listener = listener
        self._gpu: _Gpu | None = None
        self._awaited: dict[int, _Request] = {}
        """Ranks whose memory is on its way."""
        self._ranks: dict[int, AttachedRank] = {}
        self._leaving: dict[int, AttachedRank] = {}
        self._noticed: set[str] = set()
        self._locked_ahead = True
        """Whether there is more to page-lock ahead of use, and it works."""

    def run(self) -> None:
        """Serve until the daemon closes the link. Raises ``CudaError`` when the device is lost."""
        while not self._link.closed:
            for message in self._link.receive():
                self._obey(message)
            worked = self._work()
            self._close_left()
            sources = self._take_memory()
            writers = [] if self._link.flush() else [self._link]
            pause = self._pause(worked)
            readers: list[Link | socket.socket] = [self._link, *sources]
            ready = select.select(readers, writers, [], pause)
            if not any(ready) and pause == _LOCK_SECONDS:
                self._lock_ahead()

    def _work(self) -> bool:
        if self._gpu is None:
            return False
        worked = False
        for lane in self._gpu.lanes.values():
            lane.poll()
            worked |= lane.submit()
        return worked

    def _take_memory(self) -> list[socket.socket]:
        """Map what has come; where more may come from."""
        if self._gpu is None:
            return []
        paged = self._gpu.paged
        paged.serve()
        for number, problem in paged.ended():
            request = self._awaited.pop(number)
            if problem:
                paged.release(number)
                self._link.send(["attached", number, problem])
            else:
                self._map(self._gpu, number, request)
        return paged.sources()

    def _pause(self, worked: bool) -> float | None:
        if self._gpu is None:
            return None
        lanes = self._gpu.lanes.values()
        if worked:
            return 0.0
        if any(lane.in_flight or lane.waiting for lane in lanes):
            return _LOOK_SECONDS
        return _LOCK_SECONDS if self._locked_ahead else None

    def _lock_ahead(self) -> None:
        assert self._gpu is not None
        pool = self._gpu.pool
        extent = pool.next_missing
        if extent is not None:
            try:
                pool.lock(extent)
            except CudaError as problem:
                if problem.lost:
                    raise
                # Copies that need it try again, and say what is wrong.
                self._locked_ahead = False
                self._notice(f"the pool cannot be page-locked: {problem}")
        if pool.next_missing is None:
            self._locked_ahead = False
        self._link.send(["locked", 0, pool.locked_bytes])

    def _obey(self, message: list[Any]) -> None:
        verb, number, *rest = message
        if verb == "copy":
            self._queue(number, *rest)
        elif verb == "ping":
            self._link.send(["alive", number])
        elif verb == "cancel":
            self._cancel(lambda job: job.ticket == number)
        elif verb == "attach":
            self._attach(number, *rest)
        elif verb == "detach":
            self._cancel(lambda job: job.attachment == number)
            self._detach(number)

    def _cancel(self, matches: Any) -> None:
        if self._gpu is not None:
            for lane in self._gpu.lanes.values():
                lane.cancel(matches)

    def _detach(self, number: int) -> None:
        rank = self._ranks.pop(number, None)
        if rank is not None:
            self._leaving[number] = rank
        elif self._awaited.pop(number, None) and self._gpu is not None:
            self._gpu.paged.release(number)

    def _close_left(self) -> None:
        for number, rank in [(number, rank) for number, rank in self._leaving.items() if not rank.in_flight]:
            del self._leaving[number]
            rank.close()
            assert self._gpu is not None
            self._gpu.paged.release(number)

    def _attach(self, number: int, regions: list[Any], control: list[Any] | None, runs: list[Any], blocks: int) -> None:
        try:
            if self._gpu is None:
                self._gpu = _Gpu(self._name, self._pool, self._limits, self._faults, self._finish, self._listener)
            request = _Request(
                [MemoryHandle(*region) for region in regions],
                MemoryHandle(*control) if control else None,
                [Run(*run) for run in runs],
                blocks,
            )
        except Exception as problem:  # noqa: BLE001  (one rank's bad memory must not end the copies of others)
            self._refuse(number, problem)
            return
        names = {_name_of(handle) for handle in request.regions if handle.kind == "cuda_fd"}
        if names:
            self._awaited[number] = request
            self._gpu.paged.want(number, names)
        else:
            self._map(self._gpu, number, request)

    def _map(self, gpu: _Gpu, number: int, request: _Request) -> None:
        try:
            rank = AttachedRank(
                gpu.driver,
                request.regions,
                request.control,
                request.runs,
                request.blocks,
                self._limits,
                lambda handle: gpu.paged.memory(_name_of(handle)),
            )
        except Exception as problem:  # noqa: BLE001  (one rank's bad memory must not end the copies of others)
            self._refuse(number, problem)
            gpu.paged.release(number)
            return
        if rank.control is not None:
            rank.control.sign(os.getpid())
        self._ranks[number] = rank
        if rank.plan.short_bytes:
            self._notice(
                f"blocks in pieces of {rank.plan.short_bytes} bytes, too short for the GPU's link; "
                "a larger --block-size or another KV layout makes them longer"
            )
        self._link.send(["attached", number, ""])

    def _refuse(self, number: int, problem: Exception) -> None:
        """Say why a rank is not attached. Raises it when the device is lost."""
        self._link.send(["attached", number, str(problem) or type(problem).__name__])
        if isinstance(problem, CudaError) and problem.lost:
            raise problem

    def _queue(self, ticket: int, attachment: int, direction: int, job: int, offsets: bytes, blocks: bytes) -> None:
        rank = self._ranks.get(attachment)
        if rank is None or self._gpu is None:
            self._link.send(["done", ticket, Outcome.FAILED, "the rank is not attached", 0, 0.0])
            return
        way = Direction(direction)
        slots = np.frombuffer(offsets, "=u8").astype(np.int64)
        numbers = np.frombuffer(blocks, "<u4").astype(np.int64)
        self._gpu.lanes[way].add(Job(ticket, rank, attachment, way, job, slots, numbers))

    def _finish(self, job: Job, outcome: Outcome, problem: str, seconds: float) -> None:
        if outcome is Outcome.FAILED:
            self._notice(f"copies fail: {problem}")
        moved = job.done * job.rank.plan.block_bytes
        self._link.send(["done", job.ticket, outcome, problem, moved, seconds])

    def _notice(self, text: str) -> None:
        if text not in self._noticed and len(self._noticed) < _MOST_NOTICES:
            self._noticed.add(text)
            self._link.send(["notice", 0, text])

    def farewell(self, words: str) -> None:
        """Tell the daemon why the process ends."""
        self._link.send(["dying", 0, words])


def _name_of(handle: MemoryHandle) -> MemoryName:
    return handle.pid, handle.name


def _low(descriptor: int) -> socket.socket:
    """A low number, whatever the daemon's was: select() is the wait that is precise enough here."""
    low = socket.socket(fileno=os.dup(descriptor))
    os.close(descriptor)
    return low


def main(arguments: list[str], limits: Limits) -> None:
    """Entry of the process."""
    belong_to_daemon()
    claim_priority()
    name = arguments[0]
    listener_fd, link_fd, pool_fd, pool_bytes = (int(text) for text in arguments[1:5])
    listener = _low(listener_fd) if listener_fd >= 0 else None
    link = Link(_low(link_fd))
    pool = mmap.mmap(pool_fd, pool_bytes)
    os.close(pool_fd)
    mover = MoverProcess(name, link, pool, limits, Faults(arguments[5]), listener)
    try:
        mover.run()
    except CudaError as problem:
        mover.farewell(str(problem))
        # Without any clean-up: the driver would wait for copies that never end.
        os._exit(1)


if __name__ == "__main__":
    try:
        main(sys.argv[1:], Limits())
    except msgpack.exceptions.UnpackException as broken:
        sys.exit(f"hpkv mover: broken message from the daemon: {broken!r}")
