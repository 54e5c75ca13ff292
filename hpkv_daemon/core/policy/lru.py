"""Least recently used."""

from __future__ import annotations

from array import array

from hpkv_daemon.core.policy.base import SlotColumn


class Lru:
    """Evicts the exposed slot whose last use is oldest.

    A binary heap of the exposed slots that knows where each slot stands, so that a use or a lease changes one
    entry in place. ``heapq`` over a list would need stale entries, and the garbage collector would walk it.
    """

    def __init__(self) -> None:
        self._use = SlotColumn()
        self._heap = array("i")
        self._place = SlotColumn("i")
        """Position in the heap plus 1; 0: hidden."""

    def admit(self, slot: int, key: bytes, tick: int) -> None:  # noqa: ARG002  (the key is for ghost lists)
        """See ``Policy``."""
        self._use[slot] = tick

    def touch(self, slot: int, tick: int) -> None:
        """See ``Policy``."""
        self._use[slot] = tick
        place = self._place[slot]
        if place:
            self._sink(slot, place - 1)

    def expose(self, slot: int, tick: int) -> None:
        """See ``Policy``. A parent is at least as recently used as the child it loses."""
        if tick > self._use[slot]:
            self._use[slot] = tick
        self._heap.append(slot)
        self._rise(slot, len(self._heap) - 1)

    def hide(self, slot: int) -> None:
        """See ``Policy``."""
        place = self._place[slot]
        if not place:
            return
        self._place[slot] = 0
        last = self._heap.pop()
        if last == slot:
            return
        self._rise(last, place - 1)
        self._sink(last, self._place[last] - 1)

    def victim(self) -> int | None:
        """See ``Policy``."""
        return self._heap[0] if self._heap else None

    def forget(self, slot: int, key: bytes) -> None:  # noqa: ARG002
        """See ``Policy``."""
        self.hide(slot)

    def last_use(self, slot: int) -> int:
        """See ``Policy``."""
        return self._use[slot]

    def _rise(self, slot: int, at: int) -> None:
        heap, use, place = self._heap, self._use, self._place
        tick = use[slot]
        while at:
            above = (at - 1) >> 1
            other = heap[above]
            if use[other] <= tick:
                break
            heap[at] = other
            place[other] = at + 1
            at = above
        heap[at] = slot
        place[slot] = at + 1

    def _sink(self, slot: int, at: int) -> None:
        heap, use, place = self._heap, self._use, self._place
        tick, size = use[slot], len(heap)
        while (below := 2 * at + 1) < size:
            if below + 1 < size and use[heap[below + 1]] < use[heap[below]]:
                below += 1
            other = heap[below]
            if use[other] >= tick:
                break
            heap[at] = other
            place[other] = at + 1
            at = below
        heap[at] = slot
        place[slot] = at + 1
