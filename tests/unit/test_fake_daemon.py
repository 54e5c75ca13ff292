"""``FakeDaemon`` behaves like the real one, as far as it goes, and does what a test tells it."""

from __future__ import annotations

import contextlib
import mmap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpkv_client.client import BlockCache
from hpkv_client.errors import (
    Busy,
    CopyFailed,
    HpkvError,
    LayoutRefused,
    LeaseLost,
    NotRegistered,
    NotRunning,
    UnknownSession,
    Unreachable,
    UsageError,
    VersionMismatch,
)
from hpkv_client.memory import SharedMemory
from hpkv_client.testing import FakeDaemon
from hpkv_client.transport import Channel
from hpkv_client.types import Keys, Layer, RankShard, Run
from hpkv_client.wire import PROTOCOL, handle_to_wire, pack_blocks, shard_to_wire
from tests.daemons import DaemonFactory

BLOCK = 8192
KEYS = [bytes([i]) * 32 for i in range(8)]


def block(i: int) -> bytes:
    return bytes([i + 1]) * BLOCK


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    with FakeDaemon() as started:
        yield started


@pytest.fixture(scope="module")
def real() -> Iterator[Path]:
    """The socket of a real daemon."""
    factory = DaemonFactory()
    try:
        yield factory().socket
    finally:
        factory.close()


@pytest.fixture(params=["fake", "real"])
def socket(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The socket of an empty daemon of either kind: what passes with one passes with the other."""
    if request.param == "real":
        path: Path = request.getfixturevalue("real")
        ask(path, "clear")
        yield path
        return
    with FakeDaemon() as started:
        yield started.socket


def ask(socket: Path, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One request without a session."""
    channel = Channel(socket)
    try:
        return channel.call(verb, body or {}, 30.0)
    finally:
        channel.close()


# -- the same story with the real daemon and with the fake ------------------------------------------------


def test_blocks_come_back_as_they_were_put(socket: Path) -> None:
    with BlockCache("story", BLOCK, socket=socket, arena_blocks=3) as cache:
        assert cache.get(KEYS) == [None] * len(KEYS)
        assert cache.put({key: block(i) for i, key in enumerate(KEYS[:5])}) == 5
        assert cache.contains(KEYS) == [True] * 5 + [False] * 3
        assert cache.get(KEYS) == [block(i) for i in range(5)] + [None] * 3
        assert cache.put({KEYS[0]: block(0), KEYS[6]: block(6)}) == 2


def test_caches_of_one_namespace_share_and_others_do_not(socket: Path) -> None:
    with BlockCache("one", BLOCK, socket=socket) as first:
        first.put({KEYS[0]: block(0)})
    with (
        BlockCache("one", BLOCK, socket=socket) as same,
        BlockCache("two", BLOCK, socket=socket) as other,
        BlockCache("one", BLOCK * 2, socket=socket) as wider,
    ):
        assert same.get(KEYS[:1]) == [block(0)]
        assert other.get(KEYS[:1]) == [None]
        assert wider.get(KEYS[:1]) == [None]


def test_arena_blocks_are_filled_and_stored_in_place(socket: Path) -> None:
    with BlockCache("arena", BLOCK, socket=socket, arena_blocks=4) as cache:
        cache.block(3)[:] = block(3)
        assert cache.put_arena([KEYS[3]], [3]) == 1
        assert cache.get_arena([KEYS[2], KEYS[3]], [0, 1]) == [False, True]
        assert bytes(cache.block(1)) == block(3)


class Ranks:
    """Two ranks of one engine that hold the halves of each block: half a layer each."""

    half = 2048
    blocks = 4

    def __init__(self, socket: Path, replicated: bool = False) -> None:
        self.memories = [SharedMemory(self.half * self.blocks) for _ in range(2)]
        self.channels = [Channel(socket) for _ in range(2)]
        engine = f"halves-{uuid.uuid4()}"
        for rank, (channel, memory) in enumerate(zip(self.channels, self.memories, strict=True)):
            channel.session = self.call(rank, "hello", hello(engine))["session"]
            start, size = (0, self.half) if replicated else (rank * self.half, 2 * self.half)
            run = Run(0, 0, self.half, start, self.half)
            shard = RankShard((Layer("layer", size, (run,)),), self.blocks)
            if replicated:
                shard = RankShard(shard.layers, self.blocks, replicas=2, replica=rank)
            self.call(rank, "register", registration(rank, 2, shard, memory))
        deadline = time.monotonic() + 10
        while not self.call(0, "heartbeat")["ready"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def call(self, rank: int, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.channels[rank].call(verb, body or {}, 30.0)

    def memory(self, rank: int) -> mmap.mmap:
        return self.memories[rank].mapping

    def store(self, rank: int, job: int, keys: list[bytes], blocks: list[int], parent: bytes | None = None) -> Any:
        body = {"job": job, "parent": parent, "keys": Keys.of(keys).blob, "blocks": pack_blocks(blocks)}
        return self.call(rank, "store", body)

    def match(self, keys: list[bytes]) -> dict[str, Any]:
        return self.call(0, "match", {"keys": Keys.of(keys).blob})

    def load(self, rank: int, job: int, lease: int, first: int, blocks: list[int]) -> dict[str, Any]:
        body = {"job": job, "lease": lease, "first": first, "blocks": pack_blocks(blocks)}
        return self.call(rank, "load", body)

    def close(self) -> None:
        for channel, memory in zip(self.channels, self.memories, strict=True):
            with contextlib.suppress(UnknownSession):
                channel.call("bye", {}, 30.0)
            channel.close()
            memory.close()


def hello(engine: str, major: int = PROTOCOL[0]) -> dict[str, Any]:
    return {"major": major, "minor": PROTOCOL[1], "name": "test", "engine": engine}


def registration(rank: int, world: int, shard: RankShard, memory: SharedMemory) -> dict[str, Any]:
    return {
        "rank": rank,
        "world": world,
        "namespace": bytes(32),
        "model": "m",
        "device": "cpu",
        "regions": [handle_to_wire(memory.handle)],
        **shard_to_wire(shard),
    }


@pytest.fixture
def make_ranks(socket: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(**options: Any) -> Ranks:
        made.append(Ranks(socket, **options))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def test_a_block_exists_once_every_rank_has_stored_its_part(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks()
    ranks.memory(0)[: ranks.half] = b"a" * ranks.half
    ranks.memory(1)[: ranks.half] = b"b" * ranks.half
    assert ranks.store(0, 1, KEYS[:1], [0]) == {"kept": 0, "dropped": 0, "partial": True}
    assert ranks.match(KEYS[:1]) == {"hit": 0, "lease": 0, "coming": 0}
    assert ranks.store(1, 1, KEYS[:1], [0]) == {"kept": 1, "dropped": 0, "partial": False}
    with pytest.raises(UsageError):
        ranks.store(1, 1, KEYS[:1], [0])
    found = ranks.match(KEYS[:2])
    assert found["hit"] == 1
    for rank in range(2):
        assert ranks.load(rank, 2, found["lease"], 0, [3]) == {"loaded": 1}
    assert ranks.memory(0)[3 * ranks.half :] == b"a" * ranks.half
    assert ranks.memory(1)[3 * ranks.half :] == b"b" * ranks.half


def test_only_the_writer_of_a_block_is_read_and_every_replica_is_filled(
    make_ranks: Callable[..., Ranks],
) -> None:
    ranks = make_ranks(replicated=True)
    writer = 0
    ranks.memory(writer)[: ranks.half] = b"w" * ranks.half
    ranks.memory(1 - writer)[: ranks.half] = b"x" * ranks.half
    for rank in range(2):
        ranks.store(rank, 1, KEYS[:1], [0])
    lease = ranks.match(KEYS[:1])["lease"]
    for rank in range(2):
        ranks.load(rank, 2, lease, 0, [1])
        assert ranks.memory(rank)[ranks.half : 2 * ranks.half] == b"w" * ranks.half


def test_a_prefix_ends_at_its_first_missing_block(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks()
    for rank in range(2):
        ranks.store(rank, 1, KEYS[:2], [0, 1])
    for rank in range(2):
        orphan = ranks.store(rank, 2, [KEYS[5]], [2], parent=KEYS[4])
    assert (orphan["kept"], orphan["dropped"]) == (0, 1)
    assert ranks.match(KEYS)["hit"] == 2
    assert ranks.match([KEYS[7], KEYS[0]]) == {"hit": 0, "lease": 0, "coming": 0}


def test_a_lease_ends_with_its_release_and_covers_its_blocks_only(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks()
    for rank in range(2):
        ranks.store(rank, 1, KEYS[:2], [0, 1])
    lease = ranks.match(KEYS)["lease"]
    with pytest.raises(UsageError):
        ranks.load(0, 2, lease, 1, [0, 1])
    assert ranks.call(0, "release", {"lease": lease}) == {"released": True}
    assert ranks.call(0, "release", {"lease": lease}) == {"released": False}
    with pytest.raises(LeaseLost):
        ranks.load(0, 3, lease, 0, [0])


def test_unrelated_blocks_are_leased_where_they_are_found(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks()
    for rank in range(2):
        ranks.store(rank, 1, [KEYS[1], KEYS[3]], [0, 1])
    found = ranks.call(0, "acquire", {"keys": Keys.of(KEYS[:4]).blob})
    assert found["found"] == bytes([0, 1, 0, 1])
    assert ranks.load(0, 2, found["lease"], 3, [2]) == {"loaded": 1}
    with pytest.raises(UsageError):
        ranks.load(0, 3, found["lease"], 2, [2])
    assert ranks.call(0, "acquire", {"keys": KEYS[0]}) == {"found": bytes(1), "lease": 0, "coming": 0}


def test_an_engine_that_lost_a_rank_is_not_ready(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks()
    ranks.call(1, "bye")
    assert not ranks.call(0, "heartbeat")["ready"]
    with pytest.raises(NotRegistered):
        ranks.match(KEYS[:1])


def test_shards_that_leave_a_hole_are_refused(socket: Path) -> None:
    memory, channel = SharedMemory(4096), Channel(socket)
    channel.session = channel.call("hello", hello("hole"), 30.0)["session"]
    shard = RankShard((Layer("layer", 4096, (Run(0, 0, 2048, 0, 2048),)),), 2)
    with pytest.raises(LayoutRefused):
        channel.call("register", registration(0, 1, shard, memory), 30.0)
    channel.close()
    memory.close()


def test_strangers_and_other_versions_are_told_so(socket: Path) -> None:
    channel = Channel(socket)
    with pytest.raises(VersionMismatch):
        channel.call("hello", hello("", major=99), 30.0)
    with pytest.raises(UnknownSession):
        channel.call("heartbeat", {}, 30.0)
    channel.session = channel.call("hello", hello("nothing"), 30.0)["session"]
    with pytest.raises(NotRegistered):
        channel.call("match", {"keys": b""}, 30.0)
    channel.close()


def test_operators_get_answers(socket: Path) -> None:
    stored = ask(socket, "stats").get("stored_blocks", 0)
    with BlockCache("ops", BLOCK, socket=socket) as cache:
        cache.put({KEYS[0]: block(0)})
        assert ask(socket, "ping", {"echo": b"x"})["echo"] == b"x"
        assert ask(socket, "check")["blocks"] == 1
        assert ask(socket, "stats")["stored_blocks"] == stored + 1
        assert "ops" in [engine.get("model", "ops") for engine in ask(socket, "info")["engines"]]
        assert set(ask(socket, "config")) == {"settings", "origins"}
        assert ask(socket, "clear") == {"cleared_blocks": 1}
        assert cache.contains(KEYS[:1]) == [False]


# -- what a test can do to the fake -----------------------------------------------------------------------


def test_down_is_gone_and_up_is_a_new_life(fake: FakeDaemon) -> None:
    with BlockCache("life", BLOCK, socket=fake.socket, timeout=5.0) as cache:
        cache.put({KEYS[0]: block(0)})
        epoch = fake.epoch
        fake.down()
        assert not fake.socket.exists()
        with pytest.raises(NotRunning):
            BlockCache("life", BLOCK, socket=fake.socket, timeout=0.5)
        fake.up()
        assert fake.epoch != epoch
        assert cache.get(KEYS[:1]) == [None]
        cache.put({KEYS[0]: block(1)})
        fake.down(keep_blocks=True)
        fake.up()
        assert cache.get(KEYS[:1]) == [block(1)]


def test_a_client_that_waits_for_a_daemon_that_is_down_gives_up(fake: FakeDaemon) -> None:
    with BlockCache("gone", BLOCK, socket=fake.socket, timeout=1.0) as cache:
        fake.down()
        with pytest.raises(Unreachable):
            cache.get(KEYS[:1])


def test_delay_holds_replies_back(fake: FakeDaemon) -> None:
    channel = Channel(fake.socket)
    fake.delay = 0.2
    started = time.monotonic()
    channel.call("ping", {}, 30.0)
    assert time.monotonic() - started >= 0.2
    with pytest.raises(Unreachable):
        channel.call("ping", {}, 0.05)
    channel.close()


def test_fail_next_refuses_exactly_one_request_each(fake: FakeDaemon) -> None:
    channel = Channel(fake.socket)
    fake.fail_next("ping")
    fake.fail_next("ping", Busy("full", "wait"))
    for error in (CopyFailed, Busy):
        with pytest.raises(error):
            channel.call("ping", {}, 30.0)
    assert channel.call("ping", {}, 30.0)["epoch"] == fake.epoch
    channel.close()


def test_a_failed_get_is_a_miss_for_a_block_cache(fake: FakeDaemon) -> None:
    with BlockCache("miss", BLOCK, socket=fake.socket) as cache:
        cache.put({KEYS[0]: block(0)})
        fake.fail_next("get")
        assert cache.get(KEYS[:1]) == [None]
        assert cache.get(KEYS[:1]) == [block(0)]


def test_a_forgotten_client_says_hello_again(fake: FakeDaemon) -> None:
    with BlockCache("again", BLOCK, socket=fake.socket) as cache:
        cache.put({KEYS[0]: block(0)})
        fake.forget_sessions()
        assert cache.get(KEYS[:1]) == [block(0)]
        assert len(fake.wait_for("hello", 2)) == 2


def test_requests_are_recorded_decoded(fake: FakeDaemon) -> None:
    with BlockCache("seen", BLOCK, socket=fake.socket) as cache:
        cache.put({KEYS[0]: block(0), KEYS[1]: block(1)})
    (put,) = fake.wait_for("put")
    assert len(Keys(put.body["keys"])) == 2
    assert [request.verb for request in fake.requests][:2] == ["hello", "register"]
    fake.wait_for("bye")
    with pytest.raises(AssertionError):
        fake.wait_for("load", timeout=0.02)


def test_a_malformed_frame_is_answered_and_harmless(fake: FakeDaemon) -> None:
    channel = Channel(fake.socket)
    with pytest.raises(HpkvError):
        channel.call("no-such-verb", {}, 30.0)
    assert channel.call("ping", {}, 30.0)["version"] == "fake"
    channel.close()
