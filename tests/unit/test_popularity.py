"""Which prefixes are used most, within bounded memory."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hpkv_daemon.core.popularity import Popularity


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30)), max_size=300), st.integers(2, 16))
def test_counts_are_exact_while_there_is_room_and_never_too_high(uses: list[tuple[int, int]], room: int) -> None:
    found, exact = Popularity(room), Counter[tuple[int, bytes]]()
    for namespace, number in uses:
        found.used(namespace, bytes([number]))
        exact[namespace, bytes([number])] += 1
        assert len(found) <= room
    for namespace, key, count in found.most(room):
        assert 0 < count <= exact[namespace, key]
        assert len(exact) > room or count == exact[namespace, key]
    counts = [count for *_, count in found.most(room)]
    assert counts == sorted(counts, reverse=True)
    assert len(found.most(1)) == bool(uses)


def test_what_is_used_again_and_again_stays_among_many_that_are_not() -> None:
    found = Popularity(64)
    for number in range(10_000):
        found.used(0, number.to_bytes(4, "big"))
        found.used(0, b"hot")
    assert found.most(1)[0][1] == b"hot"


def test_of_many_that_are_used_much_the_half_that_is_used_more_stays_with_half_its_counts() -> None:
    found = Popularity(8)
    for number in range(9):
        for _ in range(5 + 10 * number):
            found.used(0, bytes([number]))
    assert [(key[0], uses) for _, key, uses in found.most(8)] == [(8, 85), (7, 37), (6, 32), (5, 27), (4, 22)]


def test_of_those_used_equally_often_the_ones_seen_last_stay() -> None:
    found = Popularity(4)
    for number in range(5):
        found.used(0, bytes([number]))
    assert sorted(key[0] for _, key, _ in found.most(8)) == [2, 3, 4]
