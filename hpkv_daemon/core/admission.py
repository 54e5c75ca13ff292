"""Which blocks are worth a write to the tier, when, and how many bytes a day. Pure; the clock is passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hpkv_client.types import BlockKey

REMEMBERED = 65_536
"""Keys at least; twice as many at most. About 170 bytes each."""
_DAY_SECONDS = 86_400.0
_HEAD_START = 24
"""A daemon begins with one part in this many of a day's writes, so that restarts do not multiply them."""


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """What operators decide about writes to the tier."""

    demote: bool = False
    """Only what has not been used for ``idle_seconds``, or is about to be evicted; else every block at once."""
    idle_seconds: float = 60.0
    second_touch: bool = False
    """Only what was stored or asked for twice."""
    daily_bytes: int | None = None
    """At most so many a day."""


class KeyMemory:
    """The keys that were added last, in two generations: the older one is forgotten as a whole.

    Plain dicts of bytes and None, because the garbage collector does not walk those.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._young: dict[BlockKey, None] = {}
        self._old: dict[BlockKey, None] = {}

    def add(self, key: BlockKey) -> None:
        """Remember the key."""
        if len(self._young) >= self._remembered and key not in self._young:
            self._old, self._young = self._young, {}
        self._young[key] = None

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._young or key in self._old


class Admission:
    """Whether a block has shown that it is worth a write."""

    def __init__(self, second_touch: bool, remembered: int = REMEMBERED) -> None:
        self.second_touch = second_touch
        self._seen = KeyMemory(remembered)
        self._worthy = KeyMemory(remembered)

    def stored(self, key: BlockKey) -> None:
        """The block became resident. A key that comes again was missed meanwhile."""
        if self.second_touch:
            (self._worthy if key in self._seen else self._seen).add(key)

    def used(self, key: BlockKey) -> None:
        """The block was found by somebody."""
        if self.second_touch:
            self._worthy.add(key)

    def admits(self, key: BlockKey) -> bool:
        """Whether the block may be written."""
        return not self.second_touch or key in self._worthy


class WriteAllowance:
    """Bytes that may still be written: a bucket that fills evenly, and holds one day's worth at most.

    ``daily_bytes`` None: no limit. ``now`` is in seconds of any clock that does not go back.
    """

    def __init__(self, daily_bytes: int | None, now: float) -> None:
        self._daily_bytes = daily_bytes
        self._left = (daily_bytes or 0) / _HEAD_START
        self._filled = now

    def left(self, now: float) -> float:
        """Bytes; may be below 0 by what one batch exceeded it."""
        if self._daily_bytes is None:
            return float("inf")
        self._left += (now - self._filled) * self._daily_bytes / _DAY_SECONDS
        self._left = min(self._left, self._daily_bytes)
        self._filled = now
        return self._left

    def change(self, daily_bytes: int | None, now: float) -> None:
        """Another limit from now on; what was saved up stays, as far as the new one holds so much."""
        left = self.left(now) if self._daily_bytes is not None else (daily_bytes or 0) / _HEAD_START
        self._daily_bytes = daily_bytes
        self._left = min(left, daily_bytes or 0)
        self._filled = now

    def spend(self, size: int) -> None:
        """So many bytes were written."""
        if self._daily_bytes is not None:
            self._left -= size


class IdleTicks:
    """Which logical time it was a while ago: a block last used before that is idle."""

    def __init__(self, idle_seconds: float) -> None:
        self._idle_seconds = idle_seconds
        self._samples: deque[tuple[float, int]] = deque()
        self._before = 0

    def sample(self, now: float, tick: int) -> int:
        """It is ``now``, and ``tick``; the tick ``idle_seconds`` ago, 0 if nobody knows. Call it often."""
        if not self._samples or now - self._samples[-1][0] >= self._idle_seconds / 64:
            self._samples.append((now, tick))
        while self._samples and now - self._samples[0][0] >= self._idle_seconds:
            self._before = self._samples.popleft()[1]
        return self._before


def coldest_quarter(last_uses: Sequence[int]) -> int:
    """The tick before or at which about a quarter of these were used last; 0 if there are none."""
    return sorted(last_uses)[len(last_uses) // 4] if last_uses else 0
