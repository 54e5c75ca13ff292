"""Reading everything once to see whether it is still what it should be."""

from __future__ import annotations

from hpkv_daemon.tiers.base import Outcome, Scrubbed
from hpkv_daemon.tiers.disk.format import Record
from hpkv_daemon.tiers.disk.shared import Shared, place_of
from hpkv_daemon.tiers.disk.table import Segment
from hpkv_daemon.tiers.host import Reply

STEP_RECORDS = 1000
"""Looked at in one go."""
ORDER_BYTES = 32 << 20
"""Verified by one order; a single block may be larger. Its segment cannot be evicted meanwhile."""


class Scrub:
    """One walk over all segments. Not thread-safe: the control loop is its only user."""

    def __init__(self, shared: Shared, bytes_per_second: int) -> None:
        self._shared = shared
        self._index = shared.index
        self._bytes_per_second = bytes_per_second
        self._waiting = sorted(self._index.segments.values(), key=lambda segment: segment.life)
        self._total = len(self._waiting)
        self._records: list[Record] = []
        self._segment: Segment | None = None
        self._position = 0
        self._busy = False
        self._good = self._bad = 0
        self.over = False
        if not self._total:
            self._tell()

    def go_on(self) -> None:
        """Order the next piece, if none is under way."""
        while not self._busy and not self.over:
            segment = self._segment
            if segment is not None and self._records:
                self._order(segment)
            elif segment is not None and self._position < segment.records and self._is_there(segment):
                self._records = self._index.live(segment, self._position, STEP_RECORDS)
                self._position += STEP_RECORDS
            elif segment is not None:
                self._segment = None
                self._tell()
            elif self._waiting:
                self._segment, self._position = self._waiting.pop(0), 0
            else:
                self.over = True

    def _is_there(self, segment: Segment) -> bool:
        return self._index.segments.get(segment.number) is segment

    def _order(self, segment: Segment) -> None:
        piece: list[Record] = []
        size = 0
        while self._records and (not piece or size + self._records[0].length <= ORDER_BYTES):
            record = self._records.pop(0)
            found = self._index.find(record.fingerprint, record.key)
            if found is not None and found[0] is segment and found[1] == record:
                piece.append(record)
                size += record.length
        if not piece:
            return
        self._busy = True
        segment.pins += 1
        self._shared.process.ask(
            lambda reply: self._verified(segment, piece, reply),
            "verify",
            place_of(segment),
            piece,
            self._bytes_per_second,
        )

    def _verified(self, segment: Segment, piece: list[Record], reply: Reply) -> None:
        self._busy = False
        segment.pins -= 1
        if reply.outcome is Outcome.DIED:
            self._records = piece + self._records
            return
        for record, outcome in zip(piece, reply.result or [Outcome.IO_ERROR] * len(piece), strict=True):
            self._shared.counters["scrubbed_blocks"] += 1
            if outcome == Outcome.OK:
                self._good += 1
                continue
            self._bad += 1
            found = self._index.find(record.fingerprint, record.key)
            if found is not None and found[0] is segment and found[1].number == record.number:
                self._index.drop(record.fingerprint, record.key)
                self._shared.counters["bad_records"] += 1

    def _tell(self) -> None:
        done = self._total - len(self._waiting)
        self._shared.tell(Scrubbed(done, self._total, self._good, self._bad))
