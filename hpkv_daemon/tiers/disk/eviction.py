"""How a segment is given up: what is hot in it is written again elsewhere first, then the file can be used again.

One segment leaves at a time, and does so before its room is needed: there is always a file to go on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpkv_daemon.tiers.base import Outcome
from hpkv_daemon.tiers.disk.format import Kind, Record, record_bytes
from hpkv_daemon.tiers.disk.shared import Item, Shared, place_of
from hpkv_daemon.tiers.disk.table import Phase, Segment
from hpkv_daemon.tiers.host import Reply

HOT_SHARE = 0.5
"""Of a segment, at most, is written again: every segment that leaves makes room for new blocks."""
STEP_RECORDS = 1000
"""Looked at in one go."""
COPY_BYTES = 8 << 20
"""Written again by one order; a single block may be larger."""


class Eviction:
    """Not thread-safe: the control loop is its only user.

    ``put_first`` queues a tombstone to be written before everything else, ``pump`` goes on with the queue.
    """

    def __init__(self, shared: Shared, put_first: Callable[[Item], None], pump: Callable[[], None]) -> None:
        self._shared = shared
        self._index = shared.index
        self._put_first = put_first
        self._pump = pump
        self._departure: Iterator[None] | None = None
        """The segment that leaves, step by step."""
        self._waits = 0
        """Copies and tombstones of it that are not over."""
        self._round = 0
        """Which departure it is: what is left of one that was broken off does not count for the next."""
        self._given_up: list[Segment] = []
        """Empty segments whose files could not be retired yet."""

    def keep_ahead(self) -> None:
        """Begin to empty a segment unless there is a file to go on with."""
        if not self._index.spares and not self._index.may_grow():
            self.begin()

    def begin(self) -> None:
        """Let the oldest segment leave, unless one does already or none can."""
        segment = self._index.victim() if self._departure is None else None
        if segment is None:
            return
        segment.phase = Phase.LEAVING
        self._waits = 0
        self._round += 1
        self._departure = self._depart(segment)
        self._shared.process.wake()

    def _depart(self, segment: Segment) -> Iterator[None]:
        """Step by step, so that the control loop is never held up for long."""
        since, hot = self._index.mean_tick(), []
        for first in range(0, segment.records, STEP_RECORDS):
            live = self._index.live(segment, first, STEP_RECORDS)
            hot += [record for record in live if segment.used[record.number] > since]
            self._shared.process.wake()
            yield
        self._carry_tombstones(segment, wait=True)
        self._pump()
        while self._waits:
            yield
        self._copy(segment, self._index.hot(segment, hot, int(segment.size * HOT_SHARE)))
        while self._waits or segment.pins:
            yield
        for first in range(0, segment.records, STEP_RECORDS):
            self._shared.counters["evicted_blocks"] += self._index.leave(segment, first, STEP_RECORDS)
            self._shared.process.wake()
            yield
        self._waits += 1
        self._retire(segment, self._index.segment_bytes, self._round)
        while self._waits:
            # Only then is there a file to go on with, and no other segment has to leave.
            yield

    def give_room(self) -> bool:
        """Remove the oldest segment's file at once, hot or not; False when none can be spared."""
        segment = self._index.victim()
        if segment is None:
            return False
        segment.phase = Phase.LEAVING
        self._carry_tombstones(segment, wait=False)
        self._shared.counters["evicted_blocks"] += self._index.leave(segment)
        self._retire(segment, keep_bytes=0)
        return True

    def look_after(self) -> None:
        """One more step of the segment that leaves."""
        if self._departure is not None and next(self._departure, self) is self:
            self._departure = None

    def retry(self) -> None:
        """Try once more to retire what could not be retired."""
        segments, self._given_up = self._given_up, []
        for segment in segments:
            self._retire(segment, self._index.segment_bytes)

    def process_ended(self) -> None:
        """Nothing is under way any more; recovery sees to the files, and whoever was leaving stays for now."""
        self._given_up.clear()
        for segment in self._index.segments.values():
            if segment.phase is Phase.LEAVING:
                segment.phase = Phase.SEALED
        self._departure = None
        self._round += 1

    def _carry_tombstones(self, segment: Segment, wait: bool) -> None:
        departure, target = self._round, self._index.open
        needed = self._index.needed_tombstones(segment)
        if target is None or not target.fits(0, len(needed)):
            # They go into the next segment, and that may be the file of this one: waiting for them would not end.
            wait = False
        for record in needed:
            item = Item(Kind(record.kind), record.fingerprint, record.key, before=record.before)
            if wait:
                self._waits += 1
                item.ends.append(lambda _outcome, _problem: self._one_less(departure))
            self._put_first(item)

    def _copy(self, segment: Segment, hot: list[Record]) -> None:
        target = self._index.open
        pairs: list[tuple[Record, Record]] = []
        size = 0
        for old in hot:
            if target is None or not target.fits(old.length):
                break
            if size + old.length > COPY_BYTES and pairs:
                self._order(segment, target, pairs)
                pairs, size = [], 0
            new = self._index.place(Kind.BLOCK, old.fingerprint, old.key, b"", old.length)
            pairs.append((old, new))
            size += record_bytes(old.length)
        if target is not None and pairs:
            self._order(segment, target, pairs)

    def _order(self, segment: Segment, target: Segment, pairs: list[tuple[Record, Record]]) -> None:
        self._waits += 1
        segment.pins += 1
        target.pins += 1
        departure = self._round
        self._shared.process.ask(
            lambda reply: self._copied(departure, segment, target, pairs, reply),
            "copy",
            place_of(segment),
            place_of(target),
            pairs,
        )

    def _copied(
        self, departure: int, segment: Segment, target: Segment, pairs: list[tuple[Record, Record]], reply: Reply
    ) -> None:
        segment.pins -= 1
        target.pins -= 1
        if reply.ok:
            for (old, new), outcome in zip(pairs, reply.result, strict=True):
                found = self._index.find(old.fingerprint, old.key)
                if found is None or found[0] is not segment or found[1].number != old.number:
                    # Forgotten, or written anew, while it was copied.
                    continue
                if outcome == Outcome.OK:
                    self._index.commit(target, new, segment.used[old.number])
                    self._shared.counters["reinserted_blocks"] += 1
                else:
                    self._index.drop(old.fingerprint, old.key)
                    self._shared.counters["bad_records"] += 1
        elif reply.outcome in (Outcome.IO_ERROR, Outcome.READ_ONLY):
            self._shared.health.fail(reply.outcome, reply.problem, self._shared.clock())
        self._one_less(departure)

    def _one_less(self, departure: int) -> None:
        if self._round == departure:
            self._waits -= 1
            self._shared.process.wake()

    def _retire(self, segment: Segment, keep_bytes: int, departure: int = -1) -> None:
        place = place_of(segment)
        self._shared.process.ask(lambda reply: self._retired(departure, segment, reply), "retire", place, keep_bytes)

    def _retired(self, departure: int, segment: Segment, reply: Reply) -> None:
        self._one_less(departure)
        if self._index.segments.get(segment.number) is not segment:
            return
        if reply.ok:
            self._index.retired(segment.number, reply.result)
        elif reply.outcome is not Outcome.DIED:
            self._given_up.append(segment)
            self._shared.health.fail(reply.outcome, reply.problem, self._shared.clock())
        self._pump()
