"""The protocol for arbitrary values: what is sent arrives, and nothing that is not sent right gets through."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpkv_client import wire
from hpkv_client.errors import BY_CODE, ProtocolError
from hpkv_client.types import KEY_BYTES, Layer, MemoryHandle, RankShard, Run
from hpkv_client.wire import MAX_INT, VERBS
from tests.golden import GOLDEN

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
numbers = st.integers(0, MAX_INT)
digests = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
keys = st.lists(digests, max_size=5).map(b"".join)
blocks = st.lists(st.integers(0, (1 << 32) - 1), max_size=5)
memfds = st.builds(
    MemoryHandle,
    kind=st.just("memfd"),
    size=st.integers(1, 1 << 50),
    pid=st.integers(0, 1 << 31),
    fd=st.integers(-1, 1 << 31),
    name=texts,
)
cuda_handles = st.builds(
    MemoryHandle,
    kind=st.just("cuda_ipc"),
    size=st.integers(1, 1 << 50),
    token=st.binary(max_size=100),
    offset=numbers,
    event=st.binary(max_size=100),
)
handles = memfds | cuda_handles


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Any run that moves something and stays in 2^40 canonical bytes."""
    fragment, count, step = draw(st.tuples(st.integers(1, 1 << 20), st.integers(1, 64), st.integers(0, 1 << 20)))
    local = draw(st.tuples(st.integers(0, 3), numbers, numbers, numbers))
    return Run(local[0], local[1], local[2], draw(st.integers(0, 1 << 20)), fragment, count, local[3], step)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """A layer that holds all of its runs, and no less than they move."""
    parts = tuple(draw(st.lists(runs(), min_size=1, max_size=3)))
    need = max(*(run.last_canonical_byte() for run in parts), sum(run.size for run in parts))
    return Layer(draw(texts), need + draw(st.integers(0, 1 << 20)), parts)


registrations = st.fixed_dictionaries(
    {
        "rank": st.integers(0, wire.MAX_RANKS - 1),
        "world": st.integers(1, wire.MAX_RANKS),
        "namespace": digests,
        "model": texts,
        "device": texts,
        "regions": st.lists(handles, min_size=1, max_size=3),
        "layers": st.lists(layers(), max_size=3),
        "blocks": st.integers(1, (1 << 32) - 1),
    },
    optional={
        "place": texts,
        "block_tokens": st.integers(0, 1 << 31),
        "control": st.none() | handles,
        "replicas": st.integers(1, wire.MAX_RANKS),
        "replica": st.integers(0, wire.MAX_RANKS - 1),
    },
)

_MOVES = {"job": numbers, "keys": keys, "blocks": blocks}
BODIES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "hello": st.fixed_dictionaries(
        {"major": st.integers(0, 1 << 31), "minor": st.integers(0, 1 << 31), "name": texts},
        optional={"instance": texts, "engine": texts, "pid": st.integers(0, 1 << 31)},
    ),
    "ping": st.fixed_dictionaries({}, optional={"echo": st.binary(max_size=100)}),
    "register": registrations,
    "match": st.fixed_dictionaries({"keys": keys}),
    "acquire": st.fixed_dictionaries({"keys": keys}),
    "contains": st.fixed_dictionaries({"keys": keys}),
    "release": st.fixed_dictionaries({"lease": numbers}),
    "load": st.fixed_dictionaries(
        {"job": numbers, "lease": numbers, "first": st.integers(0, wire.MAX_KEYS), "blocks": blocks}
    ),
    "store": st.fixed_dictionaries(_MOVES | {"parent": st.none() | digests}),
    "put": st.fixed_dictionaries(_MOVES),
    "get": st.fixed_dictionaries(_MOVES),
    "cancel": st.fixed_dictionaries({"job": numbers}),
    "clear": st.fixed_dictionaries({}, optional={"namespace": st.none() | digests}),
    "blocks": st.fixed_dictionaries({"namespace": digests}, optional={"after": numbers}),
    "set": st.fixed_dictionaries({"name": texts, "value": texts}),
}
requests = st.sampled_from(sorted(VERBS)).flatmap(
    lambda verb: st.tuples(st.just(verb), numbers, numbers, BODIES.get(verb, st.just({})))
)


def as_sent(verb: str, body: dict[str, Any]) -> dict[str, Any]:
    """A body of rich values as a client puts it on the wire."""
    sent = dict(body)
    if "blocks" in sent and verb != "register":
        sent["blocks"] = wire.pack_blocks(sent["blocks"])
    if "regions" in sent:
        sent["regions"] = [wire.handle_to_wire(handle) for handle in sent["regions"]]
        sent |= wire.shard_to_wire(RankShard(tuple(sent["layers"]), sent["blocks"]))
        sent |= {name: body[name] for name in ("replicas", "replica") if name in body}
    if sent.get("control"):
        sent["control"] = wire.handle_to_wire(sent["control"])
    return sent


@given(requests)
@patient
def test_every_request_arrives_as_it_was_meant(request: tuple[str, int, int, dict[str, Any]]) -> None:
    verb, number, session, body = request
    arrived = wire.decode_request(wire.encode_request(verb, number, session, as_sent(verb, body)))
    assert (arrived.verb, arrived.id, arrived.session) == (verb, number, session)
    assert set(arrived.body) == set(VERBS[verb])
    for name, value in body.items():
        got: Any = arrived.body[name]
        if name == "blocks" and verb != "register":
            got = list(wire.unpack_blocks(got))
        assert got == value, name


@given(requests, st.dictionaries(texts.map("x_".__add__), st.none() | numbers | texts | st.binary(max_size=9)))
@patient
def test_fields_that_nobody_knows_change_nothing(
    request: tuple[str, int, int, dict[str, Any]], extra: dict[str, Any]
) -> None:
    verb, number, session, body = request
    plain = wire.encode_request(verb, number, session, as_sent(verb, body))
    more = wire.encode_request(verb, number, session, extra | as_sent(verb, body))
    assert wire.decode_request(more) == wire.decode_request(plain)


@given(numbers, st.dictionaries(texts, numbers | texts | st.binary(max_size=9), max_size=5))
@patient
def test_every_reply_arrives(number: int, body: dict[str, Any]) -> None:
    assert wire.decode_reply(wire.encode_reply(number, body)) == (number, True, body)


@given(numbers, st.sampled_from(sorted(BY_CODE)), texts, texts)
@patient
def test_every_error_arrives(number: int, code: str, message: str, hint: str) -> None:
    reply = wire.decode_reply(wire.encode_error(number, BY_CODE[code](message, hint)))
    assert (reply.id, reply.ok) == (number, False)
    with pytest.raises(BY_CODE[code]) as caught:
        reply.result()
    assert (type(caught.value), caught.value.message, caught.value.hint) == (BY_CODE[code], message, hint)


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | texts | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts | st.binary(max_size=5), inner, max_size=5),
    max_leaves=20,
)


def refuse_or_read(frame: bytes) -> None:
    """A frame is read in full or refused with one kind of error that says which field is wrong."""
    try:
        request = wire.decode_request(frame)
    except ProtocolError:
        return
    assert set(request.body) == set(VERBS[request.verb])
    if request.verb == "register":
        try:
            shard = wire.shard_from_wire(request.body)
        except ProtocolError:
            return
        sizes = [handle.size for handle in request.body["regions"]]
        for layer in shard.layers:
            assert sum(run.size for run in layer.runs) <= layer.canonical_bytes
            for run in layer.runs:
                assert run.last_local_byte(shard.blocks) <= sizes[run.region]
                assert run.last_canonical_byte() <= layer.canonical_bytes


@given(st.binary(max_size=200))
@patient
def test_no_bytes_do_more_than_be_refused(frame: bytes) -> None:
    refuse_or_read(frame)
    wire.request_id_of(frame)


@given(st.lists(plain_values, min_size=3, max_size=5) | plain_values)
@patient
def test_no_value_does_more_than_be_refused(value: Any) -> None:
    frame = msgpack.packb(value, use_bin_type=True)
    refuse_or_read(frame)
    wire.request_id_of(frame)


@given(requests, st.data())
@patient
def test_a_field_of_any_other_value_is_refused_or_read(
    request: tuple[str, int, int, dict[str, Any]], data: st.DataObject
) -> None:
    verb, number, session, body = request
    sent = as_sent(verb, body)
    if sent:
        sent[data.draw(st.sampled_from(sorted(sent)))] = data.draw(plain_values)
    refuse_or_read(msgpack.packb([verb, number, session, sent], use_bin_type=True))


@given(st.sampled_from(sorted(GOLDEN)), st.data())
@patient
def test_a_golden_frame_with_a_changed_tail_is_refused_or_read(verb: str, data: st.DataObject) -> None:
    frame = bytes.fromhex(GOLDEN[verb])
    cut = data.draw(st.integers(0, len(frame)))
    refuse_or_read(frame[:cut] + data.draw(st.binary(max_size=8)) + frame[cut + data.draw(st.integers(0, 8)) :])


@pytest.mark.parametrize("verb", sorted(GOLDEN))
def test_no_beginning_of_a_frame_passes_for_all_of_it(verb: str) -> None:
    frame = bytes.fromhex(GOLDEN[verb])
    for length in range(len(frame)):
        with pytest.raises(ProtocolError):
            wire.decode_request(frame[:length])
    with pytest.raises(ProtocolError):
        wire.decode_request(frame + b"\x00")


@pytest.mark.parametrize("depth", [10, 500, 950, 1010, 5000, 1 << 20])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"])
def test_values_nested_too_deeply_are_refused(depth: int, opening: bytes) -> None:
    nested = opening * depth + b"\xc0"
    tail = b"\x01\x02\x80"
    for frame in (nested, b"\x94" + nested + tail, b"\x94\xa4ping\x01\x02\x81\xa4echo" + nested):
        with pytest.raises(ProtocolError):
            wire.decode_request(frame)
    ignored = b"\x94\xa4ping\x01\x02\x81\xa1x" + nested
    refuse_or_read(ignored)


@pytest.mark.parametrize("opening", ["dd7fffffff", "df7fffffff", "dbffffffff", "c6ffffffff", "c9ffffffff05"])
def test_a_length_that_is_only_claimed_costs_nothing(opening: str) -> None:
    claim = bytes.fromhex(opening)
    for frame in (claim, b"\x94" + claim, b"\x94\xa4ping\x01\x02\x81\xa4echo" + claim):
        with pytest.raises(ProtocolError):
            wire.decode_request(frame)


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=50))
@patient
def test_block_ids_survive(ids: list[int]) -> None:
    assert list(wire.unpack_blocks(wire.pack_blocks(ids))) == ids


def test_limits_hold_on_both_sides_of_each() -> None:
    def match(count: int) -> bytes:
        return wire.encode_request("match", 1, 1, {"keys": bytes(KEY_BYTES * count)})

    assert len(wire.decode_request(match(wire.MAX_KEYS)).body["keys"]) == KEY_BYTES * wire.MAX_KEYS
    with pytest.raises(ProtocolError, match="match: field keys must be at most 65536 records of 32 bytes"):
        wire.decode_request(match(wire.MAX_KEYS + 1))
    with pytest.raises(ProtocolError, match="records of 32 bytes"):
        wire.decode_request(wire.encode_request("match", 1, 1, {"keys": bytes(KEY_BYTES + 1)}))
    for value, good in ((0, True), (MAX_INT, True), (MAX_INT + 1, False), (-1, False), (True, False), (1.0, False)):
        frame = wire.encode_request("release", 1, 1, {"lease": value})
        if good:
            assert wire.decode_request(frame).body["lease"] == value
        else:
            with pytest.raises(ProtocolError, match="release: field lease must be an integer"):
                wire.decode_request(frame)
    largest = wire.encode_request(
        "store", 1, 1, {"job": 1, "parent": None, "keys": bytes(KEY_BYTES << 16), "blocks": bytes(4 << 16)}
    )
    assert len(largest) < wire.MAX_FRAME
    assert wire.decode_request(largest).verb == "store"


@pytest.mark.parametrize("number", [-1, MAX_INT + 1, (1 << 64) - 1, True, 1.0])
def test_no_request_is_read_whose_id_could_not_be_read(number: Any) -> None:
    frame = msgpack.packb(["heartbeat", number, 1, {}])
    assert wire.request_id_of(frame) is None
    with pytest.raises(ProtocolError, match="id and session must be positive integers up to"):
        wire.decode_request(frame)
    with pytest.raises(ProtocolError, match="id and session must be positive integers up to"):
        wire.decode_request(msgpack.packb(["heartbeat", 1, number, {}]))


def test_a_long_frame_of_nothing_but_empty_parts_is_refused_half_read() -> None:
    inner = b"\xdd\x00\x01\x00\x00" + b"\x90" * 65536
    frame = b"\xdc\x00\x3f" + inner * 63
    assert len(frame) < wire.MAX_FRAME
    with pytest.raises(ProtocolError, match="not one msgpack value"):
        wire.decode_request(frame)


@given(st.sampled_from(["memfd", "cuda_ipc"]), st.data())
@patient
def test_a_handle_survives_and_says_no_more_than_its_kind(kind: str, data: st.DataObject) -> None:
    handle = data.draw(memfds if kind == "memfd" else cuda_handles)
    sent = wire.handle_to_wire(handle)
    wanted = {"kind", "size", *(("pid", "fd", "name") if kind == "memfd" else ("token", "offset", "event"))}
    assert set(sent) == wanted


def test_an_error_text_of_any_size_and_any_verb_stays_short() -> None:
    for verb in ("x" * 100_000, "\n\x00", "🙂" * 100):
        with pytest.raises(ProtocolError) as caught:
            wire.decode_request(msgpack.packb([verb, 1, 1, {}]))
        assert len(str(caught.value)) < 500
        assert "\n" not in str(caught.value)
    for verb in (7, None, b"ping", ["ping"], {"ping": 1}):
        with pytest.raises(ProtocolError, match="the verb must be text"):
            wire.decode_request(msgpack.packb([verb, 1, 1, {}]))
