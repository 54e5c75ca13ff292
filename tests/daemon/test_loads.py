"""Blocks on their way to engines: byte for byte, in full or not at all, and never a stranger's."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import pytest

from hpkv_client.client import BlockCache
from hpkv_client.errors import CopyFailed
from hpkv_client.types import Layer, RankShard, Run
from tests.engines import engine_name, piece, rank_of, ready_engine, store_all
from tests.support import (
    Bytes,
    KvRank,
    Observed,
    Rank,
    canonical_block,
    content,
    hashes,
    observed_daemon,
    plain_shard,
    wait_until,
)

SIZES = [1, 4095, 4096, 4097, 1 << 20]
LARGE = 1 << 22
"""A mover looks for messages after every second block of this size."""


# -- every byte ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_blocks_of_any_size_come_back_byte_for_byte(live: Observed, size: int) -> None:
    blocks = {key: content(key, size) for key in hashes(*range(10))}
    with BlockCache("sizes", size, arena_blocks=4, socket=live.socket) as cache:
        assert cache.put(blocks) == len(blocks)
        with BlockCache("sizes", size, arena_blocks=3, socket=live.socket) as other:
            assert other.get(list(blocks)) == list(blocks.values())
        assert cache.get([*hashes("none"), *blocks]) == [None, *blocks.values()]


@pytest.mark.parametrize("size", SIZES)
def test_a_load_writes_its_block_and_not_a_byte_beside_it(live: Observed, size: int) -> None:
    with rank_of(live, size, 5) as rank:
        rank.block(0)[:] = np.frombuffer(content(b"x", size), np.uint8)
        assert rank.store(hashes("x"), [0]) == 1
        rank.memory[:] = 0xEE
        _, lease = rank.match(hashes("x"))
        assert rank.load(lease, [2]) == 1
        assert rank.block(2).tobytes() == content(b"x", size)
        for other in (0, 1, 3, 4):
            assert (rank.block(other) == 0xEE).all()


def test_recycled_slots_hold_no_old_bytes(live: Observed) -> None:
    full = dict.fromkeys(hashes(*range(200)), b"\xff" * 4097)
    with BlockCache("recycled", 4097, socket=live.socket) as cache:
        assert cache.put(full) == len(full)
        live.ask("clear")
        fresh = {key: bytes(4097) for key in hashes(*range(1000, 1200))}
        assert cache.put(fresh) == len(fresh)
        assert cache.get(list(fresh)) == list(fresh.values())
        assert cache.get(list(full)) == [None] * len(full)


def strided_shard(order: Sequence[int], pieces: int, fragment: int, blocks: int) -> RankShard:
    """A layer whose fragments lie in the given order, far apart, as two interleaved strided runs."""
    stride = 4 * fragment * pieces
    runs = tuple(
        Run(
            region=0,
            local_offset=128 + start * fragment * 2,
            block_stride=stride,
            canonical_offset=half * fragment,
            fragment=fragment,
            count=pieces // 2,
            local_step=4 * fragment,
            canonical_step=2 * fragment,
        )
        for half, start in enumerate(order)
    )
    return RankShard((Layer("layer.0", pieces * fragment, runs),), blocks)


@pytest.mark.parametrize("fragment", [1, 7, 512])
def test_strided_runs_scatter_and_gather(live: Observed, fragment: int) -> None:
    pieces, wanted = 16, content(b"strided", 16 * fragment)
    shards = [strided_shard(order, pieces, fragment, 4) for order in ((0, 1), (1, 0))]
    with (
        Rank(live.socket, shards[0], engine=engine_name()).register() as writer,
        Rank(live.socket, shards[1], engine=engine_name()).register() as reader,
    ):
        writer.ready()
        reader.ready()
        canonical = np.frombuffer(wanted, np.uint8).reshape(pieces, fragment)

        def local(rank: Rank, swapped: int) -> Bytes:
            start = 128 + 2 * rank.shard.layers[0].runs[0].block_stride
            space = rank.memory[start : start + 2 * pieces * fragment].reshape(pieces, 2, fragment)[:, 0]
            return space.reshape(pieces // 2, 2, fragment)[:, ::-1] if swapped else space.reshape(-1, 2, fragment)

        local(writer, 0)[:] = canonical.reshape(-1, 2, fragment)
        assert writer.store(hashes("s"), [2]) == 1
        _, lease = reader.match(hashes("s"))
        assert reader.load(lease, [2]) == 1
        assert local(reader, 1).tobytes() == wanted
        touched = np.zeros(len(reader.memory), bool)
        written = reader.memory != 0
        start = 128 + 2 * reader.shard.layers[0].runs[0].block_stride
        touched[start : start + 2 * pieces * fragment].reshape(pieces, 2, fragment)[:, 0] = True
        assert not (written & ~touched).any()


# -- parallel engines ---------------------------------------------------------------------------------------


SPLITS = {
    "one rank": [{}],
    "tp2": [{"tp": (0, 2)}, {"tp": (1, 2)}],
    "tp4": [{"tp": (rank, 4)} for rank in range(4)],
    "pp2 (1, 3)": [{"layers": (0, 1), "pp": (0, 2)}, {"layers": (1, 4), "pp": (1, 2)}],
    "pp2 (2, 2)": [{"layers": (0, 2), "pp": (0, 2)}, {"layers": (2, 4), "pp": (1, 2)}],
    "tp2 pp2": [{"tp": (tp, 2), "layers": (2 * pp, 2 * pp + 2), "pp": (pp, 2)} for pp in range(2) for tp in range(2)],
}


@pytest.mark.parametrize("order", ["hnd", "nhd"])
def test_blocks_stored_under_any_split_are_loaded_under_any_other(live: Observed, order: str) -> None:
    with ExitStack() as stack:
        engines = {}
        for split, places in SPLITS.items():
            if order == "nhd" and split == "tp4":
                # With one head a rank, nothing tells this order from the other: such an engine is one of those.
                continue
            name = engine_name()
            ranks = [KvRank(live.socket, engine=name, order=order, namespace="splits", **place) for place in places]
            engines[split] = ready_engine(stack, ranks)
        assert len(live.ask("info")["namespaces"]) == len({n["id"] for n in live.ask("info")["namespaces"]})
        for writer, ranks in engines.items():
            live.ask("clear")
            blocks = {key: canonical_block((writer, key), order) for key in hashes("a", "b")}
            for rank in ranks:
                for number, canonical in enumerate(blocks.values()):
                    rank.fill(number, canonical)
            assert store_all(ranks, list(blocks), [0, 1]) == 2
            for reader, others in engines.items():
                hit, lease = others[0].match(list(blocks))
                assert hit == 2, (writer, reader)
                for rank in others:
                    rank.memory[:] = 0
                    assert rank.load(lease, [4, 3]) == 2
                for rank in others:
                    assert rank.holds(4, blocks[hashes("a")[0]]), (writer, reader)
                    assert rank.holds(3, blocks[hashes("b")[0]]), (writer, reader)
                    assert not rank.view[:, (0, 1, 2, 5)].any()
                assert others[0].call("release", lease=lease)["released"]


def test_two_element_orders_share_no_blocks(live: Observed) -> None:
    with (
        KvRank(live.socket, engine=engine_name(), order="hnd").register() as one,
        KvRank(live.socket, engine=engine_name(), order="nhd").register() as other,
    ):
        one.ready()
        other.ready()
        assert one.store(hashes("a"), [0]) == 1
        assert one.match(hashes("a"))[0] == 1
        assert other.match(hashes("a"))[0] == 0


def test_a_stage_without_layers_takes_part_in_every_store_and_load(live: Observed) -> None:
    name = engine_name()
    empty = Rank(live.socket, plain_shard(100, 4), engine=name, rank=1, world=2)
    with Rank(live.socket, piece(0, 100), engine=name, world=2) as rank, empty:
        rank.register()
        empty.register(layers=[])
        rank.ready()
        rank.memory[:100] = 7
        assert store_all([rank, empty], hashes("a"), [0]) == 1
        _, lease = rank.match(hashes("a"))
        assert [rank.load(lease, [2]), empty.load(lease, [2])] == [1, 1]
        assert (rank.memory[200:300] == 7).all()
        assert not empty.memory.any()


# -- loads that end early -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 4, 8])
def test_a_load_that_fails_anywhere_says_so(live: Observed, nth: int) -> None:
    before = live.stats()
    with rank_of(live, 4096, 16) as rank:
        prefix = hashes(*range(8))
        for number, key in enumerate(prefix):
            rank.block(number)[:] = np.frombuffer(content(key, 4096), np.uint8)
        assert rank.store(prefix, range(8)) == 8
        _, lease = rank.match(prefix)
        live.faults(f"load@{nth}=fail")
        with pytest.raises(CopyFailed, match="recompute"):
            rank.load(lease, range(8, 16))
        assert live.stats()["load_failures"] - before["load_failures"] == 1
        assert live.stats()["loaded_blocks"] == before["loaded_blocks"]
        live.faults("")
        assert rank.load(lease, range(8, 16)) == 8
        assert [rank.block(8 + n).tobytes() for n in range(8)] == [content(key, 4096) for key in prefix]


def loaded_slowly(live: Observed, rank: Rank, blocks: int) -> tuple[int, int]:
    """Start a slow load of a stored prefix into the second half of the rank's memory; request and job."""
    prefix = hashes(*range(blocks))
    for number in range(blocks):
        rank.block(number)[:] = 0x11
    assert rank.store(prefix, range(blocks)) == blocks
    hit, lease = rank.match(prefix)
    assert hit == blocks
    live.faults("load=delay:0.08")
    job = rank.next_job()
    request = rank.ask_load(lease, range(blocks, 2 * blocks), job=job)
    wait_until(lambda: not rank.control.quiet())
    return request, job


def test_a_load_that_is_withdrawn_writes_no_more(live: Observed) -> None:
    with rank_of(live, LARGE, 12) as rank:
        request, job = loaded_slowly(live, rank, 6)
        rank.control.withdraw_through(job)
        wait_until(rank.control.quiet)
        rank.memory[:] = 0xAA
        with pytest.raises(CopyFailed):
            rank.reply(request).result()
        time.sleep(0.2)
        assert (rank.memory == 0xAA).all()


def test_a_cancel_is_confirmed_by_the_end_of_the_load(live: Observed) -> None:
    with rank_of(live, LARGE, 12) as rank:
        request, job = loaded_slowly(live, rank, 6)
        assert rank.call("cancel", job=job)["running"] is True
        with pytest.raises(CopyFailed, match="cancelled"):
            rank.reply(request).result()
        rank.memory[:] = 0xAA
        time.sleep(0.2)
        assert (rank.memory == 0xAA).all()
        assert rank.call("cancel", job=job)["running"] is False
        live.settle(sessions=2, engines=2, leases=1, pool_pinned_blocks=1)


# -- loads beside others ------------------------------------------------------------------------------------


def test_a_load_outlives_a_clear_with_the_bytes_it_was_promised(live: Observed) -> None:
    with rank_of(live, LARGE, 8) as rank, BlockCache("other", LARGE, arena_blocks=4, socket=live.socket) as other:
        request, _ = loaded_slowly(live, rank, 4)
        assert live.ask("clear")["cleared_blocks"] == 4
        assert rank.match(hashes(*range(4)))[0] == 0
        live.faults("load=delay:0.05")
        assert other.put(dict.fromkeys(hashes(*range(16)), b"\x99" * LARGE)) > 0
        assert rank.reply(request).result()["loaded"] == 4
        assert all((rank.block(number) == 0x11).all() for number in range(4, 8))


def test_racing_writers_and_readers_see_whole_payloads_only() -> None:
    size, keys = 1 << 16, hashes(*range(10))
    problems: list[str] = []
    seen = [0]

    with observed_daemon(HPKV_KV_MEM_POOL_SIZE="1m") as live:
        stop = time.monotonic() + 1.5

        def work(number: int) -> None:
            generator = np.random.default_rng(number)
            with BlockCache("race", size, arena_blocks=10, socket=live.socket) as cache:
                while time.monotonic() < stop and not problems:
                    some = [keys[i] for i in generator.permutation(10)[: generator.integers(1, 10)]]
                    if number % 2:
                        mark = generator.bytes(8)
                        cache.put({key: (key[:8] + mark) * (size // 16) for key in some})
                        # Blocks of the same size that push the others out.
                        cache.put({generator.bytes(32): generator.bytes(16) * (size // 16) for _ in range(3)})
                        continue
                    for key, block in zip(some, cache.get(some), strict=True):
                        if block is None:
                            continue
                        seen[0] += 1
                        if block[:8] != key[:8] or block != block[:16] * (size // 16):
                            problems.append(f"{key.hex()}: {block[:16].hex()}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        assert seen[0] > 50
        stats = live.stats()
        assert stats["evicted_blocks"] > 50
        live.assert_sound()


def test_a_small_load_passes_a_large_one(live: Observed) -> None:
    with rank_of(live, 1 << 18, 128) as large, rank_of(live, 1 << 18, 4) as small:
        prefix = hashes(*range(128))
        assert large.store(prefix, range(128)) == 128
        live.faults("load=delay:0.008")
        slow = large.ask_load(large.match(prefix)[1], range(128))
        _, lease = small.match(prefix[:2])
        wait_until(lambda: not large.control.quiet())
        assert small.load(lease, [0, 1]) == 2
        assert not large.has_reply(slow)
        assert large.reply(slow).result()["loaded"] == 128


def test_loads_pass_stores(live: Observed) -> None:
    with rank_of(live, 1 << 20, 40) as rank:
        assert rank.store(hashes("a"), [0]) == 1
        _, lease = rank.match(hashes("a"))
        live.faults("store=delay:0.02")
        stores = rank.ask_store(hashes(*range(40)), range(40))
        wait_until(lambda: not rank.control.quiet())
        assert rank.load(lease, [39]) == 1
        assert not rank.has_reply(stores)
        assert rank.reply(stores).result()["kept"] == 40
