"""The seam between the blocks and whoever writes down, for the next daemon, which of them are resident. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hpkv_client.types import KEY_BYTES, BlockKey

NONE = -1


class Ledger(Protocol):
    """Told of every change of what is resident, in the order in which it happens.

    What is written down is true at every instant: a block is entered when its bytes and its parent are there,
    and struck out before its slot can be filled anew. No call may fail for want of room; what cannot be
    entered does not survive, that is all.
    """

    def opened(self, namespace: int, fingerprint: bytes, block_bytes: int, tenant: str) -> None:
        """A namespace has got this number. Comes before any block of it."""

    def kept(self, slot: int, namespace: int, key: BlockKey, offset: int, parent: int, tick: int) -> None:
        """A block is resident in ``slot``, at byte ``offset``, under the slot ``parent`` (``NONE``: a root)."""

    def used(self, slot: int, tick: int) -> None:
        """The resident block in the slot counts as used last at ``tick``."""

    def gone(self, slot: int) -> None:
        """The block in the slot is not resident any more."""

    def check(self, resident: Iterable[tuple[int, int, BlockKey, int, int]]) -> None:
        """Raise ``AssertionError`` unless exactly these blocks are entered, but for those that found no room.

        Each with the first five arguments that ``kept`` was called with. Cost: one pass over all of them.
        """


class NoLedger:
    """Writes nothing down: for pools that end with their daemon."""

    def opened(self, namespace: int, fingerprint: bytes, block_bytes: int, tenant: str) -> None:
        """See ``Ledger``."""

    def kept(self, slot: int, namespace: int, key: BlockKey, offset: int, parent: int, tick: int) -> None:
        """See ``Ledger``."""

    def used(self, slot: int, tick: int) -> None:
        """See ``Ledger``."""

    def gone(self, slot: int) -> None:
        """See ``Ledger``."""

    def check(self, resident: Iterable[tuple[int, int, BlockKey, int, int]]) -> None:
        """See ``Ledger``."""


@dataclass(frozen=True, slots=True)
class RecordedNamespace:
    """A namespace as an earlier daemon knew it."""

    fingerprint: bytes
    block_bytes: int
    tenant: str


@dataclass(slots=True)
class Recorded:
    """What an earlier daemon left, column by column: the i-th entry of each is the i-th block.

    Nothing is promised but that each slot is named once and each number is small enough for its column.
    """

    namespaces: list[RecordedNamespace] = field(default_factory=list)
    slots: Sequence[int] = ()
    homes: Sequence[int] = ()
    """Positions in ``namespaces``."""
    offsets: Sequence[int] = ()
    """Bytes from the start of the pool."""
    parents: Sequence[int] = ()
    """Slots; ``NONE``: a root."""
    ticks: Sequence[int] = ()
    """Of the last use."""
    keys: bytes = b""
    """One behind the other."""

    def key(self, position: int) -> BlockKey:
        """The key of the block at this position."""
        return self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]


def parents_first(slots: Sequence[int], parents: Sequence[int], usable: Sequence[int]) -> list[int]:
    """Positions of the usable blocks of which all ancestors are usable, every parent before its children.

    ``parents`` may be anything: a block with an unknown ancestor, or that is its own, is left out.
    """
    unknown, waiting, out, done = range(4)
    positions = {slot: position for position, slot in enumerate(slots) if usable[position]}
    fate = bytearray(unknown if here else out for here in usable)
    order: list[int] = []
    for start in range(len(slots)):
        above: list[int] = []
        position = start
        while fate[position] == unknown:
            fate[position] = waiting
            above.append(position)
            if parents[position] == NONE:
                verdict = done
                break
            position = positions.get(parents[position], NONE)
            if position == NONE:
                verdict = out
                break
        else:
            verdict = done if fate[position] == done else out
        while above:
            position = above.pop()
            fate[position] = verdict
            if verdict == done:
                order.append(position)
    return order
