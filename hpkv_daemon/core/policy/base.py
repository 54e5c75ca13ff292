"""The seam between the store and an eviction policy, and the column that policies keep their numbers in."""

from __future__ import annotations

from array import array
from typing import Protocol


class Policy(Protocol):
    """Orders the resident blocks of one size class.

    The store tells which slots are evictable at the moment (*exposed*: resident, no child, no lease).
    Only exposed slots are ever named as victims, so tails go before heads and readers are safe whatever the
    policy prefers. Ticks are logical time: they only grow.
    """

    def admit(self, slot: int, key: bytes, tick: int) -> None:
        """A block became resident in ``slot``."""

    def touch(self, slot: int, tick: int) -> None:
        """The block was used again."""

    def expose(self, slot: int, tick: int) -> None:
        """The slot may be evicted from now on.

        ``tick``: a child that was used last at that time has just been evicted; 0: no child was.
        """

    def hide(self, slot: int) -> None:
        """The slot must not be evicted from now on."""

    def victim(self) -> int | None:
        """The exposed slot to evict next, or None. The store calls ``forget`` when it is gone."""

    def forget(self, slot: int, key: bytes) -> None:
        """The block left the slot."""

    def last_use(self, slot: int) -> int:
        """Tick of the last use of the block in ``slot``."""


class SlotColumn:
    """One integer per slot, 0 until set, in one array: the garbage collector has nothing to walk."""

    __slots__ = ("_values",)

    def __init__(self, typecode: str = "q") -> None:
        self._values: array[int] = array(typecode)

    def __getitem__(self, slot: int) -> int:
        return self._values[slot] if slot < len(self._values) else 0

    def __setitem__(self, slot: int, value: int) -> None:
        values = self._values
        missing = slot + 1 - len(values)
        if missing > 0:
            values.frombytes(bytes(max(missing, len(values)) * values.itemsize))
        values[slot] = value
