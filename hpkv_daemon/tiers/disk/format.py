"""How blocks lie in a segment file. Pure: bytes in, bytes out.

A segment file is a header, records, and once it is sealed a footer at its end. Everything begins at a multiple of
4 KiB. A record is a header of 4 KiB, then its payload, filled up to 4 KiB. Every header names the tier's directory
(by a random identity), the segment and its *life*, and carries a checksum over all of its 4 KiB: what was moved,
cut, swapped, left over from an earlier life of the file or changed in any bit does not check out. Numbers are
little-endian. ``xxh3_128`` finds damage, it does not stop an attacker who can write to the directory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import xxhash

from hpkv_client.types import KEY_BYTES

VERSION = 1
PAGE = 4096
"""Alignment of everything in a segment."""
IDENTITY_BYTES = 16
DIGEST_BYTES = 16
MAX_RECORD = (1 << 22) - 1
"""Largest number of a record in its segment."""
MAX_SEGMENT_BYTES = PAGE << 22

Buffer = bytes | bytearray | memoryview

_SEGMENT_MAGIC = b"HPKVSEG1"
_RECORD_MAGIC = b"HPKVREC1"
_FOOTER_MAGIC = b"HPKVEND1"
_NO_PARENT = bytes(KEY_BYTES)
_COMMON = struct.Struct("<8sH6x16sIQ")
"""Magic, version, identity, segment, life: the beginning of each kind of header."""
_SEGMENT = struct.Struct("<QB")
_RECORD = struct.Struct("<QBB6x32s32s32sQQQ16s")
_FOOTER = struct.Struct("<QQ16s")
_ENTRY = struct.Struct("<IBBH32s32s32sQQQ")


class BadFormat(Exception):
    """These bytes are not what they should be; the text says in which way."""


class Kind(IntEnum):
    """What a record says."""

    BLOCK = 1
    """Its payload is the block of this key."""
    FORGET_KEY = 2
    """The block of this key is void if its sequence is below ``before``."""
    FORGET_NAMESPACE = 3
    """So is every block of this namespace."""


class Record(NamedTuple):
    """Where a record lies, and what it says; a tuple, because it travels between processes as one."""

    kind: int
    number: int
    """Its place in the order of its segment."""
    offset: int
    """Byte in the file where its header begins."""
    fingerprint: bytes
    key: bytes
    parent: bytes
    """Empty: none."""
    length: int
    """Bytes of payload."""
    before: int
    """Of a tombstone: the first sequence that is not void."""


@dataclass(frozen=True, slots=True)
class Place:
    """One life of one segment in one directory. Lives are counted up over all segments, from 1."""

    identity: bytes
    segment: int
    life: int
    size: int
    """Bytes of the whole file."""


def aligned(length: int) -> int:
    """``length`` bytes, filled up to whole pages."""
    return -(-length // PAGE) * PAGE


def record_bytes(length: int) -> int:
    """What a payload of ``length`` bytes takes in a segment, header included."""
    return PAGE + aligned(length)


def footer_bytes(records: int) -> int:
    """What the footer of so many records takes at the end of a segment."""
    return aligned(records * _ENTRY.size) + PAGE


def sequence(life: int, number: int) -> int:
    """Of any two records the later one has the greater sequence: lives are counted up, one is written at a time."""
    return life << 22 | number


def digest(payload: Buffer) -> bytes:
    """Checksum of a payload or a header. Lets other threads run meanwhile."""
    return xxhash.xxh3_128_digest(payload)


def digest_of(pieces: Iterable[Buffer]) -> bytes:
    """The same over pieces, one after another."""
    running = xxhash.xxh3_128()
    for piece in pieces:
        running.update(piece)
    return running.digest()


def _page(magic: bytes, place: Place, *fields: bytes) -> bytes:
    common = _COMMON.pack(magic, VERSION, place.identity, place.segment, place.life)
    body = b"".join((common, *fields)).ljust(PAGE - DIGEST_BYTES, b"\0")
    return body + digest(body)


def _check_page(page: Buffer, magic: bytes, what: str) -> tuple[bytes, bytes, int, int]:
    """The page as bytes, and identity, segment and life that it names."""
    found = bytes(page)
    if len(found) != PAGE:
        raise BadFormat(f"{what} is cut off")
    if not found.startswith(magic):
        raise BadFormat(f"no {what} is here")
    if digest(memoryview(found)[:-DIGEST_BYTES]) != found[-DIGEST_BYTES:]:
        raise BadFormat(f"{what} does not match its checksum")
    _, version, identity, segment, life = _COMMON.unpack_from(found)
    if version != VERSION:
        raise BadFormat(f"{what} has version {version}, not {VERSION}")
    return found, identity, segment, life


def _expect(place: Place, identity: bytes, segment: int, life: int, what: str) -> None:
    if identity != place.identity:
        raise BadFormat(f"{what} is of another directory")
    if segment != place.segment:
        raise BadFormat(f"{what} is of segment {segment}, not {place.segment}")
    if life != place.life:
        raise BadFormat(f"{what} is of an earlier life of the file")


def pack_segment(place: Place, spare: bool = False) -> bytes:
    """The first page of a segment file. ``spare``: that life is over, and nothing in the file counts."""
    return _page(_SEGMENT_MAGIC, place, _SEGMENT.pack(place.size, spare))


def unpack_segment(page: Buffer) -> tuple[Place, bool]:
    """What the first page of a segment file says about it, and whether it is spare; the caller checks that it fits.

    Raises ``BadFormat``.
    """
    found, identity, segment, life = _check_page(page, _SEGMENT_MAGIC, "segment header")
    size, spare = _SEGMENT.unpack_from(found, _COMMON.size)
    return Place(identity, segment, life, size), bool(spare)


def pack_record(place: Place, record: Record, payload_digest: bytes) -> bytes:
    """The page before a payload."""
    fields = _RECORD.pack(
        record.offset,
        record.kind,
        bool(record.parent),
        record.fingerprint,
        record.key,
        record.parent or _NO_PARENT,
        record.length,
        sequence(place.life, record.number),
        record.before,
        payload_digest,
    )
    return _page(_RECORD_MAGIC, place, fields)


def looks_like_record(page: Buffer) -> bool:
    """Whether it is worth the checksum."""
    return bytes(memoryview(page)[: len(_RECORD_MAGIC)]) == _RECORD_MAGIC


def unpack_record(place: Place, offset: int, page: Buffer) -> tuple[Record, bytes]:
    """The record whose header is at ``offset`` of this segment, and the checksum of its payload.

    Raises ``BadFormat``, also for a payload that would not fit into the segment.
    """
    found, identity, segment, life = _check_page(page, _RECORD_MAGIC, "record header")
    _expect(place, identity, segment, life, "record header")
    at, kind, has_parent, fingerprint, key, parent, length, order, before, payload_digest = _RECORD.unpack_from(
        found, _COMMON.size
    )
    if at != offset:
        raise BadFormat(f"record header is of byte {at}, not {offset}")
    number = order - sequence(place.life, 0)
    if kind not in (Kind.BLOCK, Kind.FORGET_KEY, Kind.FORGET_NAMESPACE) or not 0 <= number <= MAX_RECORD:
        raise BadFormat("record header makes no sense")
    if offset + record_bytes(length) > place.size:
        raise BadFormat("record is longer than its segment")
    return Record(kind, number, offset, fingerprint, key, parent if has_parent else b"", length, before), payload_digest


def pack_footer(place: Place, records: Iterable[Record]) -> bytes:
    """Table of the records and its trailer: the last ``footer_bytes`` of a sealed segment."""
    entries = [
        _ENTRY.pack(
            record.number,
            record.kind,
            bool(record.parent),
            0,
            record.fingerprint,
            record.key,
            record.parent or _NO_PARENT,
            record.offset,
            record.length,
            record.before,
        )
        for record in records
    ]
    table = b"".join(entries)
    table = table.ljust(aligned(len(table)), b"\0")
    offset = place.size - PAGE - len(table)
    return table + _page(_FOOTER_MAGIC, place, _FOOTER.pack(len(entries), offset, digest(table)))


@dataclass(frozen=True, slots=True)
class Footer:
    """The trailer of a sealed segment: where its table of ``count`` records begins, and the table's checksum."""

    count: int
    offset: int
    table_digest: bytes


def unpack_trailer(place: Place, page: Buffer) -> Footer:
    """The last page of a segment. Raises ``BadFormat`` when this life of it is not sealed."""
    found, identity, segment, life = _check_page(page, _FOOTER_MAGIC, "footer")
    _expect(place, identity, segment, life, "footer")
    count, offset, table_digest = _FOOTER.unpack_from(found, _COMMON.size)
    if offset < PAGE or offset != place.size - footer_bytes(count):
        raise BadFormat("footer makes no sense")
    return Footer(count, offset, table_digest)


def unpack_table(footer: Footer, table: Buffer) -> list[Record]:
    """The records of a sealed segment; ``table`` is all that lies before the trailer. Raises ``BadFormat``."""
    if len(memoryview(table)) != aligned(footer.count * _ENTRY.size) or digest(table) != footer.table_digest:
        raise BadFormat("footer's table does not match its checksum")
    records = []
    for entry in _ENTRY.iter_unpack(memoryview(table)[: footer.count * _ENTRY.size]):
        number, kind, has_parent, _, fingerprint, key, parent, offset, length, before = entry
        records.append(Record(kind, number, offset, fingerprint, key, parent if has_parent else b"", length, before))
    return records
