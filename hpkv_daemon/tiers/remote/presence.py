"""What a store holds, as far as one daemon knows: remembered for a while, and asked for in few questions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hpkv_client.types import BlockKey

HERE_SECONDS = 300.0
"""So long a block that was seen counts as there. One that has left meanwhile is found out by the read."""
ABSENT_SECONDS = 2.0
"""So long one that was not there counts as absent: another node may write it at any moment."""
MOST_KNOWN = 1 << 18
"""Blocks remembered: about 50 MB."""
FANOUT = 16
"""Questions asked at once about one chain: of 2,000 blocks the end is found in three rounds."""


class Presence:
    """Key -> there or not. ``now`` is monotonic seconds. Forgets what it learnt longest ago."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._known: dict[bytes, float] = {}
        """Fingerprint and key -> until when it counts as there; negative: as absent."""

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, fingerprint: bytes, key: BlockKey, here: bool, now: float) -> None:
        """It was there, or was not."""
        name = fingerprint + key
        self._known.pop(name, None)
        self._known[name] = now + HERE_SECONDS if here else -(now + ABSENT_SECONDS)
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def find(self, fingerprint: bytes, key: BlockKey, now: float) -> bool | None:
        """Whether it is there; None: nobody knows."""
        until = self._known.get(fingerprint + key)
        if until is None or abs(until) <= now:
            return None
        return until > 0

    def match(self, fingerprint: bytes, keys: Sequence[BlockKey], now: float) -> int:
        """How many leading keys are there for all that is known."""
        for index, key in enumerate(keys):
            if not self.find(fingerprint, key, now):
                return index
        return len(keys)

    def clear(self) -> None:
        """Nothing is known any more."""
        self._known.clear()

    def drop_namespace(self, fingerprint: bytes) -> None:
        """Nothing is known about the namespace any more."""
        for name in [name for name in self._known if name.startswith(fingerprint)]:
            del self._known[name]


class Search(Protocol):
    """Which keys to ask for next."""

    keys: Sequence[BlockKey]

    def questions(self) -> list[int]:
        """Indices of the keys to ask for now; none: it is over."""

    def answer(self, here: dict[int, bool]) -> None:
        """What came of the last questions."""

    def presumed(self) -> int:
        """How many leading keys count as there, by what has been found out."""


class ChainSearch:
    """Finds how far a chain goes. A block is written after its parent, so what is before one that is there, is
    there, too; where a store has dropped some since, the read finds out."""

    def __init__(self, keys: Sequence[BlockKey], leading: int = 0) -> None:
        self.keys = keys
        self._low = leading
        """So many are there."""
        self._high = len(keys)
        """This one is not."""

    def questions(self) -> list[int]:
        """See ``Search``. The first that is not known is always among them."""
        left = self._high - self._low
        count = min(left, FANOUT)
        if count <= 1:
            return [self._low] * count
        return sorted({self._low + (left - 1) * step // (count - 1) for step in range(count)})

    def answer(self, here: dict[int, bool]) -> None:
        """See ``Search``."""
        self._high = min([index for index, there in here.items() if not there], default=self._high)
        self._low = max([index + 1 for index, there in here.items() if there and index < self._high], default=self._low)

    def presumed(self) -> int:
        """See ``Search``."""
        return self._low


class EachSearch:
    """Asks for every key once: they form no chain."""

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self.keys = keys
        self._asked = False

    def questions(self) -> list[int]:
        """See ``Search``."""
        return [] if self._asked else list(range(len(self.keys)))

    def answer(self, here: dict[int, bool]) -> None:  # noqa: ARG002
        """See ``Search``."""
        self._asked = True

    def presumed(self) -> int:
        """See ``Search``. Nothing follows from one key about another."""
        return 0
