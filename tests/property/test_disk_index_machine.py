"""The disk tier's index against a simple model: dictionaries of what was acknowledged, and where."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hpkv_client.types import typed_digest
from hpkv_daemon.tiers.disk.format import PAGE, Kind, Record, record_bytes, sequence
from hpkv_daemon.tiers.disk.index import DiskIndex
from hpkv_daemon.tiers.disk.table import Phase, Segment

SEGMENT_BYTES = 16 * PAGE
BUDGET = 5 * SEGMENT_BYTES
SPACES = [typed_digest("space", number) for number in range(2)]
KEYS = [typed_digest("key", number) for number in range(7)]
LENGTHS = {SPACES[0]: 100, SPACES[1]: PAGE + 1}

spaces = st.sampled_from(SPACES)
keys = st.sampled_from(KEYS)


class IndexMachine(RuleBasedStateMachine):
    """What the process would have on disk is kept in ``files``; recovery starts a new index from it."""

    def __init__(self) -> None:
        super().__init__()
        self.index = DiskIndex(BUDGET, SEGMENT_BYTES)
        self.index.end_recovery()
        self.known: dict[tuple[bytes, bytes], tuple[int, int]] = {}
        """Namespace and key -> life and number of the record that is served."""
        self.files: dict[int, tuple[int, list[Record]]] = {}
        """Number -> life and durable records."""
        self.under_way: list[tuple[Segment, Record]] = []
        self.ticks: dict[tuple[bytes, bytes], int] = {}
        self.now = 1

    def file(self, segment: Segment) -> list[Record]:
        return self.files[segment.number][1]

    def open(self, length: int) -> Segment | None:
        """The open segment with room for a record, if that can be had."""
        segment = self.index.open
        if segment is not None and segment.fits(length):
            return segment
        if segment is not None:
            self.index.seal()
        if self.index.spares:
            number = min(self.index.spares)
        elif self.index.may_grow():
            number = self.index.free_number()
        else:
            return None
        segment = self.index.begin(number)
        self.files[number] = (segment.life, [])
        return segment

    @rule(space=spaces, several=st.lists(keys, min_size=1, max_size=5))
    def place(self, space: bytes, several: list[bytes]) -> None:
        for key in several:
            segment = self.open(LENGTHS[space])
            if segment is None:
                return
            record = self.index.place(Kind.BLOCK, space, key, b"", LENGTHS[space])
            assert record.offset + record_bytes(record.length) <= segment.size
            segment.pins += 1
            self.under_way.append((segment, record))

    @precondition(lambda self: self.under_way)
    @rule(order=st.randoms(use_true_random=False), some=st.integers(1, 12), lost=st.integers(0, 5))
    def settle(self, order: random.Random, some: int, lost: int) -> None:
        """Writes end, in any order; a few fail."""
        order.shuffle(self.under_way)
        for _ in range(min(some, len(self.under_way))):
            self.settle_one(*self.under_way.pop(), arrives=bool(order.randrange(6) or lost))

    def settle_one(self, segment: Segment, record: Record, arrives: bool) -> None:
        segment.pins -= 1
        if not arrives:
            return
        self.file(segment).append(record)
        where, name = (segment.life, record.number), (record.fingerprint, record.key)
        forgotten = sequence(*where) < self.buried(name)
        fresh = not forgotten and self.known.get(name, (0, 0)) < where
        # The tier keeps what was forgotten by key on its way apart; the index knows only of namespaces.
        if forgotten and sequence(*where) >= self.buried_space(record.fingerprint):
            return
        assert self.index.commit(segment, record, self.now) is fresh
        if fresh:
            self.known[name] = where
            self.ticks[name] = self.now

    def tombstones(self) -> list[Record]:
        return [record for _, records in self.files.values() for record in records if record.kind != Kind.BLOCK]

    def buried_space(self, space: bytes) -> int:
        found = [each.before for each in self.tombstones() if (each.kind, each.key) == (Kind.FORGET_NAMESPACE, space)]
        return max(found, default=0)

    def buried(self, name: tuple[bytes, bytes]) -> int:
        found = [each.before for each in self.tombstones() if (each.fingerprint, each.key) == name]
        return max([self.buried_space(name[0]), *found])

    def bury(self, kind: Kind, space: bytes, key: bytes, before: int) -> None:
        segment = self.index.open
        assert segment is not None
        record = self.index.place(kind, space, key, b"", 0, before)
        self.file(segment).append(record)
        self.index.commit(segment, record, self.now)

    @rule(space=spaces, key=keys)
    def forget(self, space: bytes, key: bytes) -> None:
        before = self.index.next_sequence()
        if self.open(0) is None:
            return
        assert self.index.drop(space, key) is (self.known.pop((space, key), None) is not None)
        self.bury(Kind.FORGET_KEY, space, key, before)

    @rule(space=spaces, sure=st.integers(0, 7))
    def forget_namespace(self, space: bytes, sure: int) -> None:
        before = self.index.next_sequence()
        if sure or self.open(0) is None:
            return
        gone = [name for name in self.known if name[0] == space]
        assert self.index.drop_namespace(space, before) == len(gone)
        for name in gone:
            del self.known[name]
        self.bury(Kind.FORGET_NAMESPACE, space, space, before)
        self.index.tidy(3)

    @rule(space=spaces, key=keys, seconds=st.integers(0, 5))
    def touch(self, space: bytes, key: bytes, seconds: int) -> None:
        self.now += seconds
        self.index.touch(space, [key], self.now)
        if (space, key) in self.known:
            self.ticks[space, key] = self.now

    @rule()
    def evict(self) -> None:
        """The victim is used longest ago on the whole; what is hot in it and fits is written again."""
        segment = self.index.victim()
        if segment is None:
            return
        sealed = [each for each in self.index.segments.values() if each.phase is Phase.SEALED and not each.pins]
        assert segment.warmth == min(each.warmth for each in sealed)
        segment.phase = Phase.LEAVING
        target = self.index.open
        tombstones = self.index.needed_tombstones(segment)
        if tombstones and (target is None or not all(target.fits(0) for _ in tombstones) or len(tombstones) > 2):
            segment.phase = Phase.SEALED
            return
        for tombstone in tombstones:
            if self.open(0) is None:
                segment.phase = Phase.SEALED
                return
            self.bury(Kind(tombstone.kind), tombstone.fingerprint, tombstone.key, tombstone.before)
        since = self.index.mean_tick()
        used = [record for record in self.index.live(segment) if segment.used[record.number] > since]
        hot = self.index.hot(segment, used, SEGMENT_BYTES // 2)
        mine = {n: self.ticks[n] for n, where in self.known.items() if where[0] == segment.life}
        assert all(mine[record.fingerprint, record.key] > since for record in hot)
        target = self.index.open
        for record in hot:
            if target is None or not target.fits(record.length):
                break
            new = self.index.place(Kind.BLOCK, record.fingerprint, record.key, b"", record.length)
            self.file(target).append(new)
            name = record.fingerprint, record.key
            assert self.index.commit(target, new, self.ticks[name])
            self.known[name] = (target.life, new.number)
        for name in [name for name, where in self.known.items() if where[0] == segment.life]:
            del self.known[name]
        self.index.leave(segment)
        self.index.retired(segment.number, spare=True)
        del self.files[segment.number]

    @rule(order=st.randoms(use_true_random=False), sure=st.integers(0, 3))
    def reopen(self, order: random.Random, sure: int) -> None:
        """The process dies with everything in it; a new index is told what is on disk, in any order of segments."""
        if sure:
            return
        self.under_way.clear()
        spares = dict(self.index.spares)
        self.index = DiskIndex(BUDGET, SEGMENT_BYTES)
        self.index.spares = spares
        numbers = list(self.files)
        order.shuffle(numbers)
        segments = {n: self.index.recover(n, self.files[n][0], SEGMENT_BYTES) for n in numbers}
        for number in numbers:
            records = sorted(self.files[number][1], key=lambda record: record.number)
            for half in (records[: len(records) // 2], records[len(records) // 2 :]):
                self.index.recovered(segments[number], half)
                self.index.recovered(segments[number], half)
        self.index.end_recovery()
        acknowledged = self.known
        # What was written and never acknowledged may come to light; it is what it says it is.
        self.known = {}
        for life, records in self.files.values():
            for record in records:
                name, where = (record.fingerprint, record.key), (life, record.number)
                if record.kind == Kind.BLOCK and sequence(*where) >= self.buried(name):
                    self.known[name] = max(where, self.known.get(name, (0, 0)))
        assert all(self.known[name] >= where for name, where in acknowledged.items())
        self.ticks = dict.fromkeys(self.known, 0)

    @invariant()
    def index_is_sound(self) -> None:
        self.index.check()

    @invariant()
    def it_knows_what_the_model_knows(self) -> None:
        for space in SPACES:
            expected = [(space, key) in self.known for key in KEYS]
            assert self.index.contains(space, KEYS) == expected
            assert self.index.match(space, KEYS) == ([*expected, False]).index(False)
            for key in KEYS:
                found = self.index.find(space, key)
                where = (found[0].life, found[1].number) if found else None
                assert where == self.known.get((space, key))
                if found:
                    assert found[1] in [record._replace(parent=b"") for record in self.file(found[0])]

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.index.used_bytes <= BUDGET


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(
    max_examples=150,
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
