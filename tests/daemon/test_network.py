"""The port for other nodes: who may use it, and for what. Real sockets and a real daemon throughout."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from hpkv_client.address import ClusterKey, NodeAddress, read_key, write_new_key
from hpkv_client.errors import NotPermitted, UnknownSession
from hpkv_client.session import SessionKeeper
from hpkv_client.transport import Channel
from hpkv_client.wire import PROTOCOL, VERBS, decode_reply, encode_request
from hpkv_daemon.service.service import REMOTE_VERBS
from tests.daemons import DaemonFactory, hpkvd, refusal
from tests.support import Observed, Rank, hashes, observed_daemon, open_descriptors, plain_shard, wait_until

ENGINE = "engine-over-nodes"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert isinstance(port, int)
    return port


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "cluster.key"
    write_new_key(path)
    return path


@pytest.fixture(scope="module")
def place() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def node(key: Path, place: str) -> Iterator[Observed]:
    """A daemon that listens, with its network side."""
    with observed_daemon(HPKV_LISTEN=place, HPKV_KEY_FILE=key) as observed:
        yield observed


@pytest.fixture
def remote(node: Observed, key: Path, place: str) -> Iterator[Channel]:
    """A holder of the key on another node."""
    assert node.ask("ping")
    with closing(Channel(NodeAddress(place, read_key(key)))) as channel:
        yield channel


@pytest.fixture
def rank(node: Observed) -> Iterator[Rank]:
    """The engine's rank on the daemon's own node, with four blocks stored."""
    with Rank(node.socket, plain_shard(4096, 8), engine=ENGINE) as rank:
        rank.register().ready()
        assert rank.store(hashes(*range(4)), range(4)) == 4
        yield rank
    node.ask("clear")
    node.settle()


def hello(channel: Channel, **more: Any) -> None:
    body = {"major": PROTOCOL[0], "minor": PROTOCOL[1], "name": "scheduler", "engine": ENGINE, **more}
    channel.session = channel.call("hello", body, 30.0)["session"]


def test_another_node_finds_holds_and_gives_back_what_a_rank_stored_here(
    node: Observed, remote: Channel, rank: Rank
) -> None:
    hello(remote)
    assert remote.call("heartbeat", {}, 30.0)["ready"]
    keys = rank.keys(hashes(*range(6)))
    answer = remote.call("match", {"keys": keys}, 30.0)
    assert answer["hit"] == 4
    assert node.gauges()["leases"] == 1
    # The rank itself loads under the lease that the scheduler took from afar.
    rank.memory[:] = 0
    rank.load(answer["lease"], range(4, 8))
    assert remote.call("release", {"lease": answer["lease"]}, 30.0)["released"]
    assert node.gauges()["leases"] == 0
    assert remote.call("contains", {"keys": keys}, 30.0)["found"] == bytes([1, 1, 1, 1, 0, 0])
    found = remote.call("acquire", {"keys": keys[-64:]}, 30.0)
    assert (found["found"], found["lease"]) == (bytes(2), 0)
    seen = [session for session in node.ask("info")["sessions"] if session["name"] == "scheduler"]
    assert [session["host"] for session in seen] == ["127.0.0.1"]
    assert remote.call("reset", {}, 30.0)["cleared_blocks"] == 4
    assert rank.match(hashes(0)) == (0, 0)
    remote.call("bye", {}, 30.0)


def test_leases_of_another_node_end_with_its_session(node: Observed, remote: Channel, rank: Rank) -> None:
    hello(remote)
    assert remote.call("match", {"keys": rank.keys(hashes(0))}, 30.0)["hit"] == 1
    assert node.gauges()["leases"] == 1
    remote.call("bye", {}, 30.0)
    assert node.gauges()["leases"] == 0
    with pytest.raises(UnknownSession):
        remote.call("heartbeat", {}, 30.0)


@pytest.mark.parametrize("verb", sorted(set(VERBS) - REMOTE_VERBS))
def test_what_belongs_to_the_node_is_refused_to_others(remote: Channel, rank: Rank, verb: str) -> None:
    hello(remote)
    bodies: dict[str, dict[str, Any]] = {
        "register": rank.registration(),
        "load": {"job": 1, "lease": 1, "first": 0, "blocks": b""},
        "store": {"job": 1, "parent": None, "keys": b"", "blocks": b""},
        "put": {"job": 1, "keys": b"", "blocks": b""},
        "get": {"job": 1, "keys": b"", "blocks": b""},
        "cancel": {"job": 1},
        "set": {"name": "log_level", "value": "debug"},
        "blocks": {"namespace": bytes(32)},
    }
    with pytest.raises(NotPermitted, match="not for other nodes"):
        remote.call(verb, bodies.get(verb, {}), 30.0)
    assert rank.match(hashes(*range(4)))[0] == 4
    remote.call("bye", {}, 30.0)


def test_sessions_of_this_node_are_not_open_to_others_nor_theirs_to_us(remote: Channel, rank: Rank) -> None:
    hello(remote)
    theirs, ours = remote.session, rank.channel.session
    remote.session = ours
    with pytest.raises(UnknownSession):
        remote.call("heartbeat", {}, 30.0)
    rank.channel.session = theirs
    with pytest.raises(UnknownSession):
        rank.call("heartbeat")
    remote.session, rank.channel.session = theirs, ours
    assert remote.call("heartbeat", {}, 30.0)["ready"]
    remote.call("bye", {}, 30.0)


def test_without_the_key_nothing_is_answered_and_nobody_is_disturbed(
    node: Observed, remote: Channel, key: Path, place: str, tmp_path: Path
) -> None:
    right, wrong = read_key(key), write_new_key(tmp_path / "other.key")
    # The second one knows the daemon's public key, but has another pair of its own.
    for server, own in ((wrong, wrong), (right, wrong)):
        with dealer(place, server, own) as stranger:
            assert answer_of(stranger, b"let me in", 1.0) is None
    with dealer(place, right, right) as friend:
        assert answer_of(friend, b"a friend", 5.0) == b"a friend"
    with socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2])), 5) as plain:
        plain.settimeout(5.0)
        # It is hung up on, after ZeroMQ's greeting at most.
        with contextlib.suppress(ConnectionResetError):
            plain.sendall(os.urandom(4096))
            while plain.recv(4096):
                pass
    assert remote.call("ping", {"echo": b"still here"}, 30.0)["echo"] == b"still here"
    assert node.ask("check")["ok"]


@contextmanager
def dealer(place: str, server: ClusterKey, own: ClusterKey, identity: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
    """A bare connection of someone who holds these keys."""
    with zmq.Context.instance().socket(zmq.DEALER) as bare:
        bare.setsockopt(zmq.LINGER, 0)
        if identity:
            bare.setsockopt(zmq.ROUTING_ID, identity)
        bare.setsockopt(zmq.CURVE_SERVERKEY, server.public)
        bare.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        bare.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        bare.connect(f"tcp://{place}")
        yield bare


def answer_of(bare: zmq.Socket[bytes], echo: bytes, seconds: float) -> bytes | None:
    """What a ping is answered within so many seconds, None if not at all."""
    bare.send(encode_request("ping", 1, 0, {"echo": echo}))
    if not bare.poll(round(seconds * 1000)):
        return None
    answered = decode_reply(bare.recv()).result()["echo"]
    assert isinstance(answered, bytes)
    return answered


def test_a_keeper_finds_a_node_again_after_its_daemon_was_killed(key: Path) -> None:
    place = f"127.0.0.1:{free_port()}"
    with observed_daemon(HPKV_LISTEN=place, HPKV_KEY_FILE=key) as observed, ExitStack() as stack:
        keeper = SessionKeeper(NodeAddress(place, read_key(key)), {"name": "scheduler", "engine": ENGINE})
        keeper.start()
        stack.callback(keeper.stop)
        first = keeper.wait(10.0, lambda link: link.up)
        assert first.up
        observed.handle.kill()
        assert not keeper.wait(10.0, lambda link: not link.up).up
        observed.handle.restart()
        again = keeper.wait(20.0, lambda link: link.up)
        assert again.up
        assert again.epoch != first.epoch


def test_keygen_makes_a_key_that_only_its_owner_can_read(daemon: DaemonFactory, tmp_path: Path) -> None:
    env = daemon.environment()
    path = tmp_path / "cluster.key"
    assert hpkvd("keygen", str(path), env=env).returncode == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = read_key(path)
    assert "exists" in refusal("keygen", str(path), env=env, exit_code=78)
    assert read_key(path) == first
    assert "cannot write" in refusal("keygen", str(tmp_path / "missing" / "key"), env=env, exit_code=78)
    assert first.secret.decode() not in repr(first)


def test_listening_without_a_usable_key_or_port_is_refused(daemon: DaemonFactory, tmp_path: Path, key: Path) -> None:
    port = free_port()

    def says(exit_code: int, **env: Any) -> str:
        return refusal("serve", env=daemon.environment(**env), exit_code=exit_code)

    assert "needs a key file" in says(78, HPKV_LISTEN=f"127.0.0.1:{port}")
    for bad in ("127.0.0.1", "127.0.0.1:0", "127.0.0.1:70000", "node7:7630", "::1:7630", "[10.0.0.1]:7630", ":7630"):
        assert "HPKV_LISTEN" in says(78, HPKV_LISTEN=bad, HPKV_KEY_FILE=key), bad
    assert "does not exist" in says(78, HPKV_LISTEN=f"*:{port}", HPKV_KEY_FILE=tmp_path / "none")
    public = tmp_path / "public.key"
    write_new_key(public)
    public.chmod(0o644)
    assert "chmod o-rw" in says(77, HPKV_LISTEN=f"*:{port}", HPKV_KEY_FILE=public)
    garbage = tmp_path / "garbage.key"
    for text in (b"", b"too short", b"\xff" * 40, b"x" * 41):
        garbage.write_bytes(text)
        garbage.chmod(0o600)
        assert "not a key file" in says(78, HPKV_LISTEN=f"*:{port}", HPKV_KEY_FILE=garbage), text
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        for place in (f"127.0.0.1:{port}", f"192.0.2.1:{port}"):
            done = hpkvd("serve", env=daemon.environment(HPKV_LISTEN=place, HPKV_KEY_FILE=key))
            assert done.returncode == 78
            assert f"hpkvd: cannot listen on {place}" in done.stderr.splitlines()[-1]
    running = daemon(HPKV_LISTEN=f"127.0.0.1:{port}", HPKV_KEY_FILE=key)
    with closing(Channel(NodeAddress(f"127.0.0.1:{port}", read_key(key)))) as channel:
        assert channel.call("ping", {}, 30.0)["pid"] == running.pid


def test_many_strangers_leave_nothing_behind(node: Observed, place: str, tmp_path: Path, rank: Rank) -> None:
    before = open_descriptors(node.handle.pid)
    wrong = write_new_key(tmp_path / "other.key")
    for _ in range(20):
        with closing(Channel(NodeAddress(place, wrong))) as channel:
            channel.send("ping", {})
            assert not list(channel.replies(0.05))
    wait_until(lambda: open_descriptors(node.handle.pid) <= before, 30, "connections of strangers stay open")
    assert rank.match(hashes(0))[0] == 1


def test_two_hosts_with_one_zmq_identity_never_get_each_others_answers(remote: Channel, key: Path, place: str) -> None:
    assert remote.call("ping", {}, 30.0)
    pair = read_key(key)
    with dealer(place, pair, pair, b"same") as first, dealer(place, pair, pair, b"same") as second:
        assert answer_of(first, b"one", 5.0) == b"one"
        assert answer_of(second, b"two", 0.5) is None
        assert answer_of(first, b"three", 5.0) == b"three"
