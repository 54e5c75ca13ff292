"""The index beside the pool: which blocks lie where, written so that the next daemon can read it at any instant.

The death of the process is the only thing it has to outlive. Stores into a shared mapping stay in the file's pages
whatever ends the process, in the order of the program, so nothing is ever flushed; after a restart of the machine
the boot's id is another one, and the index is not believed. The word that says that a record counts is written last
when a block comes, and cleared first when it goes.

    header       one page: format, sizes, boot, identity of the pool file, how much of the rest is allocated
    namespaces   one page each: block size, fingerprint, tenant
    records      64 bytes for each slot number: key, last use, place, parent, namespace, state

Only allocated pages are ever touched through the mapping: a hole in a full file system would kill the process.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpkv_client.types import KEY_BYTES, BlockKey
from hpkv_daemon.core.ledger import NONE, Recorded, RecordedNamespace
from hpkv_daemon.core.slots import ALIGNMENT, round_up
from hpkv_daemon.pool.file import INDEX_NAME, Pool, open_private

log = logging.getLogger(__name__)

MAGIC = b"HPKVidx\n"
FORMAT = 1
"""One more whenever header, namespaces, records, or what a slot holds change."""

MAX_NAMESPACES = 1024
"""Blocks of further namespaces are not recorded."""

PAGE_BYTES = 4096
RECORD_BYTES = 64
RECORDS_AT = (1 + MAX_NAMESPACES) * PAGE_BYTES
_STEP_RECORDS = 4096
"""Allocated at a time: 256 KiB."""
_READ_BYTES = 64 << 20

_HEADER = struct.Struct(f"@{len(MAGIC)}sIIQQQ16s")
"""Magic, format, alignment, bytes of pool and extent, inode of the pool, boot id."""
_ALLOCATED = struct.Struct("@II")
"""Namespaces and records; right behind the header."""
_NAMESPACE = struct.Struct(f"@IIQ{KEY_BYTES}s")
"""Whether it counts, length of the tenant's name, block bytes, fingerprint; the name follows."""
_MAX_TENANT_BYTES = PAGE_BYTES - _NAMESPACE.size

_RECORD = struct.Struct(f"@{KEY_BYTES}sQIII")
"""Key, last use, offset in units of ALIGNMENT, parent's slot + 1, namespace's entry; the state follows."""
_USE_WORD, _USE_WORDS = 4, RECORD_BYTES // 8
"""Of the last use, in words of 8 bytes."""
_STATE_WORD, _STATE_WORDS = 13, RECORD_BYTES // 4
"""Of the state, in words of 4 bytes."""
_COUNTS = 0x48504B56
_MAX_TICK = 1 << 62

_LAYOUT = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("use", np.uint64),
        ("place", np.uint32),
        ("above", np.uint32),
        ("entry", np.uint32),
        ("state", np.uint32),
        ("spare", "V8"),
    ]
)


def boot_id() -> bytes:
    """16 bytes that name this run of the kernel."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


class PoolLedger:
    """A ``Ledger`` in a file beside the pool. Owns file and mapping: ``close`` it.

    ``cold``: why nothing of an earlier daemon can be read; empty if something can. When the file system is full,
    the ledger stops growing, says so once in the log, and what it has no room for does not survive.
    """

    def __init__(self, fd: int, pool_bytes: int, cold: str) -> None:
        self.cold = cold
        self._fd = fd
        self._pool_bytes = pool_bytes
        self._map: mmap.mmap | None = None
        self._bytes = self._uses = self._states = memoryview(b"")
        self._full = False
        self._most_records = pool_bytes // ALIGNMENT
        self._namespaces = 0
        """Pages of namespaces that are allocated."""
        self._records = 0
        """Records that are allocated."""
        self._known: dict[RecordedNamespace, int] = {}
        """Page of each namespace."""
        self._entries: list[int] = []
        """Page of each namespace by its number in this life; ``NONE``: not recorded."""

    @classmethod
    def open(cls, pool: Pool, extent_bytes: int) -> PoolLedger:
        """The index of the pool, begun anew unless it was written for exactly this one since the machine started.

        Only the holder of the pool may do this. Raises ``ConfigError`` or ``NotPermitted`` as the pool does.
        """
        fd = open_private(pool.path.with_name(INDEX_NAME), "index")
        try:
            header = _HEADER.pack(MAGIC, FORMAT, ALIGNMENT, pool.size, extent_bytes, pool.identity, boot_id())
            ledger = cls(fd, pool.size, pool.cold or _distrust(fd, header, pool.size))
            ledger._map_file(header)
        except BaseException:
            os.close(fd)
            raise
        return ledger

    def _map_file(self, header: bytes) -> None:
        if self.cold:
            os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, size := _file_bytes(self._fd, self._pool_bytes))
        namespaces, records = (0, 0) if self.cold else _ALLOCATED.unpack(os.pread(self._fd, 8, _HEADER.size))
        try:
            # What is allocated already costs nothing; in a damaged file it may not be.
            os.posix_fallocate(self._fd, 0, (1 + namespaces) * PAGE_BYTES)
            if records:
                os.posix_fallocate(self._fd, RECORDS_AT, records * RECORD_BYTES)
            # Without NORESERVE a file of huge pages would claim them for every record there may ever be.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0x4000)
            self._map = mmap.mmap(self._fd, size, flags)
        except OSError as problem:
            # It must not stay as it is: the pool's bytes are about to change, and nobody would tell it.
            os.ftruncate(self._fd, 0)
            self.cold = self.cold or f"the index cannot be mapped ({problem.strerror})"
            self._stop_growing(problem)
            return
        self._bytes = memoryview(self._map)
        places = self._bytes[RECORDS_AT:]
        self._uses, self._states = places.cast("Q"), places.cast("I")
        self._namespaces, self._records = namespaces, records
        if self.cold:
            self._bytes[len(MAGIC) : len(header)] = header[len(MAGIC) :]
            self._bytes[: len(MAGIC)] = MAGIC

    def close(self) -> None:
        """Let the file go; it stays. May be called again."""
        if self._fd < 0:
            return
        if self._map is not None:
            for view in (self._uses, self._states, self._bytes):
                view.release()
            self._bytes = self._uses = self._states = memoryview(b"")
            self._map.close()
            self._map = None
        os.close(self._fd)
        self._fd = -1
        self._records, self._full = 0, True

    @property
    def allocated_bytes(self) -> int:
        """Memory that the file takes."""
        return os.fstat(self._fd).st_blocks * 512

    # -- what an earlier daemon left ----------------------------------------------------------------------

    def recorded(self) -> Recorded:
        """Its blocks, in no order. Once, before anything is written."""
        found = self._read_records()
        pages = self._read_namespaces()
        named = np.zeros(MAX_NAMESPACES + 1, bool)
        named[list(pages)] = True
        good = (found["state"] == _COUNTS) & (found["use"] < _MAX_TICK)
        good &= named[np.minimum(found["entry"], MAX_NAMESPACES)]
        good &= found["place"].astype(np.int64) * ALIGNMENT < self._pool_bytes
        for slot in np.flatnonzero(~good & (found["state"] != 0)).tolist():
            self.gone(slot)
        slots = np.flatnonzero(good)
        entries = found["entry"][slots]
        used = self._keep_pages(pages, set(np.flatnonzero(np.bincount(entries)).tolist()))
        homes = np.zeros(MAX_NAMESPACES, np.int64)
        homes[used] = np.arange(len(used))
        return Recorded(
            [pages[entry] for entry in used],
            _column(slots),
            _column(homes[entries]),
            _column(found["place"][slots].astype(np.int64) * ALIGNMENT),
            _column(found["above"][slots].astype(np.int64) - 1),
            _column(found["use"][slots]),
            found["key"][slots].tobytes(),
        )

    def _read_records(self) -> npt.NDArray[np.void]:
        # Read, not mapped: nothing that the header says of a damaged file can end the process.
        content = bytearray(self._records * RECORD_BYTES)
        into, done = memoryview(content), 0
        while done < len(into):
            read = os.preadv(self._fd, [into[done : done + _READ_BYTES]], RECORDS_AT + done)
            if not read:
                break
            done += read
        return np.frombuffer(content, _LAYOUT)

    def _read_namespaces(self) -> dict[int, RecordedNamespace]:
        """By their pages."""
        found = {}
        for entry in range(self._namespaces):
            page = os.pread(self._fd, PAGE_BYTES, (1 + entry) * PAGE_BYTES)
            counts, length, block_bytes, fingerprint = _NAMESPACE.unpack_from(page)
            if counts == _COUNTS and length <= _MAX_TENANT_BYTES:
                tenant = page[_NAMESPACE.size : _NAMESPACE.size + length].decode(errors="surrogateescape")
                found[entry] = RecordedNamespace(fingerprint, block_bytes, tenant)
        return found

    def _keep_pages(self, pages: dict[int, RecordedNamespace], used: set[int]) -> list[int]:
        """The pages in use. Those of namespaces without a block are given back, or they would fill the table."""
        for entry, known in pages.items():
            if entry in used:
                self._known.setdefault(known, entry)
            else:
                _NAMESPACE.pack_into(self._bytes, (1 + entry) * PAGE_BYTES, 0, 0, 0, b"")
        return sorted(used)

    # -- what this one writes -----------------------------------------------------------------------------

    def opened(self, namespace: int, fingerprint: bytes, block_bytes: int, tenant: str) -> None:
        """See ``Ledger``."""
        known = RecordedNamespace(fingerprint, block_bytes, tenant)
        entry = self._known.get(known)
        if entry is None:
            entry = self._enter(known)
        assert namespace == len(self._entries), "namespaces are numbered one after the other"
        self._entries.append(entry)

    def _enter(self, known: RecordedNamespace) -> int:
        """Write a page for the namespace; its number, ``NONE`` if there is no room for it."""
        used = set(self._known.values())
        entry = next((entry for entry in range(MAX_NAMESPACES) if entry not in used), NONE)
        tenant = known.tenant.encode(errors="surrogateescape")
        if entry == NONE or len(tenant) > _MAX_TENANT_BYTES:
            log.info("namespace %s is not recorded: its blocks end with this daemon", known.fingerprint.hex())
            return NONE
        at = (1 + entry) * PAGE_BYTES
        if entry >= self._namespaces:
            if not self._allocate(at, PAGE_BYTES):
                return NONE
            self._namespaces = entry + 1
            self._note_allocated()
        _NAMESPACE.pack_into(self._bytes, at, 0, len(tenant), known.block_bytes, known.fingerprint)
        self._bytes[at + _NAMESPACE.size : at + _NAMESPACE.size + len(tenant)] = tenant
        self._bytes[at : at + 4].cast("I")[0] = _COUNTS
        self._known[known] = entry
        return entry

    def kept(self, slot: int, namespace: int, key: BlockKey, offset: int, parent: int, tick: int) -> None:
        """See ``Ledger``."""
        entry = self._entries[namespace]
        if entry == NONE or (slot >= self._records and not self._make_room_for(slot)):
            return
        at = RECORDS_AT + slot * RECORD_BYTES
        _RECORD.pack_into(self._bytes, at, key, tick, offset // ALIGNMENT, parent + 1, entry)
        self._states[slot * _STATE_WORDS + _STATE_WORD] = _COUNTS

    def used(self, slot: int, tick: int) -> None:
        """See ``Ledger``."""
        if slot < self._records:
            self._uses[slot * _USE_WORDS + _USE_WORD] = tick

    def gone(self, slot: int) -> None:
        """See ``Ledger``."""
        if slot < self._records:
            self._states[slot * _STATE_WORDS + _STATE_WORD] = 0

    def check(self, resident: Iterable[tuple[int, int, BlockKey, int, int]]) -> None:
        """See ``Ledger``."""
        expected = 0
        for slot, namespace, key, offset, parent in resident:
            entry = self._entries[namespace]
            if entry == NONE or slot >= self._records:
                continue
            there, _, place, above, home = _RECORD.unpack_from(self._bytes, RECORDS_AT + slot * RECORD_BYTES)
            counts = self._states[slot * _STATE_WORDS + _STATE_WORD] == _COUNTS
            told = (counts, there, place * ALIGNMENT, above - 1, home)
            assert told == (True, key, offset, parent, entry), f"the index tells something else of slot {slot}"
            expected += 1
        states = self._states[_STATE_WORD : self._records * _STATE_WORDS : _STATE_WORDS]
        found = int(np.count_nonzero(np.array(states) == _COUNTS))
        assert found == expected, f"the index tells of {found} blocks, not of {expected}"

    def _make_room_for(self, slot: int) -> bool:
        wanted = min(self._most_records, round_up(slot + 1, _STEP_RECORDS))
        length = (wanted - self._records) * RECORD_BYTES
        if slot >= wanted or not self._allocate(RECORDS_AT + self._records * RECORD_BYTES, length):
            return False
        self._records = wanted
        self._note_allocated()
        return True

    def _note_allocated(self) -> None:
        _ALLOCATED.pack_into(self._bytes, _HEADER.size, self._namespaces, self._records)

    def _allocate(self, at: int, length: int) -> bool:
        if self._full:
            return False
        try:
            os.posix_fallocate(self._fd, at, length)
        except OSError as problem:
            self._stop_growing(problem)
            return False
        return True

    def _stop_growing(self, problem: OSError) -> None:
        self._full = True
        log.warning("the index beside the pool cannot grow (%s): new blocks end with this daemon", problem.strerror)


def _column(values: npt.NDArray[Any]) -> array[int]:
    """As core wants it, without an object for each number."""
    column = array("q")
    column.frombytes(values.astype(np.int64).tobytes())
    return column


def _file_bytes(fd: int, pool_bytes: int) -> int:
    """Size of the index of a pool; nearly all of it is a hole."""
    return round_up(RECORDS_AT + pool_bytes // ALIGNMENT * RECORD_BYTES, max(PAGE_BYTES, os.fstatvfs(fd).f_bsize))


def _distrust(fd: int, header: bytes, pool_bytes: int) -> str:
    """Why the index in the file is not one for this pool; empty if it is."""
    size = os.fstat(fd).st_size
    if not size:
        return "the pool there has no index"
    there = os.pread(fd, len(header) + _ALLOCATED.size, 0)
    if len(there) < len(header) + _ALLOCATED.size or there[: len(MAGIC)] != MAGIC:
        return "the index there is not one"
    magic_to_sizes = len(MAGIC) + 8
    if there[:magic_to_sizes] != header[:magic_to_sizes]:
        return "the index there has another format"
    *_, pool_there, extent_there, inode, boot = _HEADER.unpack_from(there)
    *_, extent_bytes, wanted_inode, wanted_boot = _HEADER.unpack(header)
    if (pool_there, extent_there) != (pool_bytes, extent_bytes):
        return "the index there belongs to a pool of another size"
    if inode != wanted_inode:
        return "the index there belongs to another pool file"
    if boot != wanted_boot:
        return "the machine has been restarted since"
    namespaces, records = _ALLOCATED.unpack_from(there, _HEADER.size)
    if size != _file_bytes(fd, pool_bytes) or namespaces > MAX_NAMESPACES or records > pool_bytes // ALIGNMENT:
        return "the index there is damaged"
    return ""
