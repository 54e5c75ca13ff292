"""What is known of the segments of a directory: one row per file, flat arrays over the records in it. Pure."""

from __future__ import annotations

from array import array
from enum import IntEnum

from hpkv_client.types import KEY_BYTES, BlockKey
from hpkv_daemon.tiers.disk.format import MAX_RECORD, PAGE, Record, footer_bytes, record_bytes

NOBODY = (1 << 16) - 1
"""Owner of a record that is no block, or failed, or whose block is forgotten or lies elsewhere by now."""


class Phase(IntEnum):
    """Life of a segment."""

    OPEN = 0
    """Records are appended to it. At most one is."""
    SEALED = 1
    LEAVING = 2
    """It is being evicted: its blocks can still be read, and those that are hot are written again elsewhere."""


class Namespace:
    """The blocks of one namespace; all have the same length."""

    __slots__ = ("before", "entries", "fingerprint", "length", "number")

    def __init__(self, fingerprint: bytes, number: int, length: int) -> None:
        self.fingerprint = fingerprint
        self.number = number
        self.length = length
        self.entries: dict[BlockKey, int] = {}
        """Key -> segment, number of the record in it, and page, packed into 60 bits."""
        self.before = 0
        """Blocks with a smaller sequence were forgotten."""


class Segment:
    """One file, and what is known of each of its records."""

    __slots__ = ("end", "keys", "life", "number", "owners", "phase", "pins", "shares", "size", "tombstones", "used")

    def __init__(self, number: int, life: int, size: int, phase: Phase) -> None:
        self.number = number
        self.life = life
        self.size = size
        self.phase = phase
        self.end = PAGE
        """Where the next record goes."""
        self.pins = 0
        """Orders under way that read from it or write to it: it must stay until they are over."""
        self.keys = bytearray()
        self.owners = array("H")
        self.used = array("I")
        """Tick of each record's last use."""
        self.shares: dict[int, list[int]] = {}
        """Namespace -> how many live blocks of it are here, and the sum of their ticks."""
        self.tombstones: list[Record] = []

    @property
    def records(self) -> int:
        """How many numbers are given away."""
        return len(self.owners)

    @property
    def blocks(self) -> int:
        """How many of its blocks are live."""
        return sum(count for count, _ in self.shares.values())

    @property
    def warmth(self) -> float:
        """Mean tick of the last use of its live blocks. One hot block does not keep a thousand cold ones."""
        blocks = self.blocks
        return sum(ticks for _, ticks in self.shares.values()) / blocks if blocks else -1.0

    def fits(self, length: int, count: int = 1) -> bool:
        """Whether so many records with such a payload can be appended, and the footer still finds room."""
        end = self.end + count * record_bytes(length)
        return self.records + count - 1 <= MAX_RECORD and end + footer_bytes(self.records + count) <= self.size

    def key(self, number: int) -> BlockKey:
        """The key of a record."""
        return bytes(self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])

    def put(self, number: int, owner: int, key: bytes, tick: int) -> None:
        """Fill in a record; those that were skipped stay empty."""
        missing = number + 1 - len(self.owners)
        if missing > 0:
            self.owners.extend([NOBODY] * missing)
            self.used.frombytes(bytes(missing * self.used.itemsize))
            self.keys.extend(bytes(missing * KEY_BYTES))
        self.owners[number] = owner
        self.used[number] = tick
        self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES] = key

    def trim(self) -> None:
        """No more records will come: give back what the arrays hold in reserve."""
        self.keys = bytearray(bytes(self.keys))
        self.owners = self.owners[:]
        self.used = self.used[:]
