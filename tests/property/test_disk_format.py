"""The format of segments: what is written is read back; whatever is not in order is found out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpkv_daemon.tiers.disk import format as layout
from hpkv_daemon.tiers.disk.format import PAGE, BadFormat, Kind, Place, Record

NAMES = st.binary(min_size=32, max_size=32)
PLACES = st.builds(
    Place,
    identity=st.binary(min_size=16, max_size=16),
    segment=st.integers(0, (1 << 16) - 1),
    life=st.integers(1, (1 << 40) - 1),
    size=st.just(1 << 20),
)
RECORDS = st.builds(
    Record,
    kind=st.sampled_from(Kind),
    number=st.integers(0, layout.MAX_RECORD),
    offset=st.integers(1, 100).map(lambda page: page * PAGE),
    fingerprint=NAMES,
    key=NAMES,
    parent=st.just(b"") | NAMES,
    length=st.integers(0, 100_000),
    before=st.integers(0, (1 << 63) - 1),
)
PLACE = Place(b"i" * 16, 7, 3, 1 << 20)
RECORD = Record(Kind.BLOCK, 5, 8 * PAGE, b"f" * 32, b"k" * 32, b"p" * 32, 70_000, 0)
USED_BYTES = 300
"""Of a page that is otherwise zero."""


def flipped(page: bytes, bit: int) -> bytes:
    changed = bytearray(page)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(PLACES, st.booleans())
def test_a_segment_header_comes_back(place: Place, spare: bool) -> None:
    page = layout.pack_segment(place, spare)
    assert len(page) == PAGE
    assert layout.unpack_segment(page) == (place, spare)


@given(PLACES, RECORDS, st.binary(min_size=16, max_size=16))
def test_a_record_comes_back(place: Place, record: Record, digest: bytes) -> None:
    page = layout.pack_record(place, record, digest)
    assert len(page) == PAGE
    assert layout.unpack_record(place, record.offset, page) == (record, digest)


@given(PLACES, st.lists(RECORDS, max_size=40))
def test_a_footer_comes_back(place: Place, records: list[Record]) -> None:
    blob = layout.pack_footer(place, records)
    assert len(blob) == layout.footer_bytes(len(records))
    footer = layout.unpack_trailer(place, blob[-PAGE:])
    assert footer.offset == place.size - len(blob)
    assert layout.unpack_table(footer, blob[:-PAGE]) == records


@pytest.mark.parametrize("bits", [range(USED_BYTES * 8), range((PAGE - 20) * 8, PAGE * 8)], ids=["fields", "checksum"])
def test_no_flipped_bit_of_a_header_goes_unseen(bits: range) -> None:
    pages = {
        layout.pack_segment(PLACE): layout.unpack_segment,
        layout.pack_record(PLACE, RECORD, b"d" * 16): lambda page: layout.unpack_record(PLACE, RECORD.offset, page),
        layout.pack_footer(PLACE, [])[-PAGE:]: lambda page: layout.unpack_trailer(PLACE, page),
    }
    for page, unpack in pages.items():
        unpack(page)
        for bit in bits:
            with pytest.raises(BadFormat):
                unpack(flipped(page, bit))


@given(st.integers(0, PAGE * 8 - 1))
def test_nor_one_between_the_fields(bit: int) -> None:
    with pytest.raises(BadFormat):
        layout.unpack_record(PLACE, RECORD.offset, flipped(layout.pack_record(PLACE, RECORD, b"d" * 16), bit))


@settings(max_examples=300)
@given(st.integers(0), st.integers(1, 40))
def test_no_flipped_bit_of_a_table_goes_unseen(bit: int, count: int) -> None:
    blob = layout.pack_footer(PLACE, [RECORD._replace(number=number) for number in range(count)])
    footer = layout.unpack_trailer(PLACE, blob[-PAGE:])
    with pytest.raises(BadFormat):
        layout.unpack_table(footer, flipped(blob[:-PAGE], bit % ((len(blob) - PAGE) * 8)))


@pytest.mark.parametrize(
    "elsewhere",
    [
        Place(b"j" * 16, 7, 3, 1 << 20),
        Place(b"i" * 16, 8, 3, 1 << 20),
        Place(b"i" * 16, 7, 4, 1 << 20),
        Place(b"i" * 16, 7, 2, 1 << 20),
    ],
    ids=["directory", "segment", "later life", "earlier life"],
)
def test_a_record_is_of_one_place_only(elsewhere: Place) -> None:
    page = layout.pack_record(PLACE, RECORD, b"d" * 16)
    with pytest.raises(BadFormat):
        layout.unpack_record(elsewhere, RECORD.offset, page)
    with pytest.raises(BadFormat):
        layout.unpack_record(PLACE, RECORD.offset + PAGE, page)
    with pytest.raises(BadFormat):
        layout.unpack_trailer(elsewhere, layout.pack_footer(PLACE, [])[-PAGE:])


@given(st.integers(0, PAGE - 1))
def test_a_cut_header_is_no_header(length: int) -> None:
    page = layout.pack_record(PLACE, RECORD, b"d" * 16)
    with pytest.raises(BadFormat):
        layout.unpack_record(PLACE, RECORD.offset, page[:length])
    with pytest.raises(BadFormat):
        layout.unpack_record(PLACE, RECORD.offset, page[:length].ljust(PAGE, b"\0"))


def test_a_record_cannot_reach_beyond_its_segment() -> None:
    record = RECORD._replace(length=PLACE.size)
    with pytest.raises(BadFormat, match="longer"):
        layout.unpack_record(PLACE, record.offset, layout.pack_record(PLACE, record, b"d" * 16))


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.integers(0, layout.MAX_RECORD)), min_size=2))
def test_sequences_order_records_as_lives_do(pairs: list[tuple[int, int]]) -> None:
    assert sorted(pairs) == sorted(pairs, key=lambda pair: layout.sequence(*pair))
