"""The disk process: ``python -m hpkv_daemon.tiers.disk.process LINK_FD POOL_FD POOL_BYTES FAULTS DIRECTORY IDENTITY
READERS``.

The main thread listens, answers signs of life and sends replies. Two threads write blocks, so that one can compute
checksums while the other waits for the disk; every other order that changes files waits for the writes before it, and
those after it wait for it. A few threads read, verify and fill slots; one looks through segments in the background:
recovery and scrubs. Whatever goes wrong becomes a reply; nothing but the daemon's end, or an order that cannot be
understood, ends the process.

An order is ``[verb, ticket, ...]``, its reply ``["done", ticket, [outcome ...], problem, result]``.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

from hpkv_daemon.child import belong_to_daemon
from hpkv_daemon.faults import Faults
from hpkv_daemon.link import Link
from hpkv_daemon.tiers.base import Outcome
from hpkv_daemon.tiers.disk.format import BadFormat, Record, aligned
from hpkv_daemon.tiers.disk.segments import SegmentFiles

CHUNK_RECORDS = 256
"""Records of one recovered segment that are told at once: about 1 ms of the control loop."""
CHUNKS_AHEAD = 2
"""So many chunks are sent before the daemon has asked for more."""

WRITERS = 2

_NICE = 5
_OUTCOMES = {
    errno.ENOSPC: Outcome.NO_SPACE,
    errno.EDQUOT: Outcome.NO_SPACE,
    errno.EROFS: Outcome.READ_ONLY,
    errno.ENOENT: Outcome.MISSING,
}

Orders = queue.SimpleQueue[Callable[[], None]]


def judge(problem: Exception) -> tuple[Outcome, str]:
    """What a failure means, and what to say about it."""
    if isinstance(problem, BadFormat):
        return Outcome.BAD, str(problem)
    if isinstance(problem, OSError):
        return _OUTCOMES.get(problem.errno or 0, Outcome.IO_ERROR), problem.strerror or str(problem)
    return Outcome.IO_ERROR, repr(problem)


class _Batch:
    """Reads of one ticket, shared out to the readers; the last one to end sends the reply."""

    def __init__(self, count: int, finish: Callable[[list[int], str], None]) -> None:
        self._outcomes = [int(Outcome.IO_ERROR)] * count
        self._left = count
        self._problem = ""
        self._finish = finish
        self._lock = threading.Lock()

    def end(self, index: int, outcome: Outcome, problem: str) -> None:
        """One of them is over."""
        with self._lock:
            self._outcomes[index] = int(outcome)
            self._problem = self._problem or problem
            self._left -= 1
            last = not self._left
        if last:
            self._finish(self._outcomes, self._problem)


class _Writers:
    """Carries out orders in turn, but lets those that are ``shared`` overlap with one another."""

    def __init__(self, threads: int) -> None:
        self._orders: queue.SimpleQueue[tuple[bool, Callable[[], None]]] = queue.SimpleQueue()
        self._shared: Orders = queue.SimpleQueue()
        self._free = threading.Semaphore(threads)
        self._threads = threads

    def start(self) -> None:
        """Start the threads."""
        threading.Thread(target=self._hand_out, daemon=True).start()
        for _ in range(self._threads):
            threading.Thread(target=self._work, daemon=True).start()

    def put(self, order: Callable[[], None], shared: bool = False) -> None:
        """One more order."""
        self._orders.put((shared, order))

    def _hand_out(self) -> None:
        while True:
            shared, order = self._orders.get()
            if shared:
                self._free.acquire()
                self._shared.put(order)
                continue
            for _ in range(self._threads):
                self._free.acquire()
            order()
            self._free.release(self._threads)

    def _work(self) -> None:
        while True:
            self._shared.get()()
            self._free.release()


class DiskProcess:
    """Threads, queues between them, and what each order means."""

    def __init__(self, link: Link, pool: mmap.mmap, directory: Path, identity: bytes, faults: Faults) -> None:
        self._link = link
        self._pool = memoryview(pool)
        self._outbox: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._files = SegmentFiles(directory, identity, faults, lambda text: self._send(["note", 0, text]))
        self._writers = _Writers(WRITERS)
        self._reads: Orders = queue.SimpleQueue()
        self._background: Orders = queue.SimpleQueue()
        self._credits = threading.Semaphore(CHUNKS_AHEAD)

    def run(self, readers: int) -> None:
        """Serve until the daemon closes the link."""
        self._writers.start()
        for orders in [self._background, *[self._reads] * readers]:
            threading.Thread(target=_work, args=(orders,), daemon=True).start()
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(self._link, select.POLLIN)
        self._send(["started", 0])
        while not self._link.closed:
            for message in self._link.receive():
                self._obey(*message)
            while not self._outbox.empty():
                self._link.send(self._outbox.get())
            poller.modify(self._link, select.POLLIN if self._link.flush() else select.POLLIN | select.POLLOUT)
            for ready, _ in poller.poll():
                if ready == self._wake:
                    os.eventfd_read(self._wake)

    def _send(self, message: list[Any]) -> None:
        self._outbox.put(message)
        os.eventfd_write(self._wake, 1)

    def _obey(self, verb: str, ticket: int, *rest: Any) -> None:
        if verb == "ping":
            self._send(["alive", ticket])
        elif verb == "more":
            self._credits.release()
        elif verb == "read":
            self._share_out(ticket, *rest)
        elif verb in ("load", "verify"):
            work = self._load if verb == "load" else self._verify
            self._background.put(lambda: self._reply(ticket, lambda: work(ticket, *rest)))
        else:
            orders: dict[str, Callable[..., Any]] = {
                "survey": self._files.survey,
                "begin": lambda place: self._files.begin(self._files.place(*place)),
                "seal": lambda place: self._files.seal(self._files.place(*place)),
                "resume": lambda place: self._files.resume(self._files.place(*place)),
                "retire": lambda place, keep: self._files.retire(self._files.place(*place), keep),
                "write": self._write,
                "copy": self._copy,
                "sync": lambda: None,
            }
            order = orders[verb]
            self._writers.put(lambda: self._reply(ticket, lambda: order(*rest)), shared=verb in ("write", "copy"))

    def _reply(self, ticket: int, order: Callable[[], Any]) -> None:
        """Carry out an order of one outcome."""
        try:
            result = order()
        except Exception as problem:  # noqa: BLE001  (what this order met must not end those of others)
            outcome, text = judge(problem)
            self._send(["done", ticket, [int(outcome)], text, None])
        else:
            self._send(["done", ticket, [int(Outcome.OK)], "", result])

    # -- what the threads do ------------------------------------------------------------------------------

    def _payload(self, offset: int, length: int) -> memoryview:
        if offset < 0 or offset % 4096 or offset + aligned(length) > len(self._pool):
            raise BadFormat(f"no slot of {length} bytes is at byte {offset} of the pool")
        return self._pool[offset : offset + aligned(length)]

    def _share_out(self, ticket: int, reads: list[Any]) -> None:
        batch = _Batch(len(reads), lambda outcomes, problem: self._send(["done", ticket, outcomes, problem, None]))
        for index, (place, record, offset) in enumerate(reads):
            self._reads.put(lambda read=(index, place, record, offset): self._read(batch, *read))  # type: ignore[misc]

    def _read(self, batch: _Batch, index: int, place: list[int], record: list[Any], offset: int) -> None:
        try:
            wanted = Record(*record)
            self._files.fetch(self._files.place(*place), wanted, self._payload(offset, wanted.length))
        except Exception as problem:  # noqa: BLE001  (what this block met must not end those of others)
            batch.end(index, *judge(problem))
        else:
            batch.end(index, Outcome.OK, "")

    def _write(self, place: list[int], records: list[Any], offsets: list[int]) -> None:
        wanted = [Record(*record) for record in records]
        payloads = [self._payload(at, record.length) for at, record in zip(offsets, wanted, strict=True)]
        self._files.append(self._files.place(*place), wanted, payloads)

    def _copy(self, source: list[int], target: list[int], records: list[Any]) -> list[int]:
        """Write blocks of one segment again in another; the outcome of each."""
        outcomes = []
        scratch = memoryview(mmap.mmap(-1, max(aligned(Record(*old).length) for old, _ in records)))
        for old, new in records:
            wanted = Record(*old)
            buffer = scratch[: aligned(wanted.length)]
            try:
                found = self._files.fetch(self._files.place(*source), wanted, buffer)
            except (BadFormat, OSError) as problem:
                outcomes.append(int(judge(problem)[0]))
                continue
            written = Record(*new)._replace(parent=found.parent)
            self._files.append(self._files.place(*target), [written], [buffer])
            outcomes.append(int(Outcome.OK))
        return outcomes

    def _load(self, ticket: int, place: list[int]) -> bool:
        """Tell the records of a segment; whether it is sealed."""
        records, sealed = self._files.load(self._files.place(*place))
        for start in range(0, len(records), CHUNK_RECORDS):
            self._credits.acquire()
            self._send(["found", ticket, records[start : start + CHUNK_RECORDS]])
        return sealed

    def _verify(self, _ticket: int, place: list[int], records: list[Any], bytes_per_second: int) -> list[int]:
        """Read blocks to see whether they are what they should be; the outcome of each."""
        outcomes = []
        buffer = memoryview(b"")
        for fields in records:
            started, wanted = time.monotonic(), Record(*fields)
            if len(buffer) < aligned(wanted.length):
                buffer = memoryview(mmap.mmap(-1, aligned(wanted.length)))
            try:
                self._files.fetch(self._files.place(*place), wanted, buffer[: aligned(wanted.length)])
            except (BadFormat, OSError) as problem:
                outcomes.append(int(judge(problem)[0]))
            else:
                outcomes.append(int(Outcome.OK))
            time.sleep(max(0.0, wanted.length / bytes_per_second - (time.monotonic() - started)))
        return outcomes


def _work(orders: Orders) -> None:
    while True:
        orders.get()()


def main(arguments: list[str]) -> None:
    """Entry of the process."""
    belong_to_daemon()
    # Engines, daemon and movers go first: a block that is late here is computed again, at worst.
    os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICE))
    link_fd, pool_fd, pool_bytes = (int(text) for text in arguments[:3])
    faults, directory, identity, readers = arguments[3:]
    link = Link(socket.socket(fileno=link_fd))
    pool = mmap.mmap(pool_fd, pool_bytes)
    os.close(pool_fd)
    DiskProcess(link, pool, Path(directory), bytes.fromhex(identity), Faults(faults)).run(int(readers))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except msgpack.exceptions.UnpackException as broken:
        sys.exit(f"hpkv disk: broken message from the daemon: {broken!r}")
    # Threads may still be at it: nobody waits for them.
    os._exit(0)
