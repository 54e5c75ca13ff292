"""Where blocks may lie: size classes over extents of one pool. Pure bookkeeping, no memory is touched."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

ALIGNMENT = 4096
"""Slots start and end on this boundary: page-wise mapping and direct disk I/O need it."""

_MAX_WASTE = 8
"""At most one part in this many of a span may be left over behind its last slot."""

_MAX_SPAN_EXTENTS = 16


def round_up(value: int, unit: int = ALIGNMENT) -> int:
    """The smallest multiple of ``unit`` that is not below ``value``."""
    return -(-value // unit) * unit


def extent_bytes_for(pool_bytes: int) -> int:
    """Extent size for a pool: about 64 extents, a power of two between 64 KiB and 128 MiB."""
    wanted = max(1, pool_bytes // 64)
    return int(min(128 << 20, max(64 << 10, 1 << (wanted.bit_length() - 1))))


@dataclass(slots=True)
class SizeClass:
    """All slots of one size. ``span_extents`` neighbouring extents are claimed at a time."""

    slot_bytes: int
    span_extents: int
    slots_per_span: int
    free: dict[int, array[int]] = field(default_factory=dict)
    """Free slots of each span, by the span's first extent."""
    open: list[int] = field(default_factory=list)
    """The spans that have a free slot."""


class SlotPool:
    """Hands out slot numbers; a slot number maps to a byte offset while its span lives.

    Slot numbers are dense small integers and are reused, so callers may index arrays with them. A span whose
    slots are all free belongs to whoever claims it next, whatever its class.
    """

    def __init__(self, pool_bytes: int, extent_bytes: int | None = None) -> None:
        self.extent_bytes = extent_bytes or extent_bytes_for(pool_bytes)
        self.extents = pool_bytes // self.extent_bytes
        self.classes: list[SizeClass] = []
        self._span_of_extent: list[tuple[int, int] | None] = [None] * self.extents
        self._slots_of_span: dict[tuple[int, int], array[int]] = {}
        self._empty: set[tuple[int, int]] = set()
        self._unclaimable: set[int] = set()
        self._offset = array("q")
        self._class = array("i")
        self._unused_numbers = array("i")

    @property
    def capacity(self) -> int:
        """Slot numbers are below this."""
        return len(self._offset)

    def open_class(self, block_bytes: int) -> int | None:
        """The class for blocks of this size, or None if not one of them fits into the pool."""
        slot_bytes = round_up(max(1, block_bytes))
        for number, known in enumerate(self.classes):
            if known.slot_bytes == slot_bytes:
                return number
        span = self._span_extents(slot_bytes)
        if span > self.extents:
            return None
        self.classes.append(SizeClass(slot_bytes, span, span * self.extent_bytes // slot_bytes))
        return len(self.classes) - 1

    def _span_extents(self, slot_bytes: int) -> int:
        smallest = -(-slot_bytes // self.extent_bytes)
        limit = min(self.extents, max(smallest, _MAX_SPAN_EXTENTS))
        for span in range(smallest, limit + 1):
            size = span * self.extent_bytes
            if size % slot_bytes <= size // _MAX_WASTE:
                return span
        return smallest

    def offset(self, slot: int) -> int:
        """Byte offset of the slot in the pool."""
        return self._offset[slot]

    def extent_of(self, slot: int) -> int:
        """The extent in which the slot starts."""
        return self._offset[slot] // self.extent_bytes

    def class_of(self, slot: int) -> int:
        """Size class of a slot in use."""
        return self._class[slot]

    def allocate(self, number: int) -> int | None:
        """A free slot of the class, claiming free extents if needed; None when there is none."""
        size_class = self.classes[number]
        if not size_class.open and not self._claim(number):
            return None
        first = size_class.open[-1]
        free = size_class.free[first]
        if len(free) == size_class.slots_per_span:
            self._empty.discard((number, first))
        slot = free.pop()
        if not free:
            size_class.open.pop()
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back to its class."""
        span = self._span_of_extent[self.extent_of(slot)]
        assert span is not None, f"slot {slot} is in no span"
        number, first = span
        size_class = self.classes[number]
        free = size_class.free[first]
        if not free:
            size_class.open.append(first)
        free.append(slot)
        if len(free) == size_class.slots_per_span:
            self._empty.add(span)
            self._unclaimable.clear()

    def _claim(self, number: int) -> bool:
        wanted = self.classes[number].span_extents
        # The pool is full most of the time: look for room again only after some has come free.
        if number in self._unclaimable:
            return False
        for usable in (set[tuple[int, int]](), self._empty):
            run = 0
            for extent, span in enumerate(self._span_of_extent):
                run = run + 1 if span is None or span in usable else 0
                if run == wanted:
                    first = extent - run + 1
                    for empty in self.spans_over(first, wanted):
                        self.dissolve(empty)
                    self._open_span(number, first)
                    return True
        self._unclaimable.add(number)
        return False

    def _open_span(self, number: int, first: int) -> None:
        size_class = self.classes[number]
        base = first * self.extent_bytes
        slots = array("i")
        for position in range(size_class.slots_per_span):
            slot = self._unused_numbers.pop() if self._unused_numbers else self._new_number()
            self._offset[slot] = base + position * size_class.slot_bytes
            self._class[slot] = number
            slots.append(slot)
        span = (number, first)
        for extent in range(first, first + size_class.span_extents):
            self._span_of_extent[extent] = span
        self._slots_of_span[span] = slots
        self._empty.add(span)
        size_class.free[first] = slots[::-1]
        size_class.open.append(first)

    def adopt(self, claims: Iterable[tuple[int, int, int]]) -> bytearray:
        """Give out exactly these slots: (number, class, byte offset). Only in a pool that has given out none.

        One byte for each claim: 0 for one that makes no sense here, because it lies where its class has no slot,
        where another class has got a span, or has a number or a place that was given out before.
        """
        assert not self._offset, "slots are adopted before any other is given out"
        most = self.extents * self.extent_bytes // ALIGNMENT
        places: dict[tuple[int, int], array[int]] = {}
        known = bytearray(most)
        accepted = bytearray()
        for slot, number, offset in claims:
            place = self._place_of(number, offset) if 0 <= slot < most and not known[slot] else None
            if place is not None:
                span, position = place
                slots = places.get(span)
                if slots is None:
                    slots = places[span] = self._adopt_span(span)
                if slots[position] < 0:
                    slots[position] = slot
                    known[slot] = 1
                    accepted.append(1)
                    continue
            accepted.append(0)
        highest = known.rfind(1) + 1
        self._offset.frombytes(bytes(self._offset.itemsize * highest))
        self._class.extend(array("i", [-1]) * highest)
        self._unused_numbers = array("i", (slot for slot in range(highest - 1, -1, -1) if not known[slot]))
        for span, slots in places.items():
            self._fill_span(span, slots)
        return accepted

    def _place_of(self, number: int, offset: int) -> tuple[tuple[int, int], int] | None:
        """The span, open or possible, and the position in it of a slot at this offset.

        A class has at most one: were there two, the shorter span between them would waste nothing and be its own.
        """
        if number < 0 or not 0 <= offset < self.extents * self.extent_bytes:
            return None
        size_class = self.classes[number]
        extent = offset // self.extent_bytes
        there = self._span_of_extent[extent]
        if there is not None:
            if there[0] != number:
                return None
            firsts = range(there[1], there[1] + 1)
        else:
            highest = min(extent, self.extents - size_class.span_extents)
            firsts = range(max(0, extent - size_class.span_extents + 1), highest + 1)
        for first in firsts:
            position, rest = divmod(offset - first * self.extent_bytes, size_class.slot_bytes)
            if not rest and position < size_class.slots_per_span:
                mine = there is not None
                if mine or not self.spans_over(first, size_class.span_extents):
                    return (number, first), position
        return None

    def _adopt_span(self, span: tuple[int, int]) -> array[int]:
        """Claim the extents of a span; its slots are not numbered yet (-1)."""
        number, first = span
        size_class = self.classes[number]
        for extent in range(first, first + size_class.span_extents):
            self._span_of_extent[extent] = span
        return array("i", [-1]) * size_class.slots_per_span

    def _fill_span(self, span: tuple[int, int], slots: array[int]) -> None:
        """Number the slots of a span that nobody claimed; they are free."""
        number, first = span
        size_class = self.classes[number]
        base = first * self.extent_bytes
        free = array("i")
        for position, slot in enumerate(slots):
            if slot < 0:
                slot = self._unused_numbers.pop() if self._unused_numbers else self._new_number()
                slots[position] = slot
                free.append(slot)
            self._offset[slot] = base + position * size_class.slot_bytes
            self._class[slot] = number
        self._slots_of_span[span] = slots
        size_class.free[first] = free[::-1]
        if free:
            size_class.open.append(first)

    def _new_number(self) -> int:
        self._offset.append(0)
        self._class.append(-1)
        return len(self._offset) - 1

    def spans_over(self, first: int, count: int) -> list[tuple[int, int]]:
        """The spans that hold any of ``count`` extents from ``first`` on, each once."""
        found = dict.fromkeys(span for span in self._span_of_extent[first : first + count] if span)
        return list(found)

    def slots_of(self, span: tuple[int, int]) -> array[int]:
        """All slot numbers of a span, used or free."""
        return self._slots_of_span[span]

    def dissolve(self, span: tuple[int, int]) -> None:
        """Return a span's extents to the pool. Every slot of it must be free."""
        if span not in self._empty:
            raise AssertionError(f"span {span} is dissolved while slots of it are in use")
        number, first = span
        size_class = self.classes[number]
        for slot in self._slots_of_span.pop(span):
            self._class[slot] = -1
            self._unused_numbers.append(slot)
        for extent in range(first, first + size_class.span_extents):
            self._span_of_extent[extent] = None
        del size_class.free[first]
        size_class.open.remove(first)
        self._empty.remove(span)
        self._unclaimable.clear()

    def spans_of(self, number: int) -> list[tuple[int, int]]:
        """The spans of a class."""
        return [(number, first) for first in self.classes[number].free]

    def extents_of(self, number: int) -> int:
        """Extents that the class holds."""
        size_class = self.classes[number]
        return len(size_class.free) * size_class.span_extents

    def free_extents(self) -> int:
        """Extents that no class holds."""
        return self._span_of_extent.count(None)
