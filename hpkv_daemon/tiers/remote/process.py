"""The remote process: ``python -m hpkv_daemon.tiers.remote.process LINK_FD POOL_FD POOL_BYTES URL KEY_FILE``.

The main thread listens, answers signs of life and sends replies. A few threads read, a few write, a few look up, one
clears; the backend spreads each order over its connections. Payloads go between the pool's slots and the network's
buffers; only encrypted ones take a way round. Whatever goes wrong becomes a reply; nothing but the daemon's end, or an
order that cannot be understood, ends the process.

An order is ``[verb, ticket, ...]``, its reply ``["done", ticket, [outcome ...], problem, result]``.
"""

from __future__ import annotations

import mmap
import os
import queue
import select
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from hpkv_client.errors import HpkvError
from hpkv_daemon.child import belong_to_daemon
from hpkv_daemon.link import Link
from hpkv_daemon.tiers.base import Outcome
from hpkv_daemon.tiers.remote.backend import Answer, Backend, BackendError, Fate, Piece
from hpkv_daemon.tiers.remote.format import (
    HEADER_BYTES,
    BadObject,
    check_object,
    object_name,
    pack_header,
    space_name,
    stored_bytes,
)
from hpkv_daemon.tiers.remote.opening import open_backend
from hpkv_daemon.tiers.remote.sealing import Seal, read_secret

READERS, WRITERS, SEARCHERS = 3, 2, 4
"""Orders of each kind that are carried out at once."""

_NICE = 5
_PAGE = 4096
_OUTCOMES = {
    Fate.OK: Outcome.OK,
    Fate.EXISTS: Outcome.OK,
    Fate.MISSING: Outcome.MISSING,
    Fate.BAD: Outcome.BAD,
    Fate.FULL: Outcome.NO_SPACE,
    Fate.DENIED: Outcome.READ_ONLY,
    Fate.FAILED: Outcome.IO_ERROR,
}

Orders = queue.SimpleQueue[Callable[[], None]]


class Block(NamedTuple):
    """One block of an order: its payload lies at ``offset`` of the pool."""

    fingerprint: bytes
    key: bytes
    length: int
    offset: int


class Store:
    """What orders mean: blocks in objects, verified and perhaps encrypted. Used by several threads at once."""

    def __init__(self, backend: Backend, pool: memoryview, seal: Seal | None) -> None:
        self._backend = backend
        self._pool = pool
        self._seal = seal
        self._key_id = seal.key_id if seal else b""

    def _slot(self, block: Block) -> memoryview:
        end = block.offset + block.length
        if block.offset < 0 or block.offset % _PAGE or block.length < 1 or end > len(self._pool):
            raise BadObject(f"no slot of {block.length} bytes is at byte {block.offset} of the pool")
        return self._pool[block.offset : end]

    def _name(self, block: Block) -> str:
        return object_name(block.fingerprint, block.key, self._key_id)

    def read(self, blocks: Sequence[Block]) -> list[Answer]:
        """Fill slots with blocks that were verified. What is not the block it should be is deleted, to be put anew."""
        pieces = []
        for block in blocks:
            slot = self._slot(block)
            stored = memoryview(bytearray(stored_bytes(block.length, True))) if self._seal else slot
            pieces.append(Piece(self._name(block), memoryview(bytearray(HEADER_BYTES)), stored))
        answers = self._backend.get(pieces)
        for index, (block, piece) in enumerate(zip(blocks, pieces, strict=True)):
            if answers[index].fate is Fate.OK:
                answers[index] = self._verified(block, piece)
            if answers[index].fate is Fate.BAD:
                self._backend.delete([piece.name])
        return answers

    def _verified(self, block: Block, piece: Piece) -> Answer:
        try:
            sealing = check_object(
                block.fingerprint, block.key, block.length, piece.header, piece.payload, self._key_id
            )
        except BadObject as problem:
            return Answer(Fate.BAD, str(problem))
        if sealing is not None and self._seal is not None:
            payload = self._seal.decrypt(block.fingerprint, block.key, block.length, sealing, piece.payload)
            if payload is None:
                return Answer(Fate.BAD, "the payload was not encrypted for this block")
            self._slot(block)[:] = payload
        return Answer(Fate.OK)

    def write(self, blocks: Sequence[Block]) -> list[Answer]:
        """Create objects of blocks; those that exist are not sent."""
        answers = self._backend.exists([self._name(block) for block in blocks])
        absent = [index for index, answer in enumerate(answers) if answer.fate is Fate.MISSING]
        pieces = [self._piece(blocks[index]) for index in absent]
        for index, answer in zip(absent, self._backend.put(pieces) if pieces else [], strict=True):
            # A store that cannot find where to put something has no such bucket.
            lost = answer.fate is Fate.MISSING
            answers[index] = Answer(Fate.FAILED, answer.problem) if lost else answer
        there = Answer(Fate.EXISTS)
        fresh = set(absent)
        return [there if a.fate is Fate.OK and i not in fresh else a for i, a in enumerate(answers)]

    def _piece(self, block: Block) -> Piece:
        stored: memoryview = self._slot(block)
        sealing = None
        if self._seal is not None:
            sealing, encrypted = self._seal.encrypt(block.fingerprint, block.key, stored)
            stored = memoryview(encrypted)
        header = pack_header(block.fingerprint, block.key, block.length, stored, sealing)
        return Piece(self._name(block), memoryview(header), stored)

    def exists(self, fingerprint: bytes, keys: Sequence[bytes]) -> list[Answer]:
        """Which blocks are there."""
        return self._backend.exists([object_name(fingerprint, key, self._key_id) for key in keys])

    def delete(self, fingerprint: bytes, keys: Sequence[bytes]) -> list[Answer]:
        """Delete blocks."""
        return self._backend.delete([object_name(fingerprint, key, self._key_id) for key in keys])

    def clear(self, fingerprint: bytes) -> list[Answer]:
        """Delete all blocks of a namespace."""
        self._backend.clear(space_name(fingerprint, self._key_id))
        return [Answer(Fate.OK)]


class RemoteProcess:
    """Threads, queues between them, and the link."""

    def __init__(self, link: Link, store: Store) -> None:
        self._link = link
        self._store = store
        self._outbox: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queues: dict[str, Orders] = {}

    def run(self) -> None:
        """Serve until the daemon closes the link."""
        for verbs, threads in ((("read",), READERS), (("write",), WRITERS), (("exists",), SEARCHERS)):
            self._start(verbs, threads)
        self._start(("delete", "clear"), 1)
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

    def _start(self, verbs: Sequence[str], threads: int) -> None:
        orders: Orders = queue.SimpleQueue()
        self._queues |= dict.fromkeys(verbs, orders)
        for _ in range(threads):
            threading.Thread(target=_work, args=(orders,), daemon=True).start()

    def _send(self, message: list[Any]) -> None:
        self._outbox.put(message)
        os.eventfd_write(self._wake, 1)

    def _obey(self, verb: str, ticket: int, *rest: Any) -> None:
        if verb == "ping":
            self._send(["alive", ticket])
            return
        order: Callable[[], list[Answer]]
        if verb in ("read", "write"):
            move = self._store.read if verb == "read" else self._store.write
            blocks = [Block(*fields) for fields in rest[0]]

            def order() -> list[Answer]:
                return move(blocks)
        else:
            orders: dict[str, Callable[..., list[Answer]]] = {
                "exists": self._store.exists,
                "delete": self._store.delete,
                "clear": self._store.clear,
            }
            ask = orders[verb]

            def order() -> list[Answer]:
                return ask(*rest)

        self._queues[verb].put(lambda: self._reply(ticket, order))

    def _reply(self, ticket: int, order: Callable[[], list[Answer]]) -> None:
        try:
            answers = order()
        except BackendError as problem:
            answers = [Answer(Fate.FAILED, str(problem))]
        except Exception as problem:  # noqa: BLE001  (what this order met must not end those of others)
            answers = [Answer(Fate.FAILED, f"{type(problem).__name__} in the remote process")]
        outcomes = [int(_OUTCOMES[answer.fate]) for answer in answers]
        worst = max(answers, key=lambda answer: answer.fate, default=Answer(Fate.OK))
        existed = [index for index, answer in enumerate(answers) if answer.fate is Fate.EXISTS]
        self._send(["done", ticket, outcomes, worst.problem, existed])


def _work(orders: Orders) -> None:
    while True:
        orders.get()()


def main(arguments: list[str]) -> None:
    """Entry of the process."""
    belong_to_daemon()
    # Engines, daemon and movers go first: a block that is late here is computed again, at worst.
    os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICE))
    link_fd, pool_fd, pool_bytes = (int(text) for text in arguments[:3])
    url, key_file = arguments[3:]
    link = Link(socket.socket(fileno=link_fd))
    pool = mmap.mmap(pool_fd, pool_bytes)
    os.close(pool_fd)
    seal = Seal(read_secret(Path(key_file))) if key_file else None
    RemoteProcess(link, Store(open_backend(url, pool), memoryview(pool), seal)).run()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except msgpack.exceptions.UnpackException as broken:
        sys.exit(f"hpkv remote: broken message from the daemon: {broken!r}")
    except HpkvError as problem:
        sys.exit(f"hpkv remote: {problem}")
    # Threads may still be at it: nobody waits for them.
    os._exit(0)
