"""What an object of the remote tier is. Pure: bytes in, bytes out.

One object holds one canonical block, or this node's part of one: which layers and heads are in it is part of the
namespace's fingerprint. It is a header, then the payload, and nothing else. Header and payload have checksums, and
the header names what the object is: what was cut, swapped, renamed or changed in any bit does not check out. Numbers
are little-endian. ``xxh3_128`` finds damage; against somebody who can write to the store only a key helps.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from hpkv_client.types import KEY_BYTES, BlockKey

VERSION = 1
HEADER_BYTES = 256
SEAL_BYTES = 16
"""An encrypted payload is longer by its authentication tag."""
NONCE_BYTES = 12
KEY_ID_BYTES = 8
DIGEST_BYTES = 16
ROOT = f"hpkv{VERSION}"
"""All objects lie under this, so that a later format finds none of them."""

Buffer = bytes | bytearray | memoryview

_MAGIC = b"HPKVOBJ1"
_FIELDS = struct.Struct("<8sHHI32s32sQ8s12s4x16s")
"""Magic, version, flags, header size, fingerprint, key, length, key id, nonce, digest of the payload as stored."""
_ENCRYPTED = 1
_NO_KEY = bytes(KEY_ID_BYTES)
_NO_NONCE = bytes(NONCE_BYTES)


class BadObject(Exception):
    """These bytes are not the object that was asked for; the text says in which way."""


@dataclass(frozen=True, slots=True)
class Sealing:
    """How a payload is encrypted: ``key_id`` names the key, ``nonce`` is used once."""

    key_id: bytes
    nonce: bytes


def space_name(fingerprint: bytes, key_id: bytes = b"") -> str:
    """Where the blocks of a namespace lie. Blocks under different keys do not get in each other's way."""
    root = f"{ROOT}-{key_id.hex()}" if key_id else ROOT
    return f"{root}/{fingerprint.hex()}"


def object_name(fingerprint: bytes, key: BlockKey, key_id: bytes = b"") -> str:
    """The name of a block's object. One level of 256 folders: file systems slow down with very large ones."""
    text = key.hex()
    return f"{space_name(fingerprint, key_id)}/{text[:2]}/{text}"


def stored_bytes(length: int, encrypted: bool) -> int:
    """Bytes of a payload in the store."""
    return length + SEAL_BYTES if encrypted else length


def pack_header(
    fingerprint: bytes, key: BlockKey, length: int, stored: Buffer, sealing: Sealing | None = None
) -> bytes:
    """The header of a block of ``length`` bytes; ``stored`` is its payload as it is going to lie there."""
    body = _pack(fingerprint, key, length, sealing, xxhash.xxh3_128_digest(stored))
    return body + xxhash.xxh3_128_digest(body)


def bound(fingerprint: bytes, key: BlockKey, length: int, sealing: Sealing) -> bytes:
    """What an encrypted payload is bound to: it can be read as this block only."""
    return _pack(fingerprint, key, length, sealing, bytes(DIGEST_BYTES))


def _pack(fingerprint: bytes, key: BlockKey, length: int, sealing: Sealing | None, digest: bytes) -> bytes:
    key_id, nonce = (sealing.key_id, sealing.nonce) if sealing else (_NO_KEY, _NO_NONCE)
    flags = _ENCRYPTED if sealing else 0
    fields = _FIELDS.pack(_MAGIC, VERSION, flags, HEADER_BYTES, fingerprint, key, length, key_id, nonce, digest)
    return fields.ljust(HEADER_BYTES - DIGEST_BYTES, b"\0")


def check_object(
    fingerprint: bytes, key: BlockKey, length: int, header: Buffer, stored: Buffer, key_id: bytes = b""
) -> Sealing | None:
    """Whether this is the block; how its payload is encrypted. Raises ``BadObject``."""
    found = bytes(header)
    if len(found) != HEADER_BYTES or not found.startswith(_MAGIC):
        raise BadObject("no block is here")
    if xxhash.xxh3_128_digest(found[:-DIGEST_BYTES]) != found[-DIGEST_BYTES:]:
        raise BadObject("the header does not match its checksum")
    _, version, flags, size, *names, its_length, its_key_id, nonce, digest = _FIELDS.unpack_from(found)
    if version != VERSION or size != HEADER_BYTES:
        raise BadObject(f"the object has version {version}, not {VERSION}")
    if names != [fingerprint, key]:
        raise BadObject("another block is here")
    if its_length != length:
        raise BadObject(f"the block has {its_length} bytes, not {length}")
    encrypted = bool(flags & _ENCRYPTED)
    if encrypted != bool(key_id) or its_key_id != (key_id or _NO_KEY):
        raise BadObject("the block is encrypted with another key" if encrypted else "the block is not encrypted")
    if len(stored) != stored_bytes(length, encrypted):
        raise BadObject("the payload is cut off")
    if xxhash.xxh3_128_digest(stored) != digest:
        raise BadObject("the payload does not match its checksum")
    return Sealing(its_key_id, nonce) if encrypted else None


def parse_name(name: str) -> tuple[bytes, BlockKey] | None:
    """Fingerprint and key of an object's name; None for one that is not ours."""
    parts = name.split("/")
    if len(parts) != 4 or parts[0].partition("-")[0] != ROOT:
        return None
    try:
        fingerprint, key = bytes.fromhex(parts[1]), bytes.fromhex(parts[3])
    except ValueError:
        return None
    right = len(fingerprint) == len(key) == KEY_BYTES and parts[3].startswith(parts[2])
    return (fingerprint, key) if right else None
