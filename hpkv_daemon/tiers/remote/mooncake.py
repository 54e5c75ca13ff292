"""DRAM that nodes pool: ``mooncake://MASTER:PORT``, through Mooncake Store's own client.

This client lends no memory of its own: stores are processes that somebody runs beside the master. Payloads go straight
between pool and network, by TCP or, as Mooncake's own variables say (``MOONCAKE_PROTOCOL``, ``MOONCAKE_DEVICE``), RDMA.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import queue
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpkv_daemon.tiers.remote.backend import MISSING, OK, Answer, BackendError, Fate, Piece
from hpkv_daemon.tiers.remote.format import HEADER_BYTES

HEADERS = 1024
"""Headers that are on their way at once."""
STAGING_BYTES = 256 << 20
"""For payloads that do not lie in the pool: encrypted ones."""
_BATCH = 64

_NO_ROOM, _BAD_SIZE, _NOT_THERE, _EXISTS = -200, -600, -704, -705
"""Mooncake's codes; others below 0 are failures that may pass."""


def _answer(code: int) -> Answer:
    if code >= 0:
        return OK
    fates = {_NO_ROOM: Fate.FULL, _BAD_SIZE: Fate.BAD, _NOT_THERE: Fate.MISSING, _EXISTS: Fate.EXISTS}
    return Answer(fates.get(code, Fate.FAILED), f"Mooncake Store answers {code}")


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


class MooncakeBackend:
    """A ``Backend`` over one master. Connects when it is first needed, and again if that failed.

    ``pool``: memory in which payloads lie, registered for transfers until ``close``.
    """

    def __init__(self, url: str, pool: mmap.mmap | None) -> None:
        self._master = url.partition("://")[2]
        self._pool = pool
        self._first = ctypes.addressof(ctypes.c_char.from_buffer(pool)) if pool is not None else 0
        self._last = self._first + (len(pool) if pool is not None else 0)
        self._headers = mmap.mmap(-1, HEADERS * HEADER_BYTES)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(HEADERS):
            self._free.put(number * HEADER_BYTES)
        self._header_base = ctypes.addressof(ctypes.c_char.from_buffer(self._headers))
        self._opened: Any = None
        self._lock = threading.Lock()

    def _store(self) -> Any:
        with self._lock:
            if self._opened is None:
                self._opened = self._connect()
            return self._opened

    def _connect(self) -> Any:
        # It tells of every step on stderr, which is the daemon's log.
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
            host, _, port = self._master.rpartition(":")
            with socket.create_connection((host.strip("[]"), int(port)), 2.0) as probe:
                ours = probe.getsockname()[0]
        except (ImportError, OSError) as problem:
            raise BackendError(f"Mooncake Store cannot be used: {problem}") from None
        protocol, device = os.environ.get("MOONCAKE_PROTOCOL", "tcp"), os.environ.get("MOONCAKE_DEVICE", "")
        code = store.setup(ours, "P2PHANDSHAKE", 0, STAGING_BYTES, protocol, device, self._master)
        if not code and self._pool is not None:
            code = store.register_buffer(self._first, len(self._pool))
        if not code:
            code = store.register_buffer(self._header_base, len(self._headers))
        if code:
            store.close()
            raise BackendError(f"the Mooncake master at {self._master} cannot be used: it answers {code}")
        return store

    def _in_pool(self, piece: Piece) -> bool:
        at = _address(piece.payload)
        return self._first <= at and at + len(piece.payload) <= self._last

    def get(self, pieces: Sequence[Piece]) -> list[Answer]:
        """See ``Backend``."""
        return self._move(pieces, self._get_batch, self._get_staged)

    def put(self, pieces: Sequence[Piece]) -> list[Answer]:
        """See ``Backend``."""
        return self._move(pieces, self._put_batch, self._put_staged)

    def _move(self, pieces: Sequence[Piece], direct: Any, staged: Any) -> list[Answer]:
        try:
            store = self._store()
        except BackendError as problem:
            return [Answer(Fate.FAILED, str(problem))] * len(pieces)
        answers: list[Answer] = []
        for start in range(0, len(pieces), _BATCH):
            batch = pieces[start : start + _BATCH]
            if all(self._in_pool(piece) for piece in batch):
                answers += direct(store, batch)
            else:
                answers += [staged(store, piece) for piece in batch]
        return answers

    def _buffers(
        self, batch: Sequence[Piece], slots: Sequence[int]
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        pointers = [[self._header_base + at, _address(piece.payload)] for at, piece in zip(slots, batch, strict=True)]
        return [piece.name for piece in batch], pointers, [[HEADER_BYTES, len(piece.payload)] for piece in batch]

    def _get_batch(self, store: Any, batch: Sequence[Piece]) -> list[Answer]:
        slots = [self._free.get() for _ in batch]
        try:
            codes = store.batch_get_into_multi_buffers(*self._buffers(batch, slots))
            answers = []
            for piece, at, code in zip(batch, slots, codes, strict=True):
                piece.header[:] = self._headers[at : at + HEADER_BYTES]
                # A transfer from an object that is too short just fails.
                size = code if code >= 0 or code == _NOT_THERE else store.get_size(piece.name)
                wrong = 0 <= size != HEADER_BYTES + len(piece.payload)
                answers.append(Answer(Fate.BAD, f"the object has {size} bytes") if wrong else _answer(code))
            return answers
        finally:
            for at in slots:
                self._free.put(at)

    def _put_batch(self, store: Any, batch: Sequence[Piece]) -> list[Answer]:
        slots = [self._free.get() for _ in batch]
        try:
            for piece, at in zip(batch, slots, strict=True):
                self._headers[at : at + HEADER_BYTES] = bytes(piece.header)
            return [_answer(code) for code in store.batch_put_from_multi_buffers(*self._buffers(batch, slots))]
        finally:
            for at in slots:
                self._free.put(at)

    def _get_staged(self, store: Any, piece: Piece) -> Answer:
        size = store.get_size(piece.name)
        if size < 0:
            return _answer(size)
        if size != HEADER_BYTES + len(piece.payload):
            return Answer(Fate.BAD, f"the object has {size} bytes")
        whole = memoryview(store.get(piece.name))
        if len(whole) != size:
            return Answer(Fate.FAILED, "Mooncake Store gives less than it has")
        piece.header[:] = whole[:HEADER_BYTES]
        piece.payload[:] = whole[HEADER_BYTES:]
        return OK

    def _put_staged(self, store: Any, piece: Piece) -> Answer:
        return _answer(store.put_parts(piece.name, piece.header, piece.payload))

    def exists(self, names: Sequence[str]) -> list[Answer]:
        """See ``Backend``."""
        try:
            codes = self._store().batch_is_exist(list(names))
        except BackendError as problem:
            return [Answer(Fate.FAILED, str(problem))] * len(names)
        return [OK if code == 1 else MISSING if code == 0 else _answer(code) for code in codes]

    def delete(self, names: Sequence[str]) -> list[Answer]:
        """See ``Backend``."""
        try:
            store = self._store()
        except BackendError as problem:
            return [Answer(Fate.FAILED, str(problem))] * len(names)
        codes = [store.remove(name, True) for name in names]
        return [OK if code == _NOT_THERE else _answer(code) for code in codes]

    def clear(self, folder: str) -> int:
        """See ``Backend``."""
        count = int(self._store().remove_by_regex(f"^{re.escape(folder)}/", True))
        if count < 0:
            raise BackendError(f"Mooncake Store answers {count}")
        return count

    def listing(self, folder: str) -> Iterator[tuple[str, int]]:
        """See ``Backend``. There is no such request."""
        raise BackendError(f"Mooncake Store does not tell what is under {folder or 'it'}")

    def close(self) -> None:
        """See ``Backend``."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None
