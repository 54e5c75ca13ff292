"""What the remote tier decides without any store: formats, searches, patience."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkv_client.types import typed_digest
from hpkv_daemon.tiers.remote.format import (
    HEADER_BYTES,
    BadObject,
    Sealing,
    check_object,
    object_name,
    pack_header,
    parse_name,
)
from hpkv_daemon.tiers.remote.patience import LAST_RETRY_SECONDS, Breaker, Throttle
from hpkv_daemon.tiers.remote.presence import ABSENT_SECONDS, FANOUT, HERE_SECONDS, ChainSearch, Presence

SPACE, KEY = typed_digest("space"), typed_digest("key")


def names(count: int) -> list[bytes]:
    return [typed_digest("key", number) for number in range(count)]


@given(payload=st.binary(min_size=1, max_size=200), at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_bit_that_is_flipped_is_noticed(payload: bytes, at: int, bit: int) -> None:
    whole = bytearray(pack_header(SPACE, KEY, len(payload), payload) + payload)
    assert check_object(SPACE, KEY, len(payload), whole[:HEADER_BYTES], whole[HEADER_BYTES:]) is None
    whole[at % len(whole)] ^= 1 << bit
    with pytest.raises(BadObject):
        check_object(SPACE, KEY, len(payload), whole[:HEADER_BYTES], whole[HEADER_BYTES:])


def test_an_object_counts_only_as_what_it_was_written_as() -> None:
    payload = b"payload"
    header = pack_header(SPACE, KEY, 7, payload)
    other = typed_digest("other")
    for wanted in ((other, KEY, 7), (SPACE, other, 7), (SPACE, KEY, 6)):
        with pytest.raises(BadObject):
            check_object(*wanted, header, payload)
    with pytest.raises(BadObject, match="not encrypted"):
        check_object(SPACE, KEY, 7, header, payload, b"12345678")
    sealed = pack_header(SPACE, KEY, 7, payload + bytes(16), Sealing(b"12345678", bytes(12)))
    assert check_object(SPACE, KEY, 7, sealed, payload + bytes(16), b"12345678") == Sealing(b"12345678", bytes(12))
    for key_id in (b"", b"87654321"):
        with pytest.raises(BadObject, match="another key"):
            check_object(SPACE, KEY, 7, sealed, payload + bytes(16), key_id)


def test_names_say_what_an_object_is() -> None:
    assert parse_name(object_name(SPACE, KEY)) == (SPACE, KEY)
    assert parse_name(object_name(SPACE, KEY, b"12345678")) == (SPACE, KEY)
    assert object_name(SPACE, KEY) != object_name(SPACE, KEY, b"12345678")
    for foreign in ("", "a/b", f"hpkv2/{SPACE.hex()}/aa/{KEY.hex()}", f"hpkv1/{SPACE.hex()}/zz/{KEY.hex()}"):
        assert parse_name(foreign) is None


@given(length=st.integers(1, 3000), here=st.integers(0, 3000), known=st.integers(0, 100))
def test_a_search_finds_the_end_of_any_chain_in_a_few_rounds(length: int, here: int, known: int) -> None:
    here = min(here, length)
    search = ChainSearch(names(0) + [b""] * length, min(known, here))
    rounds = 0
    while questions := search.questions():
        assert len(questions) <= FANOUT
        rounds += 1
        search.answer({index: index < here for index in questions})
    assert search.presumed() == here
    assert rounds <= 4


@given(there=st.lists(st.booleans(), min_size=1, max_size=200))
def test_a_search_over_a_chain_with_holes_ends_before_something_that_is_absent(there: list[bool]) -> None:
    search = ChainSearch([b""] * len(there))
    while questions := search.questions():
        search.answer({index: there[index] for index in questions})
    found = search.presumed()
    assert found == len(there) or not there[found]
    assert there[0] or found == 0


def test_what_is_known_is_forgotten_in_time() -> None:
    presence, (a, b) = Presence(), names(2)
    presence.learn(SPACE, a, True, 100)
    presence.learn(SPACE, b, False, 100)
    assert presence.match(SPACE, [a, b], 101) == 1
    assert presence.find(SPACE, b, 101) is False
    assert presence.find(SPACE, b, 100 + ABSENT_SECONDS) is None
    assert presence.find(SPACE, a, 100 + HERE_SECONDS) is None
    assert presence.find(typed_digest("other"), a, 101) is None


def test_no_more_is_remembered_than_there_is_room_for() -> None:
    presence, keys = Presence(10), names(50)
    for key in keys:
        presence.learn(SPACE, key, True, 1)
    assert len(presence) == 10
    assert [presence.find(SPACE, key, 2) for key in keys[-10:]] == [True] * 10


def test_a_breaker_lets_one_try_through_after_each_delay() -> None:
    breaker, now, tries = Breaker(), 0.0, []
    assert not breaker.is_open(now)
    breaker.fail("broken", now)
    while now < 400:
        now += 0.25
        if breaker.due(now):
            assert not breaker.due(now)
            tries.append(now)
            breaker.fail("broken", now)
    gaps = [later - earlier for earlier, later in zip([0.0, *tries], tries, strict=False)]
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1]) == (1, LAST_RETRY_SECONDS)
    breaker.succeed()
    assert not breaker.reason
    assert not breaker.is_open(now)


def test_a_throttle_keeps_to_its_rate_after_a_burst() -> None:
    throttle, now, sent = Throttle(1000), 0.0, 0
    while now < 100:
        while throttle.is_open(now):
            throttle.take(100, now)
            sent += 100
        now += 0.25
    assert 99_000 <= sent <= 101_000
    free = Throttle(0)
    free.take(1 << 40, 0)
    assert free.is_open(0)
