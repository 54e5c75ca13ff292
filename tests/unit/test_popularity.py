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
