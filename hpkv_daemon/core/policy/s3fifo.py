"""S3-FIFO: a small queue filters one-hit blocks, a main queue keeps the rest, a ghost remembers the evicted.

After J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, section 4. Two changes for
prefix trees: only exposed slots stand in a queue, and a slot that becomes exposed because its child was
evicted goes to the cold end of its queue, so that a prefix is taken from its tail in one piece.
"""

from __future__ import annotations

from hpkv_daemon.core.policy.base import SlotColumn

_MAX_FREQUENCY = 3
_SMALL_SHARE = 10
"""The small queue is drained first while it holds more than one part in this many of all exposed slots."""
_MAX_SPARED = 512
"""Used blocks to spare at most before one goes all the same: no eviction walks a whole pool of hot ones."""


class SlotQueue:
    """A queue of slots that also lets go of one in its middle: a ring of links, closed by an entry 0."""

    def __init__(self) -> None:
        self._after = SlotColumn("i")
        self._before = SlotColumn("i")
        self._present = SlotColumn("b")
        self._length = 0
        self._after[0] = self._before[0] = 0

    def __len__(self) -> int:
        return self._length

    @property
    def first(self) -> int:
        """The slot at the cold end. Only for a queue that is not empty."""
        return self._after[0] - 1

    def append(self, slot: int) -> None:
        """Put a slot that is not in the queue at its young end."""
        self._insert(slot, self._before[0])

    def push_front(self, slot: int) -> None:
        """Put a slot that is not in the queue at its cold end."""
        self._insert(slot, 0)

    def _insert(self, slot: int, before: int) -> None:
        entry, after = slot + 1, self._after[before]
        self._before[entry], self._after[entry] = before, after
        self._after[before] = self._before[after] = entry
        self._present[slot] = 1
        self._length += 1

    def discard(self, slot: int) -> None:
        """Take the slot out, if it is in."""
        if not self._present[slot]:
            return
        before, after = self._before[slot + 1], self._after[slot + 1]
        self._after[before], self._before[after] = after, before
        self._present[slot] = 0
        self._length -= 1


class Ghost:
    """The keys evicted last, in two generations: the older one is forgotten as a whole.

    Plain dicts of bytes and None, because the garbage collector does not walk those.
    """

    def __init__(self) -> None:
        self._young: dict[bytes, None] = {}
        self._old: dict[bytes, None] = {}

    def add(self, key: bytes, limit: int) -> None:
        """Remember the key, and at most ``limit`` keys in all."""
        if len(self._young) >= max(1, limit // 2):
            self._old, self._young = self._young, {}
        self._young[key] = None

    def take(self, key: bytes) -> bool:
        """Forget the key; whether it was remembered."""
        for generation in (self._young, self._old):
            if key in generation:
                del generation[key]
                return True
        return False


class S3Fifo:
    """Evicts in FIFO order, sparing blocks that were used again."""

    def __init__(self) -> None:
        self._use = SlotColumn()
        self._frequency = SlotColumn("b")
        self._in_main = SlotColumn("b")
        self._small = SlotQueue()
        self._main = SlotQueue()
        self._ghost = Ghost()
        self._resident = 0

    def admit(self, slot: int, key: bytes, tick: int) -> None:
        """See ``Policy``. A block that was evicted lately goes straight to the main queue."""
        self._use[slot] = tick
        self._frequency[slot] = 0
        self._resident += 1
        self._in_main[slot] = self._ghost.take(key)

    def touch(self, slot: int, tick: int) -> None:
        """See ``Policy``."""
        self._use[slot] = tick
        self._frequency[slot] = min(_MAX_FREQUENCY, self._frequency[slot] + 1)

    def expose(self, slot: int, tick: int) -> None:
        """See ``Policy``."""
        queue = self._main if self._in_main[slot] else self._small
        if tick:
            self._use[slot] = max(tick, self._use[slot])
            queue.push_front(slot)
        else:
            queue.append(slot)

    def hide(self, slot: int) -> None:
        """See ``Policy``."""
        self._small.discard(slot)
        self._main.discard(slot)

    def victim(self) -> int | None:
        """See ``Policy``."""
        small, main = self._small, self._main
        for spared in range(_MAX_SPARED + 1):
            small_is_due = len(small) * _SMALL_SHARE > len(small) + len(main)
            queue = small if small and (small_is_due or not main) else main
            if not queue:
                return None
            slot = queue.first
            if not self._frequency[slot] or spared == _MAX_SPARED:
                return slot
            if queue is small:
                self._in_main[slot] = 1
                self._frequency[slot] = 0
            else:
                self._frequency[slot] -= 1
            queue.discard(slot)
            main.append(slot)
        return None

    def forget(self, slot: int, key: bytes) -> None:
        """See ``Policy``."""
        self.hide(slot)
        self._resident -= 1
        if not self._in_main[slot]:
            self._ghost.add(key, self._resident)

    def last_use(self, slot: int) -> int:
        """See ``Policy``."""
        return self._use[slot]
