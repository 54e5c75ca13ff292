"""Why a block that was here, or should have come, is not here. Pure, and bounded."""

from __future__ import annotations

from enum import IntEnum

from hpkv_client.types import BlockKey

REMEMBERED = 32_768
"""Keys at least; twice as many at most. About 170 bytes each."""


class Reason(IntEnum):
    """What became of a block."""

    EVICTED = 1
    NO_ROOM = 2
    NO_PARENT = 3
    FAILED = 4
    UNREADABLE = 5


REASONS = {
    Reason.EVICTED: "evicted: the pool was full",
    Reason.NO_ROOM: "not stored: every slot was in use",
    Reason.NO_PARENT: "not stored: the block before it was not there",
    Reason.FAILED: "not stored: a rank's part did not come",
    Reason.UNREADABLE: "on storage, but damaged there or not readable",
}
"""The reasons as operators read them."""


class Departures:
    """The keys that left last, in two generations: the older one is forgotten as a whole.

    Plain dicts of bytes and small integers, because the garbage collector does not walk those.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._young: dict[BlockKey, int] = {}
        self._old: dict[BlockKey, int] = {}

    def note(self, key: BlockKey, reason: Reason) -> None:
        """The block left, or did not come, for this reason."""
        if len(self._young) >= self._remembered:
            self._old, self._young = self._young, {}
        self._young[key] = int(reason)

    def why(self, key: BlockKey) -> Reason | None:
        """The latest reason; None for a key that was not seen, or too long ago."""
        found = self._young.get(key) or self._old.get(key)
        return Reason(found) if found else None
