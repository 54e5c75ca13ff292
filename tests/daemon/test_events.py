"""KV events: what routers hear of a real daemon's blocks, and that nobody waits for a slow one."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from hpkv_client.address import write_new_key
from hpkv_client.errors import ConfigError
from hpkv_client.settings import load
from hpkv_client.types import block_key
from hpkv_daemon.server.events import TOPIC
from tests.daemons import DaemonFactory, hpkvd
from tests.subscriber import Subscriber
from tests.support import Observed, Rank, hashes, observed_daemon, plain_shard, wait_until

SIZE = 64 << 10
KEYS = bytes(range(32))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """A daemon with room for 16 blocks that publishes."""
    with observed_daemon(
        HPKV_EVENTS=f"ipc://{tmp_path_factory.mktemp('events')}/events", HPKV_KV_MEM_POOL_SIZE="1m"
    ) as observed:
        yield observed


@pytest.fixture
def rank(live: Observed) -> Iterator[Rank]:
    live.ask("clear")
    with Rank(live.socket, plain_shard(SIZE, 64)).register(block_tokens=16, group=3, key_namespace=KEYS) as rank:
        yield rank.ready()


@pytest.fixture
def router(live: Observed, rank: Rank) -> Iterator[Subscriber]:
    """Joined, and known to be connected."""
    with Subscriber(live.ask("info")["events"]) as router:
        # A subscription takes a moment to arrive: what is stored until one event comes through says nothing.
        def heard() -> bool:
            rank.store(hashes("hello"), [0])
            live.ask("clear")
            return router.follow(0.1) is not None and router.last > 0

        wait_until(heard, 30, "no event came through")
        router.join()
        router.until(set())
        router.seen.clear()
        yield router


def keys(rank: Rank, *names: object) -> list[bytes]:
    return [block_key(rank.namespace, 0, prefix) for prefix in hashes(*names)]


def test_a_prefix_is_told_as_one_chain_under_the_keys_that_the_engine_uses(
    live: Observed, rank: Rank, router: Subscriber
) -> None:
    chain = keys(rank, *range(6))
    rank.store(hashes(*range(4)), range(4))
    router.until(set(chain[:4]))
    rank.store(hashes(4, 5), [4, 5], parent=hashes(3)[0])
    router.until(set(chain))
    first, second = (event for batch in router.seen for event in batch.events)
    assert first["type"] == second["type"] == "BlockStored"
    assert (first["block_hashes"], first["parent_block_hash"]) == (chain[:4], None)
    assert (second["block_hashes"], second["parent_block_hash"]) == (chain[4:], chain[3])
    assert (first["block_size"], first["medium"], first["locality"]) == (16, "CPU", "LOCAL")
    info = live.ask("info")
    assert first["ownership"] in {one["id"] for one in info["namespaces"]}
    assert (info["engines"][0]["key_namespace"], info["engines"][0]["group"]) == (KEYS.hex(), 3)
    assert first["group_idx"] == second["group_idx"] == 3


def test_what_is_evicted_or_cleared_is_told(live: Observed, rank: Rank, router: Subscriber) -> None:
    rank.store(hashes(*range(16)), range(16))
    router.until(set(keys(rank, *range(16))))
    rank.store(hashes("new"), [0])
    router.until({*keys(rank, *range(15)), *keys(rank, "new")})
    live.ask("clear")
    router.until(set())


def test_what_never_became_resident_is_not_told(live: Observed, rank: Rank, router: Subscriber) -> None:
    live.faults("store=fail")
    assert rank.store(hashes("fails"), [0]) == 0
    live.faults("")
    rank.store(hashes("comes"), [0])
    router.until(set(keys(rank, "comes")))
    told = {key for batch in router.seen for event in batch.events for key in event["block_hashes"]}
    assert told == set(keys(rank, "comes"))


def test_a_late_joiner_gets_all_that_is_there_and_then_what_changes(
    live: Observed, rank: Rank, router: Subscriber
) -> None:
    chain = keys(rank, *range(10))
    rank.store(hashes(*range(10)), range(10))
    router.until(set(chain))
    with Subscriber(live.ask("info")["events"]) as late:
        late.join()
        assert late.seen[0].events == [{"type": "AllBlocksCleared"}]
        assert late.held == set(chain)
        assert late.last == router.last
        assert [late.parents[key] for key in chain] == [None, *chain[:-1]]
        # Who knows the last batch misses nothing; who missed some gets those.
        assert late.ask(router.last + 1) == []
        assert [batch.sequence for batch in late.ask(router.last)] == [router.last]
        # A number that was never given is one of an earlier life.
        assert late.ask(router.last + 100)[0].events == [{"type": "AllBlocksCleared"}]


def test_blocks_of_an_earlier_life_are_in_the_snapshot_of_the_next() -> None:
    factory = DaemonFactory()
    try:
        run = factory.environment()["HPKV_SOCKET"]
        daemon = factory(HPKV_EVENTS=f"{Path(run).parent}/events")
        with Rank(daemon.socket, plain_shard(SIZE, 4)).register() as rank:
            rank.ready()
            rank.store(hashes("a", "b"), [0, 1])
            known = set(keys(rank, "a", "b"))
        daemon.stop()
        daemon.restart()
        with Subscriber(f"ipc://{Path(run).parent}/events") as router:
            router.join()
            assert (router.held, router.last) == (known, 0)
    finally:
        factory.close()


def test_a_subscriber_that_reads_nothing_keeps_nobody_waiting(live: Observed, rank: Rank, router: Subscriber) -> None:
    context = zmq.Context()
    deaf = [context.socket(zmq.SUB) for _ in range(3)]
    asker = context.socket(zmq.DEALER)
    try:
        for one in deaf:
            one.setsockopt(zmq.RCVHWM, 1)
            one.setsockopt(zmq.SUBSCRIBE, TOPIC)
            one.connect(live.ask("info")["events"])
        asker.connect(live.ask("info")["events"] + ".snapshot")
        for _ in range(40):
            asker.send_multipart((b"", bytes(8)))
        asker.send_multipart((b"nonsense",))
        for i in range(60):
            rank.store(hashes(*(f"{i} {j}" for j in range(16))), range(16))
        router.until(set(keys(rank, *(f"59 {j}" for j in range(16)))))
        assert live.stats()["internal_errors"] == 0
    finally:
        for one in (*deaf, asker):
            one.close(0)
        context.term()
    # The crowd is served or gone by now; others get their answers.
    with Subscriber(live.ask("info")["events"]) as late:
        late.join()
        assert late.held == router.held


def test_the_sockets_are_guarded_like_the_daemons_own(live: Observed) -> None:
    path = live.ask("info")["events"].removeprefix("ipc://")
    for one in (path, f"{path}.snapshot"):
        assert stat.S_IMODE(os.stat(one).st_mode) == 0o660


def test_tcp_is_for_this_machine_unless_there_is_a_key(tmp_path: Path) -> None:
    assert load({"HPKV_EVENTS": "127.0.0.1:5557"})[0].events == "tcp://127.0.0.1:5557"
    for place in ("*:5557", "tcp://10.0.0.1:5557", "0.0.0.0:5557"):
        with pytest.raises(ConfigError, match="key file"):
            load({"HPKV_EVENTS": place})
        assert load({"HPKV_EVENTS": place, "HPKV_KEY_FILE": str(tmp_path / "key")})[0].events.endswith(":5557")
    for nonsense in ("somewhere", "127.0.0.1:65535", "ipc:///" + 100 * "x", "tcp://:1"):
        with pytest.raises(ConfigError):
            load({"HPKV_EVENTS": nonsense})
    assert load({"HPKV_EVENTS": "off"})[0].events == ""


def test_a_port_that_is_taken_ends_the_start() -> None:
    factory = DaemonFactory()
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            place = f"127.0.0.1:{taken.getsockname()[1]}"
            ended = hpkvd("serve", env=factory.environment(HPKV_EVENTS=place))
        assert ended.returncode == 78
        assert "HPKV_EVENTS" in ended.stderr.splitlines()[-1]
    finally:
        factory.close()


def two_ports() -> int:
    """A free port with another one behind it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


def test_other_machines_need_the_key_of_the_cluster(tmp_path: Path) -> None:
    key, stranger = write_new_key(tmp_path / "key"), write_new_key(tmp_path / "stranger")
    port = two_ports()
    factory = DaemonFactory()
    try:
        daemon = factory(HPKV_EVENTS=f"*:{port}", HPKV_KEY_FILE=tmp_path / "key")
        with Rank(daemon.socket, plain_shard(SIZE, 4)).register() as rank:
            rank.ready()
            rank.store(hashes("a"), [0])
            with Subscriber(f"tcp://127.0.0.1:{port}", key) as router:
                router.join()
                assert router.held == set(keys(rank, "a"))
            # One who knows the public key, and one who knows nothing.
            for other in ((key, stranger), ()):
                with Subscriber(f"tcp://127.0.0.1:{port}", *other) as router:
                    router.patience = 0.5
                    with pytest.raises(AssertionError, match="no answer"):
                        router.join()
    finally:
        factory.close()
