"""The time-bounded right to read: what is leased stays, and what nobody holds any more goes."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hpkv_client.client import BlockCache
from hpkv_client.errors import LayoutRefused, LeaseLost, UsageError
from hpkv_client.wire import pack_blocks
from tests.engines import engine_name, rank_of
from tests.support import (
    Observed,
    Rank,
    content,
    hashes,
    observed_daemon,
    plain_shard,
)


def test_nonsense_about_blocks_is_refused_and_costs_nothing(live: Observed) -> None:
    with rank_of(live, 4096, 4) as rank:
        assert rank.store(hashes("a", "b"), [0, 1]) == 2
        _, lease = rank.match(hashes("a", "b"))
        for blocks in ([4], [1 << 31], [0, 4]):
            with pytest.raises(UsageError, match="of an engine with 4 blocks"):
                rank.load(lease, blocks)
        with pytest.raises(UsageError, match="covers 2 blocks"):
            rank.load(lease, [0, 1, 2])
        with pytest.raises(UsageError, match="covers 2 blocks"):
            rank.load(lease, [0], first=2)
        with pytest.raises(LeaseLost):
            rank.load(lease + 1, [0])
        with pytest.raises(UsageError, match="2 keys for 1 blocks"):
            rank.store(hashes("c", "d"), [0])
        with pytest.raises(UsageError, match="1 keys for 2 blocks"):
            rank.call("get", job=rank.next_job(), keys=rank.keys(hashes("a")), blocks=pack_blocks([0, 1]))
        assert rank.load(lease, []) == 0
        assert rank.store([], []) == 0
        assert rank.match([]) == (0, 0)
        assert rank.call("get", job=rank.next_job(), keys=b"", blocks=b"")["found"] == b""
        assert rank.call("release", lease=lease)["released"] is True


def test_blocks_that_form_no_prefix_are_leased_together(live: Observed) -> None:
    with rank_of(live, 4096, 8) as rank:
        for number, key in enumerate(hashes(*range(4))):
            rank.block(number)[:] = np.frombuffer(content(key, 4096), np.uint8)
        keys = rank.keys(hashes(*range(4)))
        put = rank.call("put", job=rank.next_job(), keys=keys, blocks=pack_blocks(range(4)))
        assert put == {"kept": 4, "dropped": 0, "partial": False}
        answer = rank.call("acquire", keys=rank.keys(hashes(3, "none", 1)))
        assert answer["found"] == b"\x01\x00\x01"
        lease = answer["lease"]
        assert live.gauges()["pool_pinned_blocks"] == 2
        assert rank.load(lease, [6], first=2) == 1
        assert rank.load(lease, [7], first=0) == 1
        assert rank.block(6).tobytes() == content(hashes(1)[0], 4096)
        assert rank.block(7).tobytes() == content(hashes(3)[0], 4096)
        for first, blocks in ((1, [5]), (0, [5, 5]), (0, [5, 5, 5])):
            with pytest.raises(UsageError, match="only the blocks that were found"):
                rank.load(lease, blocks, first=first)
        with pytest.raises(UsageError, match="covers 3 blocks"):
            rank.load(lease, [5], first=3)
        assert rank.call("release", lease=lease)["released"]
        assert rank.call("acquire", keys=rank.keys(hashes("none"))) == {"found": b"\x00", "lease": 0, "coming": 0}
        assert live.gauges()["pool_pinned_blocks"] == 0


def test_what_is_leased_stays_while_others_stream_through() -> None:
    with (
        observed_daemon(HPKV_KV_MEM_POOL_SIZE="1m") as live,
        Rank(live.socket, plain_shard(1 << 16, 8)).register() as rank,
        BlockCache("stream", 1 << 16, arena_blocks=8, socket=live.socket) as stream,
    ):
        rank.ready()
        prefix = hashes(*range(4))
        for number, key in enumerate(prefix):
            rank.block(number)[:] = np.frombuffer(content(key, 1 << 16), np.uint8)
        assert rank.store(prefix, range(4)) == 4
        hit, lease = rank.match(prefix)
        assert hit == 4
        for round_number in range(10):
            assert stream.put({key: bytes(1 << 16) for key in hashes(*((round_number, n) for n in range(6)))}) == 6
        assert live.stats()["evicted_blocks"] >= 40
        assert rank.load(lease, [7, 6, 5, 4]) == 4
        assert [rank.block(7 - n).tobytes() for n in range(4)] == [content(key, 1 << 16) for key in prefix]
        assert rank.call("release", lease=lease)["released"]
        assert stream.put({key: bytes(1 << 16) for key in hashes(*(("more", n) for n in range(32)))}) == 32
        assert rank.match(prefix)[0] == 0
        assert live.ask("check")["ok"]


def test_a_pool_full_of_leased_blocks_refuses_at_once_and_recovers() -> None:
    with (
        observed_daemon(HPKV_KV_MEM_POOL_SIZE="1m") as live,
        Rank(live.socket, plain_shard(1 << 16, 16)).register() as rank,
        BlockCache("stream", 1 << 16, arena_blocks=8, socket=live.socket) as stream,
    ):
        rank.ready()
        prefix = hashes(*range(16))
        assert rank.store(prefix, range(16)) == 16
        hit, lease = rank.match(prefix)
        assert hit == 16
        said = live.handle.text()
        started = time.monotonic()
        for _ in range(20):
            assert stream.put({key: bytes(1 << 16) for key in hashes("x", "y")}) == 0
        assert time.monotonic() - started < 5.0
        assert live.stats()["dropped_full_blocks"] == 40
        assert live.handle.text() == said
        assert stream.get(hashes("x")) == [None]
        assert rank.load(lease, range(16)) == 16
        assert rank.call("release", lease=lease)["released"]
        assert stream.put({key: bytes(1 << 16) for key in hashes("x", "y")}) == 2


def test_a_block_larger_than_the_pool_is_refused_at_once(live: Observed) -> None:
    started = time.monotonic()
    with (
        Rank(live.socket, plain_shard(200 << 20, 1), engine=engine_name()).hello() as rank,
        pytest.raises(LayoutRefused, match="does not fit into a pool of 100663296 bytes"),
    ):
        rank.register()
    with pytest.raises(LayoutRefused, match="larger --pool-size"):
        BlockCache("large", 200 << 20, arena_blocks=1, socket=live.socket)
    assert time.monotonic() - started < 10.0


def test_releasing_what_one_does_not_hold_changes_nothing(live: Observed) -> None:
    with rank_of(live, 4096, 8) as one, rank_of(live, 4096, 8) as other:
        assert one.store(hashes(*range(8)), range(8)) == 8
        _, lease = one.match(hashes(*range(8)))
        _, mine = other.match(hashes(*range(4)))
        assert other.call("release", lease=lease)["released"] is False
        with pytest.raises(LeaseLost):
            other.load(lease, [0])
        assert other.call("release", lease=mine)["released"] is True
        assert other.call("release", lease=mine)["released"] is False
        assert live.gauges()["leases"] == 1
        assert one.load(lease, range(8)) == 8
        assert one.call("release", lease=lease)["released"] is True
        assert live.gauges()["pool_pinned_blocks"] == 0


def test_leases_end_by_themselves_but_not_under_a_load() -> None:
    with (
        observed_daemon(HPKV_LEASE_SECONDS="0.5") as live,
        Rank(live.socket, plain_shard(4096, 32)).register() as rank,
        Rank(live.socket, plain_shard(4096, 4), engine="idle").register() as idle,
    ):
        rank.ready()
        idle.ready()
        prefix = hashes(*range(16))
        assert rank.store(prefix, range(16)) == 16
        _, forgotten = idle.match(prefix)
        _, lease = rank.match(prefix)
        live.faults("load=delay:0.05")
        request = rank.ask_load(lease, range(16, 32))
        # Nothing else is asked meanwhile: time alone ends the lease that nobody uses.
        assert rank.reply(request).result()["loaded"] == 16
        assert live.gauges()["leases"] == 1
        assert live.stats()["expired_leases"] == 1
        live.faults("")
        with pytest.raises(LeaseLost, match="unknown or expired"):
            idle.load(forgotten, [0])
        assert rank.load(lease, [16]) == 1
        live.settle(sessions=2, engines=2)
        live.faults("load=delay:0.05")
        blocks = pack_blocks(range(16))
        request = rank.ask("get", job=rank.next_job(), keys=rank.keys(prefix), blocks=blocks)
        time.sleep(0.65)
        assert live.gauges()["pool_pinned_blocks"] == 16
        assert rank.reply(request).result()["found"] == b"\x01" * 16
        assert live.gauges()["leases"] == 0
        assert live.stats()["expired_leases"] == 2
