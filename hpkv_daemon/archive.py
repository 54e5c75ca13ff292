"""The file of an exported namespace: a header, blocks with checksums, parents before children, and a last record.

    magic | u32 length | msgpack of the namespace | record, record, ... | last record

A record is ``HBLK``, whether there is a parent, key, parent, the checksum of all that and the payload, and the payload.
The last record is ``HEND`` with the number of blocks and a checksum over their checksums: a file that was cut off, or
of which a piece is missing, does not end with it. All numbers are little-endian, checksums are XXH3 with 128 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import IO, BinaryIO

import msgpack
import xxhash

from hpkv_client.errors import HpkvError
from hpkv_client.namespace import NamespaceId
from hpkv_client.types import KEY_BYTES, BlockKey

MAGIC = b"HPKV-NS1"
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct(f"<4s?{KEY_BYTES}s{KEY_BYTES}s")
_SUM_BYTES = 16
_END = struct.Struct(f"<4sQ{_SUM_BYTES}s")
_NO_PARENT = bytes(KEY_BYTES)
_MAX_HEADER = 1 << 20
_MAX_BLOCK = 1 << 40


class Damaged(HpkvError):
    """The file is not what was written. What came before the damage was verified."""

    code = "damaged"


@dataclass(frozen=True, slots=True)
class ArchivedBlock:
    """One block. ``payload`` is valid until the next one is read."""

    key: BlockKey
    parent: BlockKey | None
    payload: memoryview


def _read(stream: BinaryIO, size: int) -> bytes:
    found = stream.read(size)
    if len(found) != size:
        raise Damaged("the file ends too early", "export it again")
    return found


class ArchiveWriter:
    """Writes one file. ``finish`` it, or it does not count as whole."""

    def __init__(self, stream: IO[bytes], namespace: NamespaceId) -> None:
        self._stream = stream
        self._all = xxhash.xxh3_128()
        self.blocks = 0
        header = msgpack.packb(asdict(namespace), use_bin_type=True)
        stream.write(MAGIC + _LENGTH.pack(len(header)) + header)

    def add(self, key: BlockKey, parent: BlockKey | None, payload: memoryview) -> None:
        """Append a block whose parent, if it has one, was added before."""
        head = _HEAD.pack(b"HBLK", parent is not None, key, parent or _NO_PARENT)
        checksum = xxhash.xxh3_128(head)
        checksum.update(payload)
        self._all.update(checksum.digest())
        self._stream.write(head + checksum.digest())
        self._stream.write(payload)
        self.blocks += 1

    def finish(self) -> None:
        """Write the last record."""
        self._stream.write(_END.pack(b"HEND", self.blocks, self._all.digest()))


class ArchiveReader:
    """Reads one file from its beginning, a block at a time. Raises ``Damaged``."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._all = xxhash.xxh3_128()
        self.blocks = 0
        if stream.read(len(MAGIC)) != MAGIC:
            raise Damaged("this is no export of a namespace", "'hpkvd export' makes one")
        (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
        if length > _MAX_HEADER:
            raise Damaged("the header makes no sense", "export it again")
        self.namespace = _namespace(_read(stream, length))

    def __iter__(self) -> Iterator[ArchivedBlock]:
        payload = memoryview(bytearray(self.namespace.block_bytes))
        while (start := _read(self._stream, _END.size))[:4] == b"HBLK":
            head = start + _read(self._stream, _HEAD.size - len(start))
            _, has_parent, key, parent = _HEAD.unpack(head)
            told = _read(self._stream, _SUM_BYTES)
            if self._stream.readinto(payload) != len(payload):  # type: ignore[attr-defined]
                raise Damaged("the file ends too early", "export it again")
            checksum = xxhash.xxh3_128(head)
            checksum.update(payload)
            if checksum.digest() != told:
                raise Damaged(f"block {self.blocks} of the file is damaged", "export it again")
            self._all.update(told)
            self.blocks += 1
            yield ArchivedBlock(key, parent if has_parent else None, payload)
        mark, blocks, whole = _END.unpack(start)
        if (mark, blocks, whole) != (b"HEND", self.blocks, self._all.digest()):
            raise Damaged(f"the file is damaged behind block {self.blocks}", "export it again")


def _namespace(header: bytes) -> NamespaceId:
    try:
        found = NamespaceId(**msgpack.unpackb(header))
        sound = (
            len(found.fingerprint) == KEY_BYTES
            and 0 < found.block_bytes < _MAX_BLOCK
            and isinstance(found.model, str)
            and isinstance(found.block_tokens, int)
            and all(isinstance(text, str) for pair in found.fields.items() for text in pair)
        )
    except (ValueError, TypeError, AttributeError, msgpack.exceptions.UnpackException):
        sound = False
    if not sound:
        raise Damaged("the header makes no sense", "export it again")
    return found


def chains_first(keys: Sequence[BlockKey], parents: Sequence[BlockKey]) -> Iterator[tuple[BlockKey, BlockKey | None]]:
    """Every block with its parent, parents before children and chains in one piece; zeros stand for no parent.

    A block whose parent is not among the keys is left out, with all below it.
    """
    below: dict[BlockKey, list[BlockKey]] = {}
    for key, parent in zip(keys, parents, strict=True):
        below.setdefault(parent, []).append(key)
    waiting: list[tuple[BlockKey, BlockKey | None]] = [(key, None) for key in reversed(below.get(_NO_PARENT, ()))]
    while waiting:
        block = waiting.pop()
        yield block
        waiting += [(child, block[0]) for child in reversed(below.get(block[0], ()))]
