"""What the daemon tells about itself, what it keeps to itself, and how much of anything it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from hpkv_client import wire
from hpkv_client.client import BlockCache
from hpkv_client.errors import CopyFailed, LayoutRefused, ProtocolError, UsageError
from hpkv_client.types import Layer, RankShard, Run, block_key
from hpkv_client.wire import MAX_KEYS
from tests.support import (
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

SLOTS = 16
SIZE = 1 << 16


@pytest.fixture(scope="module")
def shared() -> Iterator[Observed]:
    """A daemon with room for 16 blocks that logs all it ever would."""
    with observed_daemon(HPKV_KV_MEM_POOL_SIZE="1m", HPKV_LOG_LEVEL="debug") as observed:
        yield observed


@pytest.fixture
def live(shared: Observed) -> Iterator[Observed]:
    """The shared daemon, empty before the test and clean after it."""
    shared.ask("clear")
    yield shared
    shared.assert_sound()


# -- numbers that agree with what happened ------------------------------------------------------------------


def test_the_counters_are_those_of_the_traffic(live: Observed) -> None:
    before = live.stats()
    with Rank(live.socket, plain_shard(SIZE, 32)).register() as rank:
        rank.ready()
        prefix = hashes(*range(10))
        assert rank.store(prefix, range(10)) == 10
        assert rank.store(prefix[:4], range(4)) == 4
        assert rank.match(hashes("none"))[0] == 0
        hit, lease = rank.match([*prefix, *hashes("none")])
        assert hit == 10
        assert rank.load(lease, range(10, 16)) == 6
        assert rank.load(lease, range(16, 20), first=6) == 4
        # An orphan, four blocks more than there is room for besides the leased ones, and one that fails.
        assert rank.store(hashes("child"), [0], parent=hashes("no parent")[0]) == 0
        assert rank.store(hashes(*range(100, 110)), range(10)) == 6
        live.faults("load=fail")
        with pytest.raises(CopyFailed):
            rank.load(lease, [0])
        live.faults("")
        assert rank.call("release", lease=lease)["released"]
        # Two more push out the two oldest tails.
        assert rank.store(hashes("x", "y"), [0, 1]) == 2
        seen = live.stats()
    moved = {name: seen[name] - before[name] for name in seen if name in before}
    expected = {
        "requested_blocks": 12,
        "matched_blocks": 10,
        "loaded_blocks": 10,
        "loaded_bytes": 10 * SIZE,
        "load_failures": 1,
        "offered_blocks": 10 + 4 + 1 + 10 + 2,
        "kept_blocks": 4,
        "stored_blocks": 10 + 6 + 2,
        "stored_bytes": 18 * SIZE,
        "store_failures": 0,
        "dropped_orphan_blocks": 1,
        "dropped_full_blocks": 4,
        "evicted_blocks": 2,
        "evicted_bytes": 2 * SIZE,
        "aborted_blocks": 0,
        "expired_leases": 0,
        "bad_requests": 0,
        "internal_errors": 0,
        "pool_resident_blocks": SLOTS,
        "pool_resident_bytes": SLOTS * SIZE,
    }
    assert {name: moved[name] for name in expected} == expected
    assert moved["load_microseconds"] > 0
    assert moved["store_microseconds"] > 0


def test_resident_reserved_and_pinned_are_three_numbers(live: Observed) -> None:
    def gauges() -> tuple[int, int, int, int]:
        stats = live.stats()
        pool = live.ask("info")["pool"]
        names = ("resident_blocks", "reserved_blocks", "pinned_blocks")
        assert [stats[f"pool_{name}"] for name in names] == [pool[name] for name in names]
        assert stats["pool_resident_bytes"] == pool["resident_bytes"] == stats["pool_resident_blocks"] * SIZE
        return (*(stats[f"pool_{name}"] for name in names), stats["leases"])

    with Rank(live.socket, plain_shard(SIZE, 16)).register() as rank:
        rank.ready()
        assert gauges() == (0, 0, 0, 0)
        assert rank.store(hashes(*range(8)), range(8)) == 8
        assert gauges() == (8, 0, 0, 0)
        _, lease = rank.match(hashes(*range(8)))
        assert gauges() == (8, 0, 1, 1)
        live.faults("commit=delay:2")
        request = rank.ask_store(hashes(*range(8, 12)), range(8, 12), parent=hashes(7)[0])
        wait_until(lambda: live.stats()["pool_reserved_blocks"] == 4)
        assert gauges() == (8, 4, 1, 1)
        assert rank.reply(request).result()["kept"] == 4
        assert gauges() == (12, 0, 1, 1)
        rank.call("release", lease=lease)
        assert gauges() == (12, 0, 0, 0)
        pool = live.ask("info")["pool"]
        assert pool["size_bytes"] == 1 << 20
        assert pool["extents"] * pool["extent_bytes"] == 1 << 20
        live.ask("clear")
        assert gauges() == (0, 0, 0, 0)


def test_info_shows_engines_ranks_and_sessions(live: Observed) -> None:
    with (
        Rank(live.socket, plain_shard(SIZE, 4), engine="shown").register(place="tp 0 of 1", block_tokens=16) as rank,
        BlockCache("cache", 4096, socket=live.socket),
    ):
        rank.ready()
        assert rank.store(hashes("a", "b"), [0, 1]) == 2
        info = live.ask("info")
        engine = next(engine for engine in info["engines"] if engine["engine"] == "shown")
        assert (engine["ready"], engine["problem"], engine["world"], engine["model"]) == (True, "", 1, "test")
        shown = engine["ranks"][0]
        assert (shown["place"], shown["block_bytes"], shown["layers"]) == ("tp 0 of 1", SIZE, 1)
        namespace = info["namespaces"][engine["namespace"]]
        assert (namespace["block_bytes"], namespace["block_tokens"], namespace["blocks"]) == (SIZE, 16, 2)
        assert {session["name"] for session in info["sessions"]} == {"rank", "blocks"}
        assert str(rank.channel.session) not in str(info)


# -- what stays out of the log ------------------------------------------------------------------------------


def test_the_log_tells_no_keys_tokens_or_payloads(live: Observed) -> None:
    payload, key = b"a-secret-payload", hashes("a-secret-prompt")[0]
    with (
        Rank(live.socket, plain_shard(SIZE, 4), engine="quiet").register() as rank,
        BlockCache("cache", 4096, socket=live.socket) as cache,
    ):
        rank.ready()
        rank.memory[: len(payload)] = list(payload)
        assert rank.store([key], [0]) == 1
        _, lease = rank.match([key])
        assert rank.load(lease, [1]) == 1
        assert cache.put({key: payload * 256}) == 1
        assert cache.get([key]) == [payload * 256]
        with pytest.raises(UsageError):
            rank.load(lease, [99])
        with pytest.raises(ProtocolError):
            rank.call("match", keys=key[:-1])
        live.faults("store=fail")
        assert rank.store(hashes("fails"), [0]) == 0
        live.faults("")
        secrets = [key.hex(), block_key(rank.namespace, 0, key).hex(), str(rank.channel.session), "secret"]
        secrets += [str(lease), rank.shared.handle.name, repr(key), repr(payload)]
    live.settle()
    log = live.handle.text()
    for secret in secrets:
        assert secret not in log
    assert max(len(line) for line in log.splitlines()) < 2048


def test_blocks_cost_no_lines_in_the_log(live: Observed) -> None:
    with BlockCache("cache", 4096, socket=live.socket) as cache:
        before = live.handle.text()
        for number in range(50):
            assert cache.put({hashes(number)[0]: bytes(4096)}) == 1
            cache.get(hashes(number, "none"))
        assert live.handle.text() == before


# -- the largest requests -----------------------------------------------------------------------------------


def test_the_longest_requests_are_served_while_others_go_on(live: Observed) -> None:
    with (
        Rank(live.socket, plain_shard(SIZE, 4), engine="long").register() as rank,
        Victim(live.socket) as victim,
    ):
        rank.ready()
        victim.check()
        keys = b"".join(number.to_bytes(32, "big") for number in range(MAX_KEYS))
        blocks = wire.pack_blocks([0] * MAX_KEYS)
        started = time.monotonic()
        assert rank.call("contains", keys=keys)["found"] == bytes(MAX_KEYS)
        assert rank.call("match", keys=keys)["hit"] == 0
        assert rank.call("get", job=rank.next_job(), keys=keys, blocks=blocks)["found"] == bytes(MAX_KEYS)
        assert rank.call("put", job=rank.next_job(), keys=keys, blocks=blocks)["kept"] < SLOTS
        assert time.monotonic() - started < 20.0
        victim.check()
        with pytest.raises(ProtocolError, match="at most 65536 records"):
            rank.call("match", keys=keys + bytes(32))


def test_a_layout_of_too_many_pieces_is_refused(live: Observed) -> None:
    with Victim(live.socket) as victim:
        victim.check()
        pieces = 1 << 22
        run = Run(0, 0, pieces, 0, 1, pieces, 0, 1)
        shard = RankShard((Layer("layer", pieces, (run,)),), 1)
        with (
            Rank(live.socket, shard, engine="fine").hello() as rank,
            pytest.raises(LayoutRefused, match="pieces; at most"),
        ):
            rank.register()
        victim.check()


def test_engines_that_come_and_go_leave_no_memory(live: Observed) -> None:
    with BlockCache("stays", 4096, socket=live.socket):

        def come_and_go(times: int) -> None:
            for number in range(times):
                name = f"engine-{number % 3}"
                with Rank(live.socket, plain_shard(4096, 16), engine=name).register() as rank:
                    rank.ready()
                    assert rank.store(hashes(number), [0]) == 1
                    rank.match(hashes(number))

        come_and_go(20)
        before = resident_memory(live.handle.pid), resident_memory(live.mover())
        come_and_go(60)
        after = resident_memory(live.handle.pid), resident_memory(live.mover())
        assert after[0] - before[0] < 1 << 20
        assert after[1] - before[1] < 1 << 20


def test_a_payload_larger_than_the_pool_streams_through_it(live: Observed) -> None:
    before = resident_memory(live.handle.pid)
    with BlockCache("stream", SIZE, arena_blocks=4, socket=live.socket) as cache:
        for number in range(0, 400, 4):
            some = {key: content(key, SIZE) for key in hashes(*range(number, number + 4))}
            assert cache.put(some) == 4
            assert cache.get(list(some)) == list(some.values())
    assert live.stats()["pool_resident_blocks"] <= SLOTS
    assert resident_memory(live.handle.pid) - before < 4 << 20
