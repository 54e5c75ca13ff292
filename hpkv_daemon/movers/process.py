"""The mover process for CPU memory: ``python -m hpkv_daemon.movers.process LINK_FD POOL_FD POOL_BYTES FAULTS``.

One thread. Jobs are copied in slices; between slices the process listens, and small jobs and loads go first, so
that nobody waits behind a long store.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgpack

from hpkv_client.types import MemoryHandle, Run
from hpkv_client.wire import unpack_blocks
from hpkv_daemon.child import belong_to_daemon, claim_priority
from hpkv_daemon.faults import Faults
from hpkv_daemon.link import Link
from hpkv_daemon.movers.base import Direction, Outcome
from hpkv_daemon.movers.copier import AttachedRank

SLICE_BYTES = 8 << 20
"""Bytes copied before the process looks for messages: about 2 ms."""

_POPULATE_PAUSE_MS = 20
POPULATE_BYTES = 32 << 20
_MADV_POPULATE_WRITE = 23
"""linux/mman.h, since Linux 5.14: maps pages without changing them, so the first copies do not fault."""


@dataclass(slots=True)
class _Job:
    ticket: int
    rank: AttachedRank
    attachment: int
    direction: Direction
    number: int
    offsets: tuple[int, ...]
    blocks: tuple[int, ...]
    done: int = 0
    seconds: float = 0.0


class MoverProcess:
    """State of the process: attached ranks, queued jobs, and how much of the pool is mapped."""

    def __init__(self, link: Link, pool: mmap.mmap, faults: Faults) -> None:
        self._link = link
        self._pool = pool
        self._faults = faults
        self._ranks: dict[int, AttachedRank] = {}
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._populated = 0

    def run(self) -> None:
        """Serve until the daemon closes the link."""
        poller = select.poll()
        poller.register(self._link, select.POLLIN)
        while not self._link.closed:
            for message in self._link.receive():
                self._obey(message)
            if self._loads or self._stores:
                self._copy_slice()
            else:
                events = select.POLLIN if self._link.flush() else select.POLLIN | select.POLLOUT
                poller.modify(self._link, events)
                # Pages are mapped ahead only while there is nothing else to do, for the engine as well.
                rest = self._populated < len(self._pool)
                if not poller.poll(_POPULATE_PAUSE_MS if rest else None) and rest:
                    self._populate()

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
            rank = self._ranks.pop(number, None)
            if rank is not None:
                rank.close()

    def _attach(self, number: int, regions: list[Any], control: list[Any] | None, runs: list[Any], blocks: int) -> None:
        problem = ""
        try:
            rank = AttachedRank(
                [MemoryHandle(*region) for region in regions],
                MemoryHandle(*control) if control else None,
                [Run(*run) for run in runs],
                blocks,
            )
        except Exception as error:  # noqa: BLE001  (one rank's bad memory must not end the copies of others)
            problem = str(error) or type(error).__name__
        else:
            if rank.control is not None:
                rank.control.sign(os.getpid())
            self._ranks[number] = rank
        self._link.send(["attached", number, problem])

    def _queue(self, ticket: int, attachment: int, direction: int, job: int, offsets: bytes, blocks: bytes) -> None:
        rank = self._ranks.get(attachment)
        if rank is None:
            self._link.send(["done", ticket, Outcome.FAILED, "the rank is not attached", 0, 0.0])
            return
        slots = memoryview(offsets).cast("Q").tolist()
        entry = _Job(ticket, rank, attachment, Direction(direction), job, tuple(slots), unpack_blocks(blocks))
        (self._loads if entry.direction is Direction.LOAD else self._stores).append(entry)

    def _cancel(self, matches: Any) -> None:
        for queue in (self._loads, self._stores):
            for job in [job for job in queue if matches(job)]:
                queue.remove(job)
                self._finish(job, Outcome.VOID, "cancelled")

    def _copy_slice(self) -> None:
        queue = self._loads or self._stores
        job = queue.popleft()
        started = time.perf_counter()
        control = job.rank.control
        if control is not None and not control.enter(job.number):
            self._finish(job, Outcome.VOID, "withdrawn by the engine")
            return
        problem = self._copy_blocks(job)
        if control is not None:
            control.leave()
        job.seconds += time.perf_counter() - started
        if problem:
            self._finish(job, Outcome.FAILED, problem)
        elif job.done < len(job.blocks):
            queue.append(job)
        elif control is not None and control.withdrawn(job.number):
            self._finish(job, Outcome.VOID, "withdrawn by the engine")
        else:
            self._finish(job, Outcome.OK, "")

    def _copy_blocks(self, job: _Job) -> str:
        end = min(len(job.blocks), job.done + max(1, SLICE_BYTES // max(1, job.rank.block_bytes)))
        copy = job.rank.store if job.direction is Direction.STORE else job.rank.load
        # Between two blocks as little as possible happens: what was copied has pushed this code out of the cache.
        faulty, pool, offsets, blocks = self._faults.possible, self._pool, job.offsets, job.blocks
        for index in range(job.done, end):
            if faulty and (problem := self._fault(job.direction)):
                return problem
            try:
                copy(pool, offsets[index], blocks[index])
            except (ValueError, IndexError, TypeError) as error:
                return f"block {blocks[index]}: {error}"
            job.done = index + 1
        return ""

    def _fault(self, direction: Direction) -> str:
        point = "load" if direction is Direction.LOAD else "store"
        fault = self._faults.at(point)
        if fault.delay:
            time.sleep(fault.delay)
        return f"fault hook failed a {point}" if fault.fail else ""

    def _finish(self, job: _Job, outcome: Outcome, problem: str) -> None:
        moved = job.done * job.rank.block_bytes
        self._link.send(["done", job.ticket, outcome, problem, moved, job.seconds])

    def _populate(self) -> None:
        length = min(POPULATE_BYTES, len(self._pool) - self._populated)
        try:
            self._pool.madvise(_MADV_POPULATE_WRITE, self._populated, length)
        except OSError:
            # An older kernel: pages are mapped by the first copies instead.
            self._populated = len(self._pool)
            return
        self._populated += length


def main(arguments: list[str]) -> None:
    """Entry of the process."""
    belong_to_daemon()
    claim_priority()
    link_fd, pool_fd, pool_bytes = (int(text) for text in arguments[:3])
    link = Link(socket.socket(fileno=link_fd))
    pool = mmap.mmap(pool_fd, pool_bytes)
    os.close(pool_fd)
    MoverProcess(link, pool, Faults(arguments[3])).run()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except msgpack.exceptions.UnpackException as broken:
        sys.exit(f"hpkv mover: broken message from the daemon: {broken!r}")
