"""What is on the disk, and where. Pure: no I/O, no clock; ticks are passed in.

One dict from key to int per namespace, and per segment flat arrays over its records: nothing that Python's garbage
collector walks per block. A block is found by one look-up; the process that reads it checks what it finds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from heapq import nlargest

from hpkv_client.types import KEY_BYTES, BlockKey, Keys
from hpkv_daemon.tiers.disk.format import MAX_RECORD, PAGE, Kind, Record, record_bytes, sequence
from hpkv_daemon.tiers.disk.table import NOBODY, Namespace, Phase, Segment

MAX_SEGMENTS = 1 << 16
MAX_NAMESPACES = NOBODY
MIN_SEGMENTS = 3
"""One that is written, one that empties into it, one that blocks stay in."""

_NUMBER_SHIFT = 22
_SEGMENT_SHIFT = 44
_LOW = (1 << 22) - 1
_FIRST_STEP = 16
"""Keys that are compared at once at first; then twice as many."""


class DiskIndex:
    """Residency, use and budget of one directory. Not thread-safe: the control loop is its only user.

    ``budget_bytes`` bounds the sizes of all segments and spare files together; raises ``ValueError`` when it is
    less than ``MIN_SEGMENTS`` of ``segment_bytes``.
    """

    def __init__(self, budget_bytes: int, segment_bytes: int) -> None:
        if budget_bytes < MIN_SEGMENTS * segment_bytes:
            raise ValueError(f"{budget_bytes} bytes do not hold {MIN_SEGMENTS} segments of {segment_bytes}")
        self.budget_bytes = budget_bytes
        self.segment_bytes = segment_bytes
        self.segments: dict[int, Segment] = {}
        self.spares: dict[int, int] = {}
        """Files without a life, ready to be written: number -> bytes."""
        self.foreign: set[int] = set()
        """Numbers that something else in the directory has."""
        self.limit_bytes = budget_bytes
        """The budget, or less while the file system has no more room."""
        self.open: Segment | None = None
        self.next_life = 1
        self._namespaces: dict[bytes, Namespace] = {}
        self._numbered: list[Namespace] = []
        self.recovering = True
        self._forgotten: dict[bytes, int] = {}
        """Fingerprint and key -> ``before``; only until recovery is over."""
        self._discarded: list[dict[BlockKey, int]] = []

    # -- look-ups -----------------------------------------------------------------------------------------

    def match(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are here."""
        space = self._namespaces.get(fingerprint)
        if space is None:
            return 0
        blob = keys.blob if isinstance(keys, Keys) else b"".join(keys)
        entries, found, expected = space.entries, 0, -1
        while found < len(keys):
            packed = entries.get(blob[found * KEY_BYTES : (found + 1) * KEY_BYTES])
            if packed is None:
                break
            place = packed >> _NUMBER_SHIFT
            found += 1
            if place == expected and found < len(keys):
                more = self._follows(space, place + 1, blob, found)
                found, place = found + more, place + more
            expected = place + 1
        return found

    def _follows(self, space: Namespace, place: int, blob: bytes, first: int) -> int:
        """How many keys of ``blob`` from the ``first`` on are those of the records from ``place`` on, all of them live.

        What was stored together lies together: a few comparisons of memory instead of a look-up for each key, which
        with a million of them is a cache miss or three. The record before ``place`` is live; so what a forgotten
        namespace left with its owner's number, always earlier in a segment, is never seen here.
        """
        segment, start = self.segments[place >> (_SEGMENT_SHIFT - _NUMBER_SHIFT)], place & _LOW
        most = min(len(blob) // KEY_BYTES - first, segment.records - start)
        owner, same, step = space.number.to_bytes(segment.owners.itemsize, sys.byteorder), 0, _FIRST_STEP
        while same < most:
            end = min(same + step, most)
            wanted = blob[(first + same) * KEY_BYTES : (first + end) * KEY_BYTES]
            there = segment.keys[(start + same) * KEY_BYTES : (start + end) * KEY_BYTES]
            alive = segment.owners[start + same : start + end].tobytes() == owner * (end - same)
            if not alive or wanted != there:
                break
            same, step = end, step * 2
        return same

    def contains(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of these are here."""
        space = self._namespaces.get(fingerprint)
        entries = space.entries if space is not None else {}
        return [key in entries for key in keys]

    def find(self, fingerprint: bytes, key: BlockKey) -> tuple[Segment, Record] | None:
        """Where a block lies. The record's parent is not known here and left empty."""
        space = self._namespaces.get(fingerprint)
        packed = space.entries.get(key) if space is not None else None
        if space is None or packed is None:
            return None
        segment, number, page = packed >> _SEGMENT_SHIFT, packed >> _NUMBER_SHIFT & _LOW, packed & _LOW
        record = Record(Kind.BLOCK, number, page * PAGE, fingerprint, key, b"", space.length, 0)
        return self.segments[segment], record

    def length(self, fingerprint: bytes) -> int | None:
        """Payload bytes of the namespace's blocks, if it has any."""
        space = self._namespaces.get(fingerprint)
        return space.length if space is not None and space.entries else None

    def touch(self, fingerprint: bytes, keys: Iterable[BlockKey], tick: int) -> None:
        """These blocks are used now; unknown ones are passed over."""
        space = self._namespaces.get(fingerprint)
        if space is None:
            return
        for key in keys:
            packed = space.entries.get(key)
            if packed is not None:
                segment, number = self.segments[packed >> _SEGMENT_SHIFT], packed >> _NUMBER_SHIFT & _LOW
                segment.shares[space.number][1] += tick - segment.used[number]
                segment.used[number] = tick

    # -- writing ------------------------------------------------------------------------------------------

    def next_sequence(self) -> int:
        """Smaller than that of any record to come, greater than that of any there was."""
        return sequence(self.open.life, self.open.records) if self.open else sequence(self.next_life, 0)

    def may_grow(self) -> bool:
        """Whether there may be one more segment file."""
        return self.used_bytes + self.segment_bytes <= self.limit_bytes

    def free_number(self) -> int:
        """A number that no file has."""
        return next(
            number for number in range(MAX_SEGMENTS) if number not in self.segments and number not in self.spares
        )

    def begin(self, number: int) -> Segment:
        """Open the file ``number``, spare or new, for a new life; the segment open before must be sealed."""
        assert self.open is None
        self.spares.pop(number, None)
        segment = self.segments[number] = Segment(number, self.next_life, self.segment_bytes, Phase.OPEN)
        self.next_life += 1
        self.open = segment
        return segment

    def resume(self, number: int) -> Segment:
        """Append to a segment that an earlier process left with room in it."""
        assert self.open is None
        segment = self.open = self.segments[number]
        segment.phase = Phase.OPEN
        return segment

    def place(self, kind: Kind, fingerprint: bytes, key: bytes, parent: bytes, length: int, before: int = 0) -> Record:
        """Give the next place in the open segment to a record that ``fits``; ``commit`` tells that it is there."""
        segment = self.open
        assert segment is not None
        record = Record(kind, segment.records, segment.end, fingerprint, key, parent, length, before)
        segment.put(record.number, NOBODY, b"\0" * KEY_BYTES, 0)
        segment.end += record_bytes(length)
        return record

    def commit(self, segment: Segment, record: Record, tick: int) -> bool:
        """The record is durable. False if it says nothing new: forgotten meanwhile, or a later one is known."""
        if self.segments.get(segment.number) is not segment:
            return False
        if record.kind != Kind.BLOCK:
            segment.tombstones.append(record)
            return True
        space = self._open_namespace(record.fingerprint, record.length)
        if space is None or sequence(segment.life, record.number) < self._forgotten_before(space, record.key):
            return False
        known = space.entries.get(record.key)
        if known is not None:
            earlier = self.segments[known >> _SEGMENT_SHIFT]
            if (earlier.life, known >> _NUMBER_SHIFT & _LOW) >= (segment.life, record.number):
                return False
            self._detach(space, known)
        segment.put(record.number, space.number, record.key, tick)
        page = record.offset // PAGE
        space.entries[record.key] = segment.number << _SEGMENT_SHIFT | record.number << _NUMBER_SHIFT | page
        share = segment.shares.setdefault(space.number, [0, 0])
        share[0] += 1
        share[1] += tick
        return True

    def seal(self) -> Segment:
        """No more records go into the open segment."""
        segment = self.open
        assert segment is not None
        segment.phase = Phase.SEALED
        segment.trim()
        self.open = None
        return segment

    def _open_namespace(self, fingerprint: bytes, length: int) -> Namespace | None:
        space = self._namespaces.get(fingerprint)
        if space is None:
            if len(self._numbered) >= MAX_NAMESPACES:
                return None
            space = self._namespaces[fingerprint] = Namespace(fingerprint, len(self._numbered), length)
            self._numbered.append(space)
        if not space.entries:
            space.length = length
        return space if space.length == length else None

    def _forgotten_before(self, space: Namespace, key: bytes) -> int:
        if not self._forgotten:
            return space.before
        return max(space.before, self._forgotten.get(space.fingerprint + key, 0))

    def _detach(self, space: Namespace, packed: int) -> None:
        segment, number = self.segments[packed >> _SEGMENT_SHIFT], packed >> _NUMBER_SHIFT & _LOW
        segment.owners[number] = NOBODY
        share = segment.shares[space.number]
        share[0] -= 1
        share[1] -= segment.used[number]
        if not share[0]:
            del segment.shares[space.number]

    # -- forgetting ---------------------------------------------------------------------------------------

    def drop(self, fingerprint: bytes, key: BlockKey) -> bool:
        """Forget one block, here only; False if it was not here."""
        space = self._namespaces.get(fingerprint)
        packed = space.entries.pop(key, None) if space is not None else None
        if space is None or packed is None:
            return False
        self._detach(space, packed)
        return True

    def drop_namespace(self, fingerprint: bytes, before: int) -> int:
        """Forget all blocks of a namespace whose sequence is below ``before``; how many."""
        space = self._open_namespace(fingerprint, self.length(fingerprint) or 0)
        if space is None:
            return 0
        space.before = max(space.before, before)
        if before < self.next_sequence():
            stale = [key for key, packed in space.entries.items() if self._sequence(packed) < before]
            for key in stale:
                self.drop(fingerprint, key)
            return len(stale)
        forgotten = len(space.entries)
        for segment in self.segments.values():
            segment.shares.pop(space.number, None)
        # Freeing a million keys takes a while: ``tidy`` does it bit by bit.
        self._discarded.append(space.entries)
        space.entries = {}
        return forgotten

    def tidy(self, limit: int = 10_000) -> None:
        """Free up to ``limit`` entries of forgotten namespaces."""
        while self._discarded and limit > 0:
            entries = self._discarded[-1]
            for _ in range(min(limit, len(entries))):
                entries.popitem()
                limit -= 1
            if not entries:
                self._discarded.pop()

    def _sequence(self, packed: int) -> int:
        return sequence(self.segments[packed >> _SEGMENT_SHIFT].life, packed >> _NUMBER_SHIFT & _LOW)

    # -- eviction -----------------------------------------------------------------------------------------

    def victim(self) -> Segment | None:
        """The segment that was of use longest ago; None when none can be spared now."""
        found = [each for each in self.segments.values() if each.phase is Phase.SEALED and not each.pins]
        return min(found, key=lambda segment: (segment.warmth, segment.life), default=None)

    def mean_tick(self) -> float:
        """Mean tick of the last use of all blocks: what was used later counts as hot."""
        shares = [share for segment in self.segments.values() for share in segment.shares.values()]
        blocks = sum(count for count, _ in shares)
        return sum(ticks for _, ticks in shares) / blocks if blocks else 0.0

    def live(self, segment: Segment, first: int = 0, count: int = MAX_RECORD + 1) -> list[Record]:
        """The blocks of a segment that can be found, as ``find`` answers them, among ``count`` records from ``first``.

        Takes about 1 us for each of them, so the control loop asks for a few at a time.
        """
        records = []
        for number in range(first, min(first + count, segment.records)):
            owner = segment.owners[number]
            if owner != NOBODY:
                space, key = self._numbered[owner], segment.key(number)
                packed = space.entries.get(key, -1)
                if packed >> _NUMBER_SHIFT == segment.number << (_SEGMENT_SHIFT - _NUMBER_SHIFT) | number:
                    offset = (packed & _LOW) * PAGE
                    records.append(Record(Kind.BLOCK, number, offset, space.fingerprint, key, b"", space.length, 0))
        return records

    def hot(self, segment: Segment, records: Sequence[Record], limit_bytes: int) -> list[Record]:
        """Of these live blocks of a segment, those that were used last, and no more than fill ``limit_bytes``."""
        used = segment.used
        chosen, left = [], limit_bytes
        for record in nlargest(len(records), records, key=lambda record: used[record.number]):
            left -= record_bytes(record.length)
            if left < 0:
                break
            chosen.append(record)
        return sorted(chosen)

    def needed_tombstones(self, segment: Segment) -> list[Record]:
        """Its tombstones that some other segment may still hold blocks for: they are written again elsewhere."""
        lives = [each.life for each in self.segments.values() if each is not segment]
        oldest = sequence(min(lives), 0) if lives else self.next_sequence()
        return [record for record in segment.tombstones if record.before > oldest]

    def leave(self, segment: Segment, first: int = 0, count: int = MAX_RECORD + 1) -> int:
        """Drop what is still among ``count`` records of a segment that is LEAVING; how many blocks.

        ``retired`` follows when all are dropped and the file has no life any more.
        """
        assert segment.phase is Phase.LEAVING
        records = self.live(segment, first, count)
        for record in records:
            self.drop(record.fingerprint, record.key)
        return len(records)

    def retired(self, number: int, spare: bool) -> None:
        """The file has no life any more: it is there to be written again, or it is gone."""
        size = self.segments.pop(number).size
        if spare:
            self.spares[number] = size

    # -- recovery -----------------------------------------------------------------------------------------

    def recover(self, number: int, life: int, size: int) -> Segment:
        """A segment that an earlier process left: what ``recovered`` says of it comes later."""
        segment = self.segments[number] = Segment(number, life, size, Phase.SEALED)
        self.next_life = max(self.next_life, life + 1)
        return segment

    def recovered(self, segment: Segment, records: Iterable[Record]) -> None:
        """Records found in it, in their order. Segments come in any: of two blocks with one key the later one stays."""
        for record in records:
            segment.end = max(segment.end, record.offset + record_bytes(record.length))
            if record.kind == Kind.FORGET_KEY:
                self.forget_until_recovered(record.fingerprint, record.key, record.before)
                space = self._namespaces.get(record.fingerprint)
                packed = space.entries.get(record.key) if space is not None else None
                if packed is not None and self._sequence(packed) < record.before:
                    self.drop(record.fingerprint, record.key)
            elif record.kind == Kind.FORGET_NAMESPACE:
                self.drop_namespace(record.fingerprint, record.before)
            if record.number < segment.records:
                # Told a second time, after a process died while it told.
                continue
            segment.put(record.number, NOBODY, record.key, 0)
            self.commit(segment, record, 0)

    def forget_until_recovered(self, fingerprint: bytes, key: BlockKey, before: int) -> None:
        """A block that recovery may yet find is void if its sequence is below ``before``."""
        if self.recovering:
            tomb = fingerprint + key
            self._forgotten[tomb] = max(before, self._forgotten.get(tomb, 0))

    def end_recovery(self) -> None:
        """All segments were read: no older block can come to light."""
        self.recovering = False
        self._forgotten.clear()

    # -- how much -----------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Sizes of all files."""
        return sum(segment.size for segment in self.segments.values()) + sum(self.spares.values())

    @property
    def blocks(self) -> int:
        """How many can be found."""
        return sum(len(space.entries) for space in self._numbered)

    @property
    def live_bytes(self) -> int:
        """Their payloads."""
        return sum(len(space.entries) * space.length for space in self._numbered)

    def check(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant."""
        assert self.used_bytes <= self.budget_bytes, f"{self.used_bytes} bytes of {self.budget_bytes} are taken"
        assert not self.segments.keys() & self.spares.keys(), "a file is spare and in use"
        seen = 0
        for segment in self.segments.values():
            assert (segment.phase is Phase.OPEN) == (segment is self.open), f"segment {segment.number} is not open"
            records = self.live(segment)
            seen += len(records)
            ticks = sum(segment.used[record.number] for record in records)
            shares = sum(ticks for _, ticks in segment.shares.values())
            assert segment.blocks == len(records), f"segment {segment.number} counts {segment.blocks} live blocks"
            assert ticks == shares, f"segment {segment.number} miscounts the use of its blocks"
        assert seen == self.blocks, f"{self.blocks} blocks are known, {seen} are in segments"
