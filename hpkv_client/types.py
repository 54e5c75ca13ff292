"""The words of HPKV as types: block keys, runs, layers, memory handles. Pure data, shared by both sides."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KEY_BYTES = 32
"""Length of a block key and of a namespace fingerprint: one SHA-256 digest."""

BlockKey = bytes

_FIELD = struct.Struct("<cQ")


def typed_digest(*fields: bytes | str | int | None) -> bytes:
    """SHA-256 over fields that are each tagged with their type and prefixed with their length.

    Two different field lists never feed the same bytes to the hash: ``("ab", "c")`` differs from
    ``("a", "bc")``, ``"1"`` from ``1`` and ``None`` from ``""``.
    """
    return _hash_fields(fields).digest()


def _hash_fields(fields: Sequence[bytes | str | int | None]) -> hashlib._Hash:
    digest = hashlib.sha256()
    for field in fields:
        if field is None:
            tag, payload = b"n", b""
        elif isinstance(field, bytes):
            tag, payload = b"b", field
        elif isinstance(field, str):
            tag, payload = b"s", field.encode("utf-8", "surrogatepass")
        else:
            tag, payload = b"i", str(int(field)).encode()
        digest.update(_FIELD.pack(tag, len(payload)))
        digest.update(payload)
    return digest


def block_key(fingerprint: bytes, group: int, prefix_hash: bytes) -> BlockKey:
    """The key of one block.

    ``fingerprint`` is the namespace's 32-byte digest, ``group`` the KV-cache group, ``prefix_hash`` the
    engine's full (untruncated) hash of the prefix that ends with this block.
    """
    return typed_digest(b"hpkv-block-v1", fingerprint, group, prefix_hash)


class KeyMaker:
    """``block_key`` for many blocks of one group: the constant fields are hashed once."""

    def __init__(self, fingerprint: bytes, group: int) -> None:
        self._base = _hash_fields((b"hpkv-block-v1", fingerprint, group))

    def __call__(self, prefix_hash: bytes) -> BlockKey:
        """The key of the block that ends the prefix."""
        digest = self._base.copy()
        digest.update(_FIELD.pack(b"b", len(prefix_hash)) + prefix_hash)
        return digest.digest()


class Keys(Sequence[BlockKey]):
    """A run of block keys in one blob; cut lazily, because most look-ups read only a handful of them."""

    __slots__ = ("blob",)

    def __init__(self, blob: bytes) -> None:
        if len(blob) % KEY_BYTES:
            raise ValueError(f"{len(blob)} bytes are not a whole number of {KEY_BYTES}-byte keys")
        self.blob = blob

    @classmethod
    def of(cls, keys: Sequence[BlockKey]) -> Keys:
        """Join separate keys; each must be exactly ``KEY_BYTES`` long."""
        for key in keys:
            if len(key) != KEY_BYTES:
                raise ValueError(f"a block key has {KEY_BYTES} bytes, not {len(key)}")
        return cls(b"".join(keys))

    def __len__(self) -> int:
        return len(self.blob) // KEY_BYTES

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # Sequence's overloads add nothing here
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return Keys(self.blob[start * KEY_BYTES : stop * KEY_BYTES])
            return Keys(b"".join(self[i] for i in range(start, stop, step)))
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.blob[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    def __iter__(self) -> Iterator[BlockKey]:
        count = len(self)
        return iter(struct.unpack(f"{KEY_BYTES}s" * count, self.blob))


@dataclass(frozen=True, slots=True)
class Run:
    """One strided byte correspondence between a rank's memory and a canonical block.

    For block id ``b`` and ``0 <= i < count`` the ``fragment`` bytes at
    ``region[local_offset + b * block_stride + i * local_step]`` are the ``fragment`` bytes at
    ``canonical[canonical_offset + i * canonical_step]``.
    """

    region: int
    local_offset: int
    block_stride: int
    canonical_offset: int
    fragment: int
    count: int = 1
    local_step: int = 0
    canonical_step: int = 0

    @property
    def size(self) -> int:
        """Bytes of one block that this run moves."""
        return self.fragment * self.count

    def last_local_byte(self, blocks: int) -> int:
        """End (exclusive) of the local bytes the run touches for block ids below ``blocks``."""
        return (
            self.local_offset
            + max(0, blocks - 1) * self.block_stride
            + (self.count - 1) * self.local_step
            + self.fragment
        )

    def last_canonical_byte(self) -> int:
        """End (exclusive) of the canonical bytes the run touches."""
        return self.canonical_offset + (self.count - 1) * self.canonical_step + self.fragment


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a shard: its name in the engine, its canonical bytes per block, and the rank's runs in it.

    The runs' canonical offsets are relative to the layer.
    """

    name: str
    canonical_bytes: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """A rank's memory as another process can open it. Never grants more than that one piece of memory.

    ``kind`` is ``memfd`` (``pid``, ``fd``, ``name``: the memfd's own unguessable name, which proves that the
    descriptor belongs to the peer), ``cuda_ipc`` (``token``: the IPC handle's bytes, ``offset`` in the
    allocation, ``event``: IPC event that orders copies after the compute stream) or ``cuda_fd`` (``pid``, ``name``: as
    the peer calls it when it hands descriptors to the mover, ``offset`` in the first piece).
    """

    kind: str
    size: int
    pid: int = 0
    fd: int = -1
    name: str = ""
    token: bytes = b""
    offset: int = 0
    event: bytes = b""


@dataclass(frozen=True, slots=True)
class RankShard:
    """What one rank registers: where its part of every canonical block lies in its memory."""

    layers: tuple[Layer, ...]
    blocks: int
    replicas: int = 1
    replica: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block that this rank holds."""
        return sum(run.size for layer in self.layers for run in layer.runs)
