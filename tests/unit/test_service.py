"""The service without sockets and processes, where movers and time do what they are told."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from hpkv_client import wire
from hpkv_client.errors import HpkvError, LayoutRefused, ProtocolError
from hpkv_client.settings import load
from hpkv_client.types import Layer, RankShard, Run
from hpkv_daemon.core.policy import POLICIES
from hpkv_daemon.core.store import BlockStore
from hpkv_daemon.faults import Faults
from hpkv_daemon.service.live import LiveSettings
from hpkv_daemon.service.report import Identity
from hpkv_daemon.service.service import SESSIONS_PER_PROCESS, Service
from hpkv_daemon.service.sessions import Peer
from hpkv_daemon.tiers.noop import NoopTier
from tests.fuzz.node import Node, Reactor

POOL = 1 << 18
ME = Peer(b"me", os.getuid(), 0)


class Client:
    """One connection to a service of its own."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.node = Node(self.reactor, POOL)
        identity = Identity(1, "epoch", "0", "", "/socket", "/pool", POOL, "lru")
        self.replies: list[wire.Reply] = []
        self.service = Service(
            BlockStore(POOL, POLICIES["lru"]),
            {"cpu": self.node.start_mover},
            identity,
            self.reactor,
            self.reactor.clock,
            lambda _, frame: self.replies.append(wire.decode_reply(frame)),
            LiveSettings(*load({"HPKV_LEASE_SECONDS": "5"})),
            Faults(),
            lambda _: NoopTier(),
        )
        self.session = 0
        self.session = self.call("hello", major=1, minor=0, name="n", engine="e")["session"]

    def call(self, verb: str, **body: Any) -> wire.Body:
        """A request that is answered at once."""
        frame = self.service.handle(ME, wire.encode_request(verb, 1, self.session, body))
        assert frame is not None
        self.node.deliver()
        return wire.decode_reply(frame).result()

    def register(self, *runs: Run, layer_bytes: int = 4096, blocks: int = 4, world: int = 1, **more: Any) -> wire.Body:
        """Register rank 0 of an engine with one layer."""
        shard = RankShard((Layer("l.0", layer_bytes, runs or (Run(0, 0, 4096, 0, 4096),)),), blocks)
        return self.call(
            "register",
            rank=0,
            world=world,
            namespace=more.pop("namespace", bytes(32)),
            model="m",
            device="cpu",
            regions=[{"kind": "memfd", "size": 1 << 50, "pid": 0, "fd": 3, "name": "m"}],
            **wire.shard_to_wire(shard),
            **more,
        )


@pytest.fixture
def client() -> Client:
    """Said hello."""
    return Client()


def test_an_engine_whose_mover_cannot_be_started_is_refused_and_may_come_again(client: Client) -> None:
    client.node.lame = True
    for _ in range(2):
        with pytest.raises(LayoutRefused, match=r"mover cpu does not start: .*temporarily unavailable"):
            client.register()
    assert client.call("stats")["internal_errors"] == 0
    client.node.lame = False
    client.register()
    assert client.call("heartbeat")["ready"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_that_claims_more_bytes_than_its_layer_has_is_refused_and_breaks_no_report(
    client: Client, world: int
) -> None:
    everything_often = Run(0, 0, 0, 0, 1 << 40, (1 << 63) - 1, 0, 0)
    with pytest.raises(ProtocolError, match="move more bytes than it has"):
        client.register(everything_often, layer_bytes=1 << 40, world=world)
    assert client.call("info")["engines"] == []
    assert client.call("stats")["internal_errors"] == 0


def test_a_report_that_would_be_longer_than_a_frame_leaves_entries_out_and_says_so(client: Client) -> None:
    longest = "\N{SLIGHTLY SMILING FACE}" * wire.MAX_TEXT
    for uid in range(3):
        hello = {"major": 1, "minor": 0, "name": longest, "engine": f"{uid}{longest[2:]}"}
        for _ in range(SESSIONS_PER_PROCESS):
            client.service.handle(Peer(b"other", 1 << 20 | uid, 0), wire.encode_request("hello", 1, 0, hello))
    reply = client.service.handle(ME, wire.encode_request("info", 1, 0, {}))
    assert reply is not None
    assert len(reply) <= wire.MAX_FRAME
    body = wire.decode_reply(reply).result()
    assert len(body["sessions"]) + body["left_out"]["sessions"] == 1 + 3 * SESSIONS_PER_PROCESS
    assert body["sessions"][0]["name"] == "n"


def test_a_reply_that_cannot_be_written_is_an_internal_error_and_not_the_end_of_the_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(client.service._open_verbs, "info", lambda *_: {"size": 1 << 64})
    with pytest.raises(HpkvError, match="internal error: OverflowError"):
        client.call("info")
    assert client.call("stats")["internal_errors"] == 1


def test_an_explanation_that_would_be_longer_than_a_frame_leaves_namespaces_out(client: Client) -> None:
    for number in range(8):
        name = f"engine {number}"
        client.session = client.call("hello", major=1, minor=0, name="n", engine=name)["session"]
        fields = {f"field {i}": f"{number}" * wire.MAX_TEXT for i in range(wire.MAX_COUNTERS)}
        client.register(namespace=bytes([number]) * 32, fields=fields)
        body = {"job": 1, "parent": None, "keys": bytes(32), "blocks": bytes(4)}
        assert client.service.handle(ME, wire.encode_request("store", 2, client.session, body)) is None
        client.node.deliver()
    frame = client.service.handle(ME, wire.encode_request("explain", 3, 0, {}))
    assert frame is not None
    assert len(frame) <= wire.MAX_FRAME
    told = wire.decode_reply(frame).result()
    assert len(told["other_namespaces"]) + told["left_out"]["other_namespaces"] == 8 * 7


def _lease_of_nobody(service: Service) -> None:
    service._store.leases.grant("nobody", 0, (), 0, 1e9)


def _forgotten_attachment(service: Service) -> None:
    service._movers._home.clear()


def _rank_without_attachment(service: Service) -> None:
    next(iter(service._engines["e"].ranks.values())).attachment = 77


def _unwatched_session(service: Service) -> None:
    for process in service._sessions._processes.values():
        process.sessions.clear()


def _counter_that_drifted(service: Service) -> None:
    service._store.blocks.usage.resident_blocks += 1


def _account_that_drifted(service: Service) -> None:
    next(iter(service._store.blocks.accounts)).held += 1


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_lease_of_nobody, "belongs to 'nobody', who left"),
        (_forgotten_attachment, "ranks hold"),
        (_rank_without_attachment, "ranks hold"),
        (_unwatched_session, "sessions, of which 0 are watched"),
        (_counter_that_drifted, "counted"),
        (_account_that_drifted, "holds 0 bytes"),
    ],
)
def test_check_finds_what_is_broken(client: Client, damage: Callable[[Service], None], said: str) -> None:
    client.register()
    looked_at = client.call("check")
    assert (looked_at["ok"], looked_at["sessions"], looked_at["engines"]) == (True, 1, 1)
    damage(client.service)
    with pytest.raises(HpkvError, match=f"invariant broken: .*{said}"):
        client.call("check")


def test_check_finds_loads_and_stores_without_what_they_need(client: Client) -> None:
    client.register()
    client.node.eager = False
    body = {"job": 1, "parent": None, "keys": bytes(32), "blocks": bytes(4)}
    request = wire.encode_request("store", 2, client.session, body)
    assert client.service.handle(ME, request) is None
    assert client.call("check")["stores"] == 1
    client.service._store._reservations.clear()
    with pytest.raises(HpkvError, match="invariant broken"):
        client.call("check")
