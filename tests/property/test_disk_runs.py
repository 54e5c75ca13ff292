"""A prefix that lies together on the disk is found as one that is scattered: block by block."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from hpkv_client.types import Keys, typed_digest
from hpkv_daemon.tiers.disk.format import PAGE, Kind
from hpkv_daemon.tiers.disk.index import DiskIndex
from hpkv_daemon.tiers.disk.table import Phase

SEGMENT_BYTES = 128 * PAGE
SPACES = [typed_digest("space", number) for number in range(2)]
CHAIN = [typed_digest("key", number) for number in range(90)]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, 89), st.integers(1, 90)),
        st.tuples(st.just("drop"), st.integers(0, 1), st.integers(0, 89), st.integers(1, 3)),
        st.tuples(st.just("forget"), st.integers(0, 1), st.just(0), st.just(0)),
        st.tuples(st.just("evict"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=8,
)


def write(index: DiskIndex, space: bytes, key: bytes) -> None:
    if index.open is None or not index.open.fits(PAGE):
        if index.open is not None:
            index.seal()
        index.begin(index.free_number())
    segment = index.open
    assert segment is not None
    index.commit(segment, index.place(Kind.BLOCK, space, key, b"", PAGE), 1)


def apply(index: DiskIndex, step: tuple[str, int, int, int]) -> None:
    verb, number, first, count = step
    space, some = SPACES[number], CHAIN[first : first + count]
    if verb == "write":
        for key in some:
            write(index, space, key)
    elif verb == "drop":
        for key in some:
            index.drop(space, key)
    elif verb == "forget":
        index.drop_namespace(space, index.next_sequence())
    elif (segment := index.victim()) is not None:
        segment.phase = Phase.LEAVING
        index.leave(segment)
        index.retired(segment.number, spare=False)


@given(steps=steps, first=st.integers(0, 89), other=st.integers(0, 89), swapped=st.booleans())
def test_a_match_is_the_leading_blocks_that_are_there(
    steps: list[tuple[str, int, int, int]], first: int, other: int, swapped: bool
) -> None:
    index = DiskIndex(1 << 40, SEGMENT_BYTES)
    index.end_recovery()
    for step in [("write", 0, 0, 90), *steps]:
        apply(index, step)  # type: ignore[arg-type]
    asked = CHAIN[first:] + CHAIN[:first]
    if swapped:
        asked[other], asked[0] = asked[0], asked[other]
    for space in SPACES:
        there = list(takewhile(lambda pair: pair[1], zip(asked, index.contains(space, asked), strict=True)))
        assert index.match(space, asked) == len(there)
        assert index.match(space, Keys.of(asked)) == len(there)
    index.check()
