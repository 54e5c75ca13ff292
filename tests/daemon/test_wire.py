"""What travels: golden bytes of every verb, and how a daemon of this protocol meets other ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from hpkv_client import errors, wire
from hpkv_client.errors import (
    HpkvError,
    LeaseLost,
    NotRegistered,
    ProtocolError,
    UnknownSession,
    UsageError,
    VersionMismatch,
)
from hpkv_client.transport import Channel, endpoint
from hpkv_client.types import MemoryHandle, RankShard, Run
from hpkv_client.wire import PROTOCOL, VERBS
from tests.golden import BODIES, GOLDEN, KEY, REQUEST_ID, SESSION
from tests.support import ANSWER_SECONDS, Observed, Rank, hashes, observed_daemon, plain_shard


@pytest.fixture(scope="module")
def shared() -> Iterator[Observed]:
    """The daemon of this module; it has a name."""
    with observed_daemon(HPKV_INSTANCE="blue") as observed:
        yield observed


@pytest.fixture
def live(shared: Observed) -> Iterator[Observed]:
    """The shared daemon, proven clean afterwards."""
    yield shared
    shared.assert_sound()


# -- golden bytes -------------------------------------------------------------------------------------------


def test_every_verb_has_golden_bytes_of_this_version() -> None:
    assert (PROTOCOL, wire.version_text()) == ((1, 2), "hpkv/1.2")
    assert set(GOLDEN) == set(BODIES) == set(VERBS)


@pytest.mark.parametrize("verb", GOLDEN)
def test_a_request_is_these_bytes(verb: str) -> None:
    frame = bytes.fromhex(GOLDEN[verb])
    assert wire.encode_request(verb, REQUEST_ID, SESSION, BODIES[verb]) == frame
    request = wire.decode_request(frame)
    assert (request.verb, request.id, request.session) == (verb, REQUEST_ID, SESSION)
    assert set(request.body) == set(VERBS[verb])


@pytest.mark.parametrize(
    "handle",
    [
        MemoryHandle("memfd", 8192, pid=7, fd=3, name="hpkv-a"),
        MemoryHandle("cuda_ipc", 9, token=b"t", offset=5, event=b"e"),
        MemoryHandle("cuda_fd", 9, pid=7, name="n", offset=5),
    ],
)
def test_every_kind_of_handle_arrives_as_it_was_sent(handle: MemoryHandle) -> None:
    body = wire.decode_request(bytes.fromhex(GOLDEN["register"])).body
    sent = {name: body[name] for name in ("rank", "world", "namespace", "model", "device", "blocks")}
    sent |= {"layers": [], "regions": [wire.handle_to_wire(handle)]}
    assert wire.decode_request(wire.encode_request("register", 1, 1, sent)).body["regions"] == [handle]


def test_what_a_register_says_is_read_as_it_was_meant() -> None:
    body = wire.decode_request(bytes.fromhex(GOLDEN["register"])).body
    assert body["regions"] == [
        MemoryHandle("memfd", 8192, pid=7, fd=3, name="hpkv-a"),
        MemoryHandle("cuda_ipc", 9, fd=-1, token=b"t", offset=5, event=b"e"),
    ]
    assert body["control"] == MemoryHandle("memfd", 4096, pid=7, fd=4, name="hpkv-b")
    run = Run(
        region=0,
        local_offset=16,
        block_stride=64,
        canonical_offset=8,
        fragment=4,
        count=3,
        local_step=8,
        canonical_step=16,
    )
    shard = wire.shard_from_wire(body)
    assert (shard.layers[0].name, shard.layers[0].canonical_bytes, shard.layers[0].runs) == (
        "l.0",
        48,
        (run,),
    )
    assert (shard.blocks, shard.replicas, shard.replica) == (2, 2, 1)


def test_fields_that_may_be_missing_have_these_values() -> None:
    shard = RankShard(wire.shard_from_wire(wire.decode_request(bytes.fromhex(GOLDEN["register"])).body).layers, 2)
    needed = {name: BODIES["register"][name] for name in ("rank", "world", "namespace", "model", "device")}
    parts = {name: BODIES["register"][name] for name in ("regions", "layers", "blocks")}
    body = wire.decode_request(wire.encode_request("register", 1, 1, needed | parts)).body
    assert (body["place"], body["block_tokens"], body["control"]) == ("", 0, None)
    assert wire.shard_from_wire(body) == shard
    hello = wire.decode_request(wire.encode_request("hello", 1, 0, {"major": 1, "minor": 0, "name": "n"}))
    assert (hello.body["instance"], hello.body["engine"], hello.body["pid"]) == ("", "", 0)
    assert wire.decode_request(wire.encode_request("ping", 1, 0, {})).body == {"echo": b""}
    assert wire.decode_request(wire.encode_request("clear", 1, 0, {})).body == {"namespace": None}


def test_replies_are_these_bytes() -> None:
    frame = bytes.fromhex("93cf00000010203040500082a368697402a56c6561736509")
    assert wire.encode_reply(REQUEST_ID, {"hit": 2, "lease": 9}) == frame
    assert wire.decode_reply(frame) == (REQUEST_ID, True, {"hit": 2, "lease": 9})


def test_errors_are_these_bytes() -> None:
    frame = bytes.fromhex("93050183a4636f6465a56c65617365a76d657373616765a4676f6e65a468696e74ab6d6174636820616761696e")
    assert wire.encode_error(5, LeaseLost("gone", "match again")) == frame
    with pytest.raises(LeaseLost, match="gone; match again"):
        wire.decode_reply(frame).result()


def test_the_codes_of_errors_are_these() -> None:
    codes = {
        "failed": "HpkvError",
        "usage": "UsageError",
        "not_running": "NotRunning",
        "unreachable": "Unreachable",
        "busy": "Busy",
        "permission": "NotPermitted",
        "config": "ConfigError",
        "protocol": "ProtocolError",
        "version": "VersionMismatch",
        "unknown_session": "UnknownSession",
        "not_registered": "NotRegistered",
        "layout": "LayoutRefused",
        "device": "NoSuchDevice",
        "lease": "LeaseLost",
        "copy": "CopyFailed",
    }
    assert {code: kind.__name__ for code, kind in errors.BY_CODE.items()} == codes
    for code, kind in errors.BY_CODE.items():
        again = wire.decode_reply(wire.encode_error(1, kind("what", "how")))
        with pytest.raises(HpkvError) as caught:
            again.result()
        assert (type(caught.value), caught.value.code, str(caught.value)) == (kind, code, "what; how")


def test_the_error_of_a_newer_daemon_is_still_an_error() -> None:
    frame = msgpack.packb([7, 1, {"code": "from-the-future", "message": "what", "hint": "how", "more": 1}])
    with pytest.raises(HpkvError, match="what; how"):
        wire.decode_reply(frame).result()


# -- what a live daemon answers ------------------------------------------------------------------------------

REPLIES = {
    "hello": {"session", "epoch", "major", "minor", "pid", "heartbeat_seconds", "lease_seconds"},
    "register": {"ready"},
    "heartbeat": {"epoch", "ready", "problem", "descriptors"},
    "ping": {"pid", "epoch", "uptime_seconds", "version", "protocol", "instance", "echo"},
    "put": {"kept", "dropped", "partial"},
    "store": {"kept", "dropped", "partial"},
    "get": {"found"},
    "contains": {"found"},
    "match": {"hit", "lease", "coming"},
    "acquire": {"found", "lease", "coming"},
    "load": {"loaded"},
    "release": {"released"},
    "cancel": {"running"},
    "reset": {"cleared_blocks"},
    "check": {"ok", "blocks", "leases", "sessions", "engines", "loads", "stores"},
    "config": {"settings", "origins"},
    "explain": {"lookups", "other_namespaces"},
    "clear": {"cleared_blocks"},
    "drain": {"over", "problem", "slots", "left_slots", "queued_blocks", "written_blocks"},
    "import": {"over", "problem", "imported_blocks", "known_blocks", "bad_blocks", "skipped_blocks"},
    "scrub": {"over", "segments", "done_segments", "good_blocks", "bad_blocks"},
    "info": {
        "pid",
        "epoch",
        "version",
        "instance",
        "uptime_seconds",
        "socket",
        "metrics",
        "events",
        "pool",
        "namespaces",
        "quotas",
        "engines",
        "sessions",
        "leases",
        "movers",
        "storage",
        "remote",
    },
    "stats": None,
    "leases": {"leases"},
    "hot": {"prefixes"},
    "blocks": {"keys", "parents", "after", "model", "block_bytes", "block_tokens", "fields"},
    "pins": {"pins", "pinned_bytes", "limit_bytes"},
    "pin": {"pins"},
    "unpin": {"unpinned"},
    "events": {"latest", "lost", "events"},
    "set": {"name", "before", "now"},
    "reload": {"changed", "needs_restart"},
    "unregister": set(),
    "bye": set(),
}


def test_every_verb_is_answered_with_these_fields(live: Observed) -> None:
    assert set(REPLIES) == set(VERBS)
    rank = Rank(live.socket, plain_shard(4096, 2))
    lease = 0

    def body(verb: str) -> dict[str, Any]:
        keys = rank.keys(hashes("one"))
        blocks = wire.pack_blocks([0])
        job = rank.next_job()
        return {
            "hello": {"major": PROTOCOL[0], "minor": PROTOCOL[1], "name": "n", "engine": "e"},
            "register": rank.registration(),
            "ping": {"echo": b"abc"},
            "put": {"job": job, "keys": keys, "blocks": blocks},
            "get": {"job": job, "keys": keys, "blocks": blocks},
            "store": {"job": job, "parent": None, "keys": keys, "blocks": blocks},
            "contains": {"keys": keys},
            "match": {"keys": keys, "request": "r"},
            "acquire": {"keys": keys},
            "load": {"job": job, "lease": lease, "first": 0, "blocks": blocks},
            "release": {"lease": lease},
            "cancel": {"job": job},
            "blocks": {
                "namespace": bytes.fromhex(live.ask("info")["namespaces"][0]["id"]) if verb == "blocks" else b""
            },
            "pin": {"request": "r"},
            "set": {"name": "log_level", "value": "info"},
        }.get(verb, {})

    for verb, fields in REPLIES.items():
        if verb == "pin":
            # What came before has cleared the cache.
            rank.store(hashes("one"), [0])
            rank.call("match", **body("match"))
        answer = rank.call(verb, **body(verb))
        if fields is not None:
            assert set(answer) == fields, verb
        if verb == "hello":
            rank.channel.session = answer["session"]
        elif verb == "heartbeat":
            rank.ready()
        elif verb in ("match", "acquire"):
            rank.call("release", lease=lease)
            lease = answer["lease"]
        elif verb == "stats":
            assert all(type(value) in (int, float) for value in answer.values())
    rank.drop()


def raw_exchange(live: Observed, *frames: bytes) -> bytes | None:
    """Send one message as it is; the frame that comes back within half a second."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint(live.socket))
        socket.send_multipart(frames)
        return socket.recv() if socket.poll(500) else None


def test_bytes_in_bytes_out(live: Observed) -> None:
    frame = raw_exchange(live, bytes.fromhex(GOLDEN["heartbeat"]))
    unknown = UnknownSession("unknown session", "say hello again")
    assert frame == wire.encode_error(REQUEST_ID, unknown)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("clear", "hello")])
def test_fields_of_a_newer_minor_version_are_ignored(live: Observed, verb: str) -> None:
    old = bytes.fromhex(GOLDEN[verb])
    new = wire.encode_request(verb, REQUEST_ID, SESSION, BODIES[verb] | {"hpkv_1_1": [1, {"a": b"b"}]})
    assert wire.decode_request(new) == wire.decode_request(old)
    replies = [wire.decode_reply(raw_exchange(live, frame) or b"") for frame in (old, new)]
    assert replies[0].ok == replies[1].ok
    assert replies[0].body.keys() == replies[1].body.keys()
    if not replies[0].ok:
        assert replies[0].body == replies[1].body


def hello(live: Observed, **changes: Any) -> dict[str, Any]:
    """The answer to a hello that differs from a right one in some fields."""
    channel = Channel(live.socket)
    try:
        body = {"major": PROTOCOL[0], "minor": PROTOCOL[1], "name": "test"} | changes
        answer = channel.call("hello", body, ANSWER_SECONDS)
        channel.session = answer["session"]
        channel.call("bye", {}, ANSWER_SECONDS)
        return answer
    finally:
        channel.close()


@pytest.mark.parametrize("major", [PROTOCOL[0] - 1, PROTOCOL[0] + 1])
def test_another_major_version_is_refused_and_both_are_named(live: Observed, major: int) -> None:
    with pytest.raises(VersionMismatch) as caught:
        hello(live, major=major, minor=7, anything=[1, 2])
    assert f"hpkv/{major}.7" in caught.value.message
    assert wire.version_text() in caught.value.message
    assert "same HPKV release" in caught.value.hint


@pytest.mark.parametrize("minor", [0, PROTOCOL[1] + 1, 99])
def test_another_minor_version_is_welcome(live: Observed, minor: int) -> None:
    answer = hello(live, minor=minor)
    assert (answer["major"], answer["minor"]) == PROTOCOL


def test_a_client_of_another_instance_is_sent_away(live: Observed) -> None:
    assert hello(live, instance="blue")["epoch"]
    assert hello(live, instance="")["epoch"]
    with pytest.raises(UsageError, match="instance 'blue', not 'green'"):
        hello(live, instance="green")


@pytest.mark.parametrize("verb", ["match", "acquire", "contains", "load", "get", "store", "put", "cancel", "reset"])
def test_blocks_before_registration_are_one_clear_error(live: Observed, verb: str) -> None:
    for engine in ("engine", ""):
        with Rank(live.socket, plain_shard(4096, 1)).hello(engine=engine) as rank:
            said = live.handle.text()
            for _ in range(20):
                with pytest.raises(NotRegistered, match="register first"):
                    rank.call(verb, **BODIES[verb])
            assert live.handle.text() == said, "a refusal is the client's news, not the log's"


def test_an_incomplete_engine_says_that_it_is_not_ready(live: Observed) -> None:
    with (
        Rank(live.socket, plain_shard(4096, 1), world=2).register() as rank,
        pytest.raises(NotRegistered, match="not ready: not all of its ranks"),
    ):
        rank.call("match", keys=KEY)


def test_verbs_of_sessions_need_one(live: Observed) -> None:
    rank = Rank(live.socket, plain_shard(4096, 1))
    for verb in ("bye", "heartbeat", "register", "unregister", "release", *sorted({"match", "put", "reset"})):
        for token in (0, SESSION):
            rank.channel.session = token
            with pytest.raises(UnknownSession):
                rank.call(verb, **BODIES[verb])
    rank.drop()


def test_a_peer_that_is_no_daemon_is_recognised(live: Observed) -> None:
    for frame in (b"", b"HTTP/1.1 400\r\n", msgpack.packb([1, 2, {}]), msgpack.packb([1, 0, []])):
        with pytest.raises(ProtocolError):
            wire.decode_reply(frame)
    assert raw_exchange(live, b"") is None
