"""The disk tier's index: what it costs, and what it keeps."""

from __future__ import annotations

import gc
import os
import struct
import time

import pytest

from hpkv_client.types import Keys, typed_digest
from hpkv_daemon.tiers.disk.format import PAGE, Kind, Record
from hpkv_daemon.tiers.disk.index import DiskIndex
from hpkv_daemon.tiers.disk.table import Phase
from tests.support import resident_memory

SPACE = typed_digest("space")
SEGMENT_BYTES = 64 << 20
MILLION = 1_000_000


def key(number: int) -> bytes:
    """Cheap, and spread like a digest."""
    return struct.pack("<QQQQ", number * 0x9E3779B97F4A7C15 % (1 << 64), number, 7, 9)


def filled(blocks: int, length: int = PAGE) -> DiskIndex:
    """An index that knows so many blocks, in sealed segments."""
    index = DiskIndex(1 << 40, SEGMENT_BYTES)
    index.end_recovery()
    segment = index.begin(0)
    for number in range(blocks):
        if not segment.fits(length):
            index.seal()
            segment = index.begin(len(index.segments))
        record = index.place(Kind.BLOCK, SPACE, key(number), b"", length)
        index.commit(segment, record, 1)
    index.seal()
    return index


@pytest.fixture(scope="module")
def large() -> tuple[DiskIndex, int]:
    """A million blocks, and the memory they take."""
    gc.collect()
    before = resident_memory(os.getpid())
    index = filled(MILLION)
    return index, resident_memory(os.getpid()) - before


def test_a_block_costs_at_most_200_bytes_all_told(large: tuple[DiskIndex, int]) -> None:
    index, taken = large
    assert index.blocks == MILLION
    assert 100 < taken / MILLION < 200


def test_the_garbage_collector_walks_none_of_it() -> None:
    gc.collect()
    before = len(gc.get_objects())
    index = filled(50_000)
    gc.collect()
    assert len(gc.get_objects()) - before < 12 * len(index.segments)
    assert len(index.segments) < 20


def test_look_ups_in_a_million_blocks_are_about_as_fast_as_in_a_thousand(large: tuple[DiskIndex, int]) -> None:
    """Of keys that were looked up a moment ago: how long memory takes that no cache holds is not the index's doing."""
    small, (big, _) = filled(1000), large
    prompts = range(4)
    wanted = {
        small: [Keys.of([key((prompt * 250 + i) % 1000) for i in range(256)]) for prompt in prompts],
        big: [Keys.of([key(prompt * 240_000 + i) for i in range(256)]) for prompt in prompts],
    }

    def seconds(index: DiskIndex) -> float:
        started = time.perf_counter()
        for keys in wanted[index]:
            assert index.match(SPACE, keys) == 256
        return time.perf_counter() - started

    assert min(seconds(big) for _ in range(200)) < 2 * min(seconds(small) for _ in range(200))


def test_a_budget_below_three_segments_is_refused() -> None:
    DiskIndex(3 * SEGMENT_BYTES, SEGMENT_BYTES)
    with pytest.raises(ValueError, match="do not hold 3 segments"):
        DiskIndex(3 * SEGMENT_BYTES - 1, SEGMENT_BYTES)


def test_one_hot_block_does_not_keep_its_segment_but_is_named_for_reinsertion() -> None:
    index = filled(3 * 2000, length=7 * PAGE)
    oldest = min(index.segments.values(), key=lambda segment: segment.life)
    for segment in index.segments.values():
        if segment is not oldest:
            index.touch(SPACE, [record.key for record in index.live(segment)], 10)
    hot = index.live(oldest)[3]
    index.touch(SPACE, [hot.key], 1000)
    assert index.victim() is oldest
    since = index.mean_tick()
    assert [record for record in index.live(oldest) if oldest.used[record.number] > since] == [hot]


def test_the_hottest_are_named_first_when_not_all_may_stay() -> None:
    index = filled(4000, length=7 * PAGE)
    segment = index.segments[0]
    records = index.live(segment)
    for tick, record in enumerate(records, 100):
        index.touch(SPACE, [record.key], tick)
    chosen = index.hot(segment, records, 10 * 8 * PAGE)
    assert chosen == records[-10:]


def test_a_pinned_segment_is_no_victim() -> None:
    index = filled(2 * 2000, length=7 * PAGE)
    first = index.victim()
    assert first is not None
    first.pins += 1
    assert index.victim() is not first


def test_a_block_that_is_on_its_way_while_its_namespace_is_forgotten_does_not_appear() -> None:
    index = DiskIndex(4 * SEGMENT_BYTES, SEGMENT_BYTES)
    segment = index.begin(0)
    record = index.place(Kind.BLOCK, SPACE, key(1), b"", 100)
    index.drop_namespace(SPACE, index.next_sequence())
    assert not index.commit(segment, record, 1)
    again = index.place(Kind.BLOCK, SPACE, key(1), b"", 100)
    assert index.commit(segment, again, 1)


def test_a_tombstone_is_needed_as_long_as_an_older_segment_is_there() -> None:
    index = DiskIndex(4 * SEGMENT_BYTES, SEGMENT_BYTES)
    index.begin(0)
    index.seal()
    newer = index.begin(1)
    tombstone = index.place(Kind.FORGET_NAMESPACE, SPACE, SPACE, b"", 0, index.next_sequence())
    index.commit(newer, tombstone, 1)
    index.seal()
    index.begin(2)
    assert index.needed_tombstones(newer) == [tombstone]
    index.segments[0].phase = Phase.LEAVING
    index.leave(index.segments[0])
    assert index.needed_tombstones(newer) == [tombstone]
    index.retired(0, spare=True)
    assert index.needed_tombstones(newer) == []


def test_blocks_of_one_namespace_have_one_length() -> None:
    index = DiskIndex(4 * SEGMENT_BYTES, SEGMENT_BYTES)
    segment = index.begin(0)
    assert index.commit(segment, index.place(Kind.BLOCK, SPACE, key(1), b"", 100), 1)
    assert not index.commit(segment, index.place(Kind.BLOCK, SPACE, key(2), b"", 200), 1)
    assert index.length(SPACE) == 100


def test_what_is_told_twice_by_recovery_counts_once() -> None:
    index = DiskIndex(4 * SEGMENT_BYTES, SEGMENT_BYTES)
    segment = index.recover(0, 5, SEGMENT_BYTES)
    records = [Record(Kind.BLOCK, n, (1 + 2 * n) * PAGE, SPACE, key(n), b"", 100, 0) for n in range(5)]
    index.recovered(segment, records[:3])
    index.recovered(segment, records)
    index.check()
    assert (index.blocks, segment.end, index.next_life) == (5, 11 * PAGE, 6)
