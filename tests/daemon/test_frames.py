"""Hostile bytes on the socket: they change nothing, harm nobody else, and cost the daemon little."""

from __future__ import annotations

import os
import pickle
import random
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from hpkv_client import wire
from hpkv_client.client import BlockCache
from hpkv_client.errors import ProtocolError, Unreachable
from hpkv_client.transport import Channel, endpoint
from tests.golden import BODIES, GOLDEN, KEY
from tests.support import (
    ANSWER_SECONDS,
    Observed,
    Rank,
    Victim,
    content,
    hashes,
    observed_daemon,
    plain_shard,
    resident_memory,
    wait_until,
)

FRAMES = 100_000
LITTLE = 24 << 20
"""Bytes that the daemon's private memory may grow by, whatever it is sent."""


KEPT = {key: content(key, 4096) for key in hashes("a", "b", "c")}


@pytest.fixture(scope="module")
def shared() -> Iterator[Observed]:
    """The daemon of this module."""
    with observed_daemon() as observed:
        yield observed
        observed.assert_sound()


@pytest.fixture(scope="module")
def cache(shared: Observed) -> Iterator[BlockCache]:
    """A client that stored its blocks before the attacks."""
    with BlockCache("bystander", 4096, socket=shared.socket) as cache:
        assert cache.put(KEPT) == len(KEPT)
        yield cache


@pytest.fixture(scope="module")
def victim(shared: Observed) -> Iterator[Victim]:
    """A client that works all the time."""
    with Victim(shared.socket) as victim:
        wait_until(lambda: victim.rounds)
        yield victim


@pytest.fixture
def attacked(shared: Observed, cache: BlockCache, victim: Victim) -> Iterator[Observed]:
    """The shared daemon; whatever the test does to it, nothing may have changed at the end."""
    victim.check()
    resident = shared.stats()["pool_resident_blocks"]
    yield shared
    victim.check()
    assert cache.get(list(KEPT)) == list(KEPT.values())
    shared.settle(sessions=2, engines=2)
    assert shared.stats()["pool_resident_blocks"] == resident
    assert shared.stats()["internal_errors"] == 0
    assert "Traceback" not in shared.handle.text()


class Stranger:
    """A bare ZeroMQ socket to the daemon. ``close`` it."""

    def __init__(self, path: Path) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._events = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(endpoint(path))

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.disable_monitor()
        self._events.close()
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        """One message."""
        self.socket.send_multipart(frames)

    def cut_off(self, seconds: float = 5.0) -> bool:
        """Whether the daemon ends the connection within so long."""
        if not self._events.poll(round(seconds * 1000)):
            return False
        return bool(parse_monitor_message(self._events.recv_multipart())["event"] == zmq.EVENT_DISCONNECTED)

    def answers(self) -> bool:
        """Whether the daemon answers a ping on this socket; replies to anything else are passed over."""
        self.send(wire.encode_request("ping", 4711, 0, {}))
        deadline = time.monotonic() + ANSWER_SECONDS
        while self.socket.poll(max(0, round((deadline - time.monotonic()) * 1000))):
            if wire.decode_reply(self.socket.recv()).id == 4711:
                return True
        return False

    def refusal(self) -> str:
        """The error that comes next."""
        assert self.socket.poll(round(ANSWER_SECONDS * 1000))
        reply = wire.decode_reply(self.socket.recv())
        with pytest.raises(ProtocolError) as caught:
            reply.result()
        return caught.value.message


def packed(*values: Any) -> bytes:
    """A frame of a list of these values."""
    frame = msgpack.packb(list(values), use_bin_type=True)
    assert isinstance(frame, bytes)
    return frame


def without(verb: str, field: str) -> bytes:
    """A golden request that lacks a field."""
    return packed(verb, 1, 1, {name: value for name, value in BODIES[verb].items() if name != field})


def replaced(verb: str, **fields: Any) -> bytes:
    """A golden request with other values."""
    return packed(verb, 1, 1, BODIES[verb] | fields)


WRONG = {
    "verb unknown": (packed("steal", 1, 0, {}), "unknown verb 'steal'"),
    "verb of another case": (packed("PING", 1, 0, {}), "unknown verb 'PING'"),
    "verb is a number": (packed(7, 1, 0, {}), "verb must be text"),
    "verb is bytes": (packed(b"ping", 1, 0, {}), "verb must be text"),
    "verb is a list of everything": (packed([["ping"] * 60000], 1, 0, {}), "verb must be text"),
    "too short": (packed("ping", 1, 0), r"must be \[verb, id, session, body\]"),
    "too long": (packed("ping", 1, 0, {}, {}), r"must be \[verb, id, session, body\]"),
    "body is a list": (packed("ping", 1, 0, []), "body must be a map"),
    "session is text": (packed("ping", 1, "0", {}), "id and session must be positive"),
    "session is negative": (packed("ping", 1, -1, {}), "id and session must be positive"),
    "field missing": (without("store", "parent"), "store: field parent is missing"),
    "keys are a list": (replaced("match", keys=[KEY]), "match: field keys must be at most"),
    "keys are text": (replaced("match", keys="k" * 32), "match: field keys must be at most"),
    "keys cut short": (replaced("match", keys=KEY[:-1]), "match: field keys must be at most"),
    "keys too many": (replaced("match", keys=bytes(32 * 65537)), "match: field keys must be at most"),
    "parent too short": (replaced("store", parent=b"x"), "store: field parent must be exactly 32"),
    "job is a float": (replaced("cancel", job=1.5), "cancel: field job must be an integer"),
    "job is true": (replaced("cancel", job=True), "cancel: field job must be an integer"),
    "job too large": (replaced("cancel", job=1 << 63), "cancel: field job must be an integer"),
    "lease is null": (replaced("release", lease=None), "release: field lease must be an integer"),
    "echo too long": (replaced("ping", echo=bytes(1 << 17)), "ping: field echo must be at most"),
    "name too long": (replaced("hello", name="n" * 2000), "hello: field name must be text of at most"),
    "name is bytes": (replaced("hello", name=b"n"), "hello: field name must be text"),
    "no regions": (replaced("register", regions=[]), "register: field regions must be a list of 1"),
    "region of no size": (
        replaced("register", regions=[{"kind": "memfd", "size": 0}]),
        "register: field regions must be an integer from 1",
    ),
    "region of another kind": (
        replaced("register", regions=[{"kind": "file", "size": 1, "name": "/etc/passwd"}]),
        "kind must be memfd, cuda_ipc or cuda_fd",
    ),
    "run of nothing": (replaced("register", layers=[["l", 9, [[0] * 8]]]), "must move at least one byte"),
    "run too short": (replaced("register", layers=[["l", 9, [[0] * 7]]]), "a list of 8 integers"),
    "run out of its layer": (
        replaced("register", layers=[["l", 9, [[0, 0, 9, 5, 5, 1, 0, 0]]]]),
        "a run leaves its layer",
    ),
    "rank of 2^31": (replaced("register", rank=1 << 31), "register: field rank must be an integer"),
}
UNREADABLE = {
    "nothing": b"",
    "zero bytes": bytes(1000),
    "cut in the middle": bytes.fromhex(GOLDEN["register"])[:100],
    "two requests in one": bytes.fromhex(GOLDEN["ping"]) * 2,
    "a number": b"\x07",
    "text that is no utf-8": b"\x94\xa4\xff\xff\xff\xff\x01\x02\x80",
    "lists in lists": b"\x91" * 100_000,
    "maps in maps": b"\x81\xa1a" * 100_000,
    "lists as deep as msgpack goes": b"\x91" * 1020 + b"\xc0",
    "a list of 4 billion": bytes.fromhex("94a470696e670102ddffffffff"),
    "a map of 4 billion": bytes.fromhex("94a470696e670102dfffffffff"),
    "bytes of 4 GiB": bytes.fromhex("94a470696e67010281a46563686fc6ffffffff"),
    "an extension": bytes.fromhex("94a470696e67010281a46563686fc7ff05"),
    "keys that are lists": bytes.fromhex("94a470696e670102819100c0"),
    "http": b"GET / HTTP/1.1\r\nHost: hpkv\r\n\r\n",
    "json": b'["ping", 1, 0, {}]',
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_told_what_is_wrong(attacked: Observed, name: str) -> None:
    frame, message = WRONG[name]
    with Stranger(attacked.socket) as stranger:
        stranger.send(frame)
        assert re.search(message, stranger.refusal())
        assert stranger.answers()


def test_what_cannot_be_read_is_dropped(attacked: Observed) -> None:
    before = attacked.stats()["bad_requests"]
    with Stranger(attacked.socket) as stranger:
        for frame in UNREADABLE.values():
            stranger.send(frame)
        assert stranger.answers()
    assert attacked.stats()["bad_requests"] == before + len(UNREADABLE)


def test_messages_of_more_frames_are_dropped(attacked: Observed) -> None:
    before = attacked.stats()["bad_requests"]
    ping = wire.encode_request("ping", 1, 0, {})
    with Stranger(attacked.socket) as stranger:
        for frames in ((b"", ping), (ping, ping), (ping, b""), (b"x",) * 500):
            stranger.send(*frames)
        assert stranger.answers()
        assert not stranger.socket.poll(0)
    assert attacked.stats()["bad_requests"] == before + 4


@pytest.mark.parametrize("excess", [1, 1 << 20, 256 << 20], ids=["1 byte", "1 MiB", "256 MiB"])
def test_a_message_over_the_limit_ends_the_connection_and_takes_no_memory(attacked: Observed, excess: int) -> None:
    before = resident_memory(attacked.handle.pid)
    with Stranger(attacked.socket) as stranger:
        stranger.send(bytes(wire.MAX_FRAME + excess))
        assert stranger.cut_off()
    assert resident_memory(attacked.handle.pid) - before < LITTLE


def test_a_message_of_just_the_limit_is_read(attacked: Observed) -> None:
    with Stranger(attacked.socket) as stranger:
        stranger.send(bytes(wire.MAX_FRAME))
        assert not stranger.cut_off(0.2)
        assert stranger.answers()


def test_long_messages_of_tiny_parts_hold_nobody_up(attacked: Observed) -> None:
    before = resident_memory(attacked.handle.pid)
    parts = b"\xdc\x00\x3f" + (b"\xdd\x00\x01\x00\x00" + b"\x90" * 65536) * 63
    with Stranger(attacked.socket) as stranger:
        for _ in range(8):
            stranger.send(parts)
            started = time.monotonic()
            attacked.ask("ping")
            assert time.monotonic() - started < 5.0
        assert stranger.answers()
    assert resident_memory(attacked.handle.pid) - before < LITTLE


class _Payload:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self._path), "w")


def test_pickles_are_never_opened(attacked: Observed, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        payload = pickle.dumps(_Payload(target), protocol)
        with Stranger(attacked.socket) as stranger:
            stranger.send(payload)
            stranger.send(packed("ping", 1, 0, {"echo": payload}))
            stranger.send(packed("hello", 1, 0, {"major": payload, "minor": 0, "name": payload}))
            assert stranger.answers()
    assert not target.exists()


# -- below ZeroMQ -------------------------------------------------------------------------------------------

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def handshake(path: Path) -> socket.socket:
    """A connection that has said everything a DEALER says before its first message."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(ANSWER_SECONDS)
    peer.connect(os.fspath(path))
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    peer.sendall(GREETING + bytes((4, len(body))) + body)
    heard = b""
    while len(heard) < len(GREETING) or b"READY" not in heard:
        heard += peer.recv(4096)
    return peer


def ended(peer: socket.socket) -> bool:
    """Whether the daemon closes the connection."""
    try:
        while peer.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("length", [wire.MAX_FRAME + 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1])
def test_a_length_that_is_only_claimed_ends_the_connection(attacked: Observed, length: int) -> None:
    before = resident_memory(attacked.handle.pid)
    with handshake(attacked.socket) as peer:
        peer.sendall(b"\x02" + struct.pack(">Q", length) + b"x" * 1000)
        assert ended(peer)
    assert resident_memory(attacked.handle.pid) - before < LITTLE


@pytest.mark.parametrize(
    "text", [b"GET / HTTP/1.1\r\n\r\n" * 9, pickle.dumps({"a": [1] * 200}), random.Random(1).randbytes(5000)]
)
def test_other_protocols_on_the_socket_are_hung_up_on(attacked: Observed, text: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(ANSWER_SECONDS)
        peer.connect(os.fspath(attacked.socket))
        peer.sendall(text)
        peer.shutdown(socket.SHUT_WR)
        assert ended(peer)


def test_a_client_that_meets_another_server_gives_up_in_time() -> None:
    path = Path("/tmp") / f"hpkv-t-{os.getpid()}.sock"
    with zmq.Context.instance().socket(zmq.ROUTER) as other:
        other.bind(f"ipc://{path}")
        channel = Channel(path)
        try:
            started = time.monotonic()
            request = channel.send("ping", {})
            identity, _ = other.recv_multipart()
            for frame in (b"pong", packed(request, 0), packed(request, 2, {}), packed(request + 1000, 0, {})):
                other.send_multipart((identity, frame))
            with pytest.raises(Unreachable, match="did not answer"):
                channel.call("ping", {}, 0.3)
            assert time.monotonic() - started < 10
        finally:
            channel.close()
            path.unlink(missing_ok=True)


# -- masses -------------------------------------------------------------------------------------------------


def harmless(frame: bytes) -> bool:
    """Not, by chance, a request that is allowed to change something."""
    try:
        verb = wire.decode_request(frame).verb
    except ProtocolError:
        return True
    return verb not in ("hello", "clear", "bye", "register", "unregister")


def mutated(source: random.Random, corpus: list[bytes]) -> bytes:
    """Random bytes, or a right request with a few wrong ones."""
    if source.random() < 0.1:
        return source.randbytes(source.randrange(200))
    frame = bytearray(source.choice(corpus))
    for _ in range(source.choice((1, 1, 1, 2, 4))):
        kind, at = source.randrange(4), source.randrange(len(frame) or 1)
        if kind == 0 and frame:
            frame[at % len(frame)] = source.randrange(256)
        elif kind == 1:
            frame[at:at] = source.randbytes(source.randrange(1, 5))
        elif kind == 2:
            del frame[at : at + source.randrange(1, 9)]
        else:
            other = source.choice(corpus)
            frame[at:] = other[source.randrange(len(other)) :]
    return bytes(frame)


def test_a_hundred_thousand_random_frames_change_nothing(attacked: Observed, victim: Victim) -> None:
    source = random.Random(20261)
    with Rank(attacked.socket, plain_shard(4096, 2)).hello() as insider:
        corpus = [bytes.fromhex(frame) for frame in GOLDEN.values()]
        corpus += [wire.encode_request(verb, 7, insider.channel.session, body) for verb, body in BODIES.items()]
        before = attacked.stats()["bad_requests"], resident_memory(attacked.handle.pid), victim.rounds
        with Stranger(attacked.socket) as stranger:
            for sent in range(FRAMES):
                frame = mutated(source, corpus)
                while not harmless(frame):
                    frame = mutated(source, corpus)
                stranger.send(frame)
                if sent % 500 == 0:
                    while stranger.socket.poll(0):
                        wire.decode_reply(stranger.socket.recv())
            assert stranger.answers()
        assert attacked.stats()["bad_requests"] - before[0] > FRAMES * 0.7
        assert resident_memory(attacked.handle.pid) - before[1] < LITTLE
        assert victim.rounds - before[2] > 20
        alive = insider.call("heartbeat")
        assert (alive["ready"], alive["problem"]) == (False, "")
        assert attacked.gauges()["sessions"] == 3


def test_a_client_that_never_reads_bothers_nobody(attacked: Observed) -> None:
    before = resident_memory(attacked.handle.pid)
    with Rank(attacked.socket, plain_shard(4096, 2)).register() as deaf:
        deaf.ready()
        keys = deaf.keys(hashes(*range(100)))
        slowest = 0.0
        for number in range(50_000):
            frame = wire.encode_request("contains", 7, deaf.channel.session, {"keys": keys})
            deaf.channel._socket.send(frame)
            if number % 1000 == 0:
                started = time.monotonic()
                attacked.ask("ping")
                slowest = max(slowest, time.monotonic() - started)
        assert slowest < 1.0
        assert resident_memory(attacked.handle.pid) - before < LITTLE
        deaf.channel.reset()


def test_text_in_names_forges_no_lines_of_the_log(attacked: Observed) -> None:
    forged = "x\n2026-01-01 00:00:00,000 hpkvd[1] INFO all is well\x1b[2J"
    with Rank(attacked.socket, plain_shard(4096, 1), engine=forged).hello(name=forged) as rank:
        rank.register(model=forged, place=forged).ready()
    wait_until(lambda: "goodbye" in attacked.handle.text())
    log = attacked.handle.text()
    assert "\n2026-01-01" not in log
    assert "\x1b" not in log
