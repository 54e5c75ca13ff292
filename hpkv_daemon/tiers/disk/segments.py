"""Segment files: made, appended to, sealed, read, scanned and given up. Used in the disk process only.

Payloads go straight between file and pool where the file system can do that (``O_DIRECT``). What is written is
durable when the call returns. Everything raises ``OSError``; what lies in a file and is not what was asked for raises
``BadFormat``. Reads may run in any thread, and ``append`` beside others of its kind; everything else runs alone.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from hpkv_daemon.faults import Faults
from hpkv_daemon.tiers.disk import format as layout
from hpkv_daemon.tiers.disk.format import PAGE, BadFormat, Place, Record, aligned

GROUP_RECORDS = 64
GROUP_BYTES = 16 << 20
"""Written with one call, at most, unless a single block is larger: a read waits for it in the device."""


class Found(NamedTuple):
    """A file, as ``survey`` tells of it."""

    number: int
    life: int
    """0 if it is foreign. Of a spare file the one that is over: it must not be given again."""
    size: int
    state: int


class FileState(IntEnum):
    """What a file is."""

    LIVE = 0
    SPARE = 1
    """Nothing in it counts; it is there to be written again."""
    FOREIGN = 2
    """Not ours, though it has such a name: it is left alone and does not count."""


_SCAN_BYTES = 4 << 20
_NAME = re.compile(r"segment-([0-9]{5})\.hpkv")


def file_name(number: int) -> str:
    """Name of a segment's file."""
    return f"segment-{number:05}.hpkv"


class SegmentFiles:
    """The files of one directory, ``identity`` being its name in their headers. ``note`` is told what to log."""

    def __init__(self, directory: Path, identity: bytes, faults: Faults, note: Callable[[str], None]) -> None:
        self._directory = directory
        self._identity = identity
        self._faults = faults
        self._note = note
        self._lock = threading.Lock()
        self._fds: dict[int, int] = {}
        self._direct = True
        self._syncs = True
        """Whether a write can be told to be durable when it returns."""
        self._tables: dict[int, list[Record]] = {}
        """Number -> records written to it since this process knows all of them."""
        self._local = threading.local()

    def place(self, number: int, life: int, size: int) -> Place:
        """One life of one file."""
        return Place(self._identity, number, life, size)

    # -- what is there ------------------------------------------------------------------------------------

    def survey(self, limit_bytes: int, spare_bytes: int) -> list[Found]:
        """What is there. Ours that are damaged go, then the oldest, until all keep the limit.

        Room for one more file of ``spare_bytes`` is kept within the limit, unless there is a spare one of that size.
        """
        ours: list[Found] = []
        foreign: list[Found] = []
        for name in sorted(os.listdir(self._directory)):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            number = int(match[1])
            try:
                found = self._inspect(number)
            except BadFormat as problem:
                self._note(f"{name} is removed: {problem}")
                self._remove(number)
                continue
            except OSError as problem:
                self._note(f"{name} is left alone: {problem.strerror}")
                found = None
            (ours if found else foreign).append(found or Found(number, 0, 0, FileState.FOREIGN))
        spare = next((each for each in ours if (each.state, each.size) == (FileState.SPARE, spare_bytes)), None)
        room = limit_bytes - (spare_bytes if spare is None else 0)
        ours.sort(key=lambda each: (each is spare, each.state is FileState.LIVE, each.life))
        while ours and sum(each.size for each in ours) > room:
            self._remove(ours.pop(0).number)
        return ours + foreign

    def _inspect(self, number: int) -> Found | None:
        path = self._path(number)
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode):
            self._note(f"{path.name} is left alone: it is not a file")
            return None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            place, spare = layout.unpack_segment(os.pread(fd, PAGE, 0))
        finally:
            os.close(fd)
        if place.identity != self._identity:
            self._note(f"{path.name} is left alone: it belongs to another directory")
            return None
        if place.segment != number:
            raise BadFormat(f"it is segment {place.segment}")
        if info.st_size != place.size or place.size < 2 * PAGE:
            raise BadFormat(f"it has {info.st_size} bytes, not {place.size}")
        return Found(number, place.life, place.size, FileState.SPARE if spare else FileState.LIVE)

    def load(self, place: Place) -> tuple[list[Record], bool]:
        """The records of a segment, and whether its footer told (else all of it was read and verified)."""
        fd = self._fd(place.segment)
        try:
            footer = layout.unpack_trailer(place, self._read(fd, place.size - PAGE, PAGE))
            table = self._read(fd, footer.offset, place.size - PAGE - footer.offset)
            return layout.unpack_table(footer, table), True
        except BadFormat:
            records = list(self._scan(place))
            self._tables[place.segment] = list(records)
            return records, False

    def _scan(self, place: Place) -> Iterator[Record]:
        reader = _Window(self._fd(place.segment), place.size)
        offset = PAGE
        while offset + PAGE <= place.size:
            page = reader.page(offset)
            if layout.looks_like_record(page):
                try:
                    record, expected = layout.unpack_record(place, offset, page)
                    if reader.digest(offset + PAGE, record.length) == expected:
                        yield record
                        offset += layout.record_bytes(record.length)
                        continue
                except BadFormat:
                    # Left over from an earlier life, or torn: look for the next one.
                    pass
            offset += PAGE

    # -- writing ------------------------------------------------------------------------------------------

    def begin(self, place: Place) -> None:
        """Start a life of a file, new or spare; again for the same life it only writes the header once more."""
        new = place.segment not in self._fds and not self._path(place.segment).exists()
        try:
            fd = self._fd(place.segment, create=True)
            info = os.fstat(fd)
            if info.st_size != place.size or info.st_blocks * 512 < place.size:
                os.ftruncate(fd, place.size)
                os.posix_fallocate(fd, 0, place.size)
            self._strike("disk_write")
            self._write(fd, [layout.pack_segment(place)], 0)
            if new:
                self._sync_directory()
        except BaseException:
            if new:
                self._remove(place.segment)
            raise
        self._tables.setdefault(place.segment, [])

    def append(self, place: Place, records: Sequence[Record], payloads: Sequence[memoryview]) -> None:
        """Write records at their offsets, each with its payload filled up to whole pages; durable on return."""
        fd = self._fd(place.segment)
        start = 0
        while start < len(records):
            end, size = start, 0
            views: list[memoryview] = []
            while end < len(records) and end - start < GROUP_RECORDS:
                record = records[end]
                if record.offset != records[start].offset + size or (size and size + record.length > GROUP_BYTES):
                    break
                self._strike("disk_write")
                header = self._header(end - start)
                header[:] = layout.pack_record(place, record, layout.digest(payloads[end][: record.length]))
                views += [header, payloads[end]] if record.length else [header]
                size += layout.record_bytes(record.length)
                end += 1
            self._write(fd, views, records[start].offset)
            start = end
        with self._lock:
            if place.segment in self._tables:
                self._tables[place.segment] += records

    def seal(self, place: Place) -> None:
        """Write the footer."""
        records = self._tables.get(place.segment)
        if records is None:
            records, sealed = self.load(place)
            if sealed:
                return
        footer = layout.pack_footer(place, sorted(records, key=lambda record: record.number))
        self._write(self._fd(place.segment), [footer], place.size - len(footer))
        self._tables.pop(place.segment, None)

    def resume(self, place: Place) -> None:
        """Make a segment ready for more records."""
        if place.segment not in self._tables:
            records, _ = self.load(place)
            self._tables[place.segment] = records
        # Without its last page it is not sealed.
        self._write(self._fd(place.segment), [bytes(PAGE)], place.size - PAGE)

    def retire(self, place: Place, keep_bytes: int) -> bool:
        """End the life of a file: True if it is spare now, False if it is removed (of another size than to keep)."""
        self._tables.pop(place.segment, None)
        if place.size != keep_bytes:
            self._remove(place.segment)
            return False
        self._write(self._fd(place.segment), [layout.pack_segment(place, spare=True)], 0)
        return True

    # -- reading ------------------------------------------------------------------------------------------

    def fetch(self, place: Place, wanted: Record, target: memoryview) -> Record:
        """Read a record's payload into ``target`` (of whole pages) and verify it; the record with its parent.

        Raises ``BadFormat`` when it is not the record that was wanted, in full: then the target is garbage.
        """
        self._strike("disk_read")
        header = self._header(0)
        views = [header, target] if wanted.length else [header]
        expected = sum(len(view) for view in views)
        if os.preadv(self._fd(place.segment), views, wanted.offset) != expected:
            raise BadFormat("record is cut off")
        record, payload = layout.unpack_record(place, wanted.offset, header)
        if record._replace(parent=wanted.parent, before=wanted.before) != wanted:
            raise BadFormat("another record is here")
        if layout.digest(target[: record.length]) != payload:
            raise BadFormat("payload does not match its checksum")
        return record

    def _header(self, number: int) -> memoryview:
        """A page of this thread's own, aligned as direct I/O wants it."""
        if not hasattr(self._local, "headers"):
            self._local.headers = memoryview(mmap.mmap(-1, GROUP_RECORDS * PAGE))
        headers: memoryview = self._local.headers
        return headers[number * PAGE : (number + 1) * PAGE]

    # -- files --------------------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self._directory / file_name(number)

    def _fd(self, number: int, create: bool = False) -> int:
        with self._lock:
            fd = self._fds.get(number)
            if fd is None:
                fd = self._fds[number] = self._open(self._path(number), os.O_CREAT if create else 0)
            return fd

    def _open(self, path: Path, flags: int) -> int:
        flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        if self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as problem:
                if problem.errno != errno.EINVAL:
                    raise
                self._direct = False
                self._note("the file system has no direct I/O: blocks go through the page cache")
        return os.open(path, flags, 0o600)

    def _remove(self, number: int) -> None:
        with self._lock:
            fd = self._fds.pop(number, None)
        if fd is not None:
            os.close(fd)
        self._tables.pop(number, None)
        self._path(number).unlink(missing_ok=True)

    def _sync_directory(self) -> None:
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _write(self, fd: int, views: Sequence[bytes | memoryview], offset: int) -> None:
        left = [view if isinstance(view, memoryview) else _page_aligned(view) for view in views]
        # As it was when this write began: several threads may find out at once that it is otherwise.
        syncs = self._syncs
        while left:
            try:
                written = os.pwritev(fd, left, offset, os.RWF_DSYNC if syncs else 0)
            except OSError as problem:
                if problem.errno != errno.EOPNOTSUPP or not syncs:
                    raise
                syncs = self._syncs = False
                continue
            if written <= 0:
                raise OSError(errno.EIO, "nothing was written")
            offset += written
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]
        if not syncs:
            os.fdatasync(fd)

    def _read(self, fd: int, offset: int, length: int) -> memoryview:
        if not length:
            return memoryview(b"")
        buffer = memoryview(mmap.mmap(-1, length))
        if os.preadv(fd, [buffer], offset) != length:
            raise BadFormat("it is cut off")
        return buffer

    def _strike(self, point: str) -> None:
        if self._faults.possible:
            with self._lock:
                fault = self._faults.at(point)
            if fault.delay:
                threading.Event().wait(fault.delay)
            if fault.fail:
                raise OSError(errno.EIO, f"fault hook failed a {point}")


def _page_aligned(content: bytes) -> memoryview:
    buffer = memoryview(mmap.mmap(-1, aligned(len(content))))
    buffer[: len(content)] = content
    return buffer


class _Window:
    """A file read from front to end in large pieces, looked at page by page."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._size = size
        self._start = self._length = 0
        self._buffer = memoryview(mmap.mmap(-1, _SCAN_BYTES))

    def page(self, offset: int) -> memoryview:
        """The page at ``offset``."""
        return self._piece(offset)[:PAGE]

    def digest(self, offset: int, length: int) -> bytes:
        """Checksum of so many bytes from ``offset``."""
        return layout.digest_of(self._pieces(offset, length))

    def _pieces(self, offset: int, length: int) -> Iterator[memoryview]:
        while length:
            piece = self._piece(offset)[:length]
            yield piece
            offset += len(piece)
            length -= len(piece)

    def _piece(self, offset: int) -> memoryview:
        if not self._start <= offset < self._start + self._length:
            self._start = offset
            self._length = os.preadv(self._fd, [self._buffer[: min(_SCAN_BYTES, self._size - offset)]], offset)
            if self._length <= 0:
                raise BadFormat("it is cut off")
        return self._buffer[offset - self._start : self._length]
