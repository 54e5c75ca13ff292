"""Blocks on the move between ranks and the pool: byte for byte, all or nothing, and never a stranger's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import numpy as np
import pytest

from hpkv_client.client import BlockCache
from hpkv_client.errors import CopyFailed, HpkvError, LayoutRefused, LeaseLost, UsageError
from hpkv_client.types import Layer, RankShard, Run
from hpkv_client.wire import pack_blocks
from tests.support import (
    Bytes,
    Child,
    ImpatientDaemon,
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

_engines = count()


@pytest.fixture(scope="module")
def shared() -> Iterator[Observed]:
    """The daemon of this module."""
    with observed_daemon(HPKV_KV_MEM_POOL_SIZE="96m") as observed:
        yield observed


@pytest.fixture(scope="module")
def resting(shared: Observed) -> Iterator[Rank]:
    """A rank that does nothing but keep the mover."""
    with Rank(shared.socket, plain_shard(4096, 1), engine="resting").register() as rank:
        rank.ready()
        yield rank


@pytest.fixture
def live(shared: Observed, resting: Rank) -> Iterator[Observed]:
    """The shared daemon, empty before the test and clean after it."""
    assert resting.call("heartbeat")["ready"]
    shared.ask("clear")
    yield shared
    shared.faults("")
    shared.settle(sessions=1, engines=1)
    assert shared.stats()["internal_errors"] == 0
    assert "Traceback" not in shared.handle.text()


def engine_name() -> str:
    """One that no test used before."""
    return f"engine-{next(_engines)}"


def rank_of(live: Observed, block_bytes: int, blocks: int, **more: Any) -> Rank:
    """A ready engine of one rank with plain blocks."""
    return Rank(live.socket, plain_shard(block_bytes, blocks), engine=engine_name(), **more).register().ready()


def ready_engine(stack: ExitStack, ranks: Sequence[Rank]) -> list[Rank]:
    """Register all ranks of an engine."""
    for rank in ranks:
        stack.enter_context(rank).register()
    for rank in ranks:
        rank.ready()
    return list(ranks)


def store_all(ranks: Sequence[Rank], prefix_hashes: Sequence[bytes], blocks: Sequence[int], **more: Any) -> int:
    """One store over all ranks of an engine; how many blocks are kept in the end."""
    requests = [rank.ask_store(prefix_hashes, blocks, **more) for rank in ranks]
    answers = [rank.reply(request).result() for rank, request in zip(ranks, requests, strict=True)]
    return int(max(answer["kept"] for answer in answers))


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


@pytest.mark.parametrize(("heads", "latent"), [(1, True), (1, False), (2, False)], ids=["mla", "gqa 1", "gqa 2"])
def test_replicas_store_one_copy_and_share_the_work(live: Observed, heads: int, latent: bool) -> None:
    blocks = 48
    prefix = hashes(*range(blocks))
    name = engine_name()
    with ExitStack() as stack:
        ranks = ready_engine(
            stack,
            [
                KvRank(
                    live.socket,
                    engine=name,
                    tp=(rank, 4),
                    heads=heads,
                    latent=latent,
                    blocks=blocks,
                    namespace=f"replicas-{heads}-{latent}",
                )
                for rank in range(4)
            ],
        )
        canonical = [canonical_block(key, heads=heads) for key in prefix]
        replicas = ranks[0].shard.replicas
        for rank in ranks:
            for number, block in enumerate(canonical):
                # Only what a replica is to write is right in its memory: nobody else's copy may be used.
                mine = number % replicas == rank.shard.replica
                rank.fill(number, block if mine else np.full_like(block, 0xBB))
        assert store_all(ranks, prefix, range(blocks)) == blocks
        stats = live.stats()
        assert stats["pool_resident_blocks"] == blocks
        assert stats["pool_resident_bytes"] == blocks * canonical[0].size
        (engine,) = [engine for engine in live.ask("info")["engines"] if engine["engine"] == name]
        assert {rank["written_blocks"] for rank in engine["ranks"]} == {blocks // replicas}
        hit, lease = ranks[0].match(prefix)
        assert hit == blocks
        for rank in ranks:
            rank.memory[:] = 0
            assert rank.load(lease, range(blocks)) == blocks
            assert all(rank.holds(number, block) for number, block in enumerate(canonical))


@pytest.mark.parametrize("survivor", [0, 1])
def test_a_replica_may_die_after_the_commit(live: Observed, survivor: int) -> None:
    prefix = hashes(*range(6))
    code = (
        "rank = KvRank(socket, engine='mortal', tp=({0}, 2), heads=1, latent=True, namespace='mortal').register()\n"
        "rank.ready(20); keys = hashes(*range(6))\n"
        "for number, key in enumerate(keys): rank.fill(number, canonical_block(key, heads=1))\n"
        "wait(); rank.reply(rank.ask_store(keys, range(6))); say('stored'); wait()\n"
    )
    with Child(live.handle, code.format(0)) as first, Child(live.handle, code.format(1)) as second:
        wait_until(lambda: [engine["ready"] for engine in live.ask("info")["engines"]] == [True, True], 20)
        for child in (first, second):
            child.tell()
        assert [first.heard(), second.heard()] == ["stored", "stored"]
        (second, first)[survivor].close()
        name = engine_name()
        with KvRank(live.socket, engine=name, heads=1, latent=True, namespace="mortal").register() as reader:
            reader.ready()
            hit, lease = reader.match(prefix)
            assert hit == 6
            assert reader.load(lease, range(6)) == 6
            for number, key in enumerate(prefix):
                assert reader.holds(number, canonical_block(key, heads=1))


# -- engines that contradict themselves ---------------------------------------------------------------------


def piece(offset: int, size: int, of: int = 100) -> RankShard:
    """A rank's share of a layer: one run."""
    return RankShard((Layer("layer.0", of, (Run(0, 0, size, offset, size),)),), 4)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([piece(0, 60), piece(50, 50)], "hold twice bytes 50"),
        ([piece(0, 50), piece(0, 50)], "hold twice bytes 0"),
        ([piece(0, 40), piece(50, 50)], "do not hold bytes 40"),
        ([piece(0, 50), piece(50, 40)], "hold 90 of 100 bytes"),
        ([piece(0, 50), piece(50, 50, 101)], "disagree on the size of layer"),
    ],
)
def test_shards_that_do_not_tile_a_block_are_refused(live: Observed, shards: list[RankShard], message: str) -> None:
    name = engine_name()
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Rank(live.socket, shard, engine=name, rank=number, world=2))
            for number, shard in enumerate(shards)
        ]
        ranks[0].register()
        with pytest.raises(LayoutRefused, match=message):
            ranks[1].register()
        assert message in ranks[0].problem()
        assert "not cached" in live.handle.text()
        with pytest.raises(HpkvError, match="not ready"):
            ranks[0].store(hashes("a"), [0])


def test_runs_outside_of_the_registered_memory_are_refused(live: Observed) -> None:
    with Rank(live.socket, plain_shard(4096, 4), engine=engine_name()).hello() as rank:
        with pytest.raises(HpkvError, match="leaves its region"):
            rank.call("register", **rank.registration(blocks=5))
        outside = [["layer.0", 4096, [[1, 0, 4096, 0, 4096, 1, 0, 0]]]]
        with pytest.raises(HpkvError, match="leaves its region"):
            rank.call("register", **rank.registration(layers=outside))


def test_ranks_of_other_models_do_not_join(live: Observed) -> None:
    name = engine_name()
    with (
        Rank(live.socket, piece(0, 50), engine=name, world=2).register(),
        Rank(live.socket, piece(50, 50), engine=name, rank=1, world=2).hello() as other,
    ):
        with pytest.raises(UsageError, match="rank 1 of 3 in an engine of 2 ranks"):
            other.register(world=3)
        with pytest.raises(UsageError, match="different namespaces"):
            other.register(namespace=bytes(32))


def test_ranks_that_name_other_blocks_store_nothing(live: Observed) -> None:
    name = engine_name()
    with ExitStack() as stack:
        ranks = ready_engine(
            stack,
            [Rank(live.socket, piece(50 * n, 50), engine=name, rank=n, world=2, namespace="apart") for n in range(2)],
        )
        job = ranks[0].next_job()
        first = ranks[0].ask_store(hashes("a", "b"), [0, 1], job=job)
        with pytest.raises(UsageError, match="names other blocks"):
            ranks[1].store(hashes("a", "c"), [0, 1], job=job)
        assert ranks[0].reply(first).result()["kept"] == 0
        assert ranks[0].match(hashes("a", "b"))[0] == 0
        assert ranks[1].store(hashes("a", "b"), [0, 1], job=job) == 0
        assert ranks[0].match(hashes("a", "b"))[0] == 0


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


def test_a_store_that_a_rank_never_joins_is_given_up() -> None:
    with observed_daemon(ImpatientDaemon) as live, ExitStack() as stack:
        ranks = ready_engine(
            stack, [Rank(live.socket, piece(50 * n, 50), rank=n, world=2, namespace="late") for n in range(2)]
        )
        job = ranks[0].next_job()
        answer = ranks[0].reply(ranks[0].ask_store(hashes("a"), [0], job=job)).result()
        assert answer == {"kept": 0, "dropped": 0, "partial": True}
        live.settle(4.0, sessions=2, engines=1, pool_reserved_blocks=0)
        assert live.stats()["abandoned_jobs"] == 1
        assert ranks[1].store(hashes("a"), [0], job=job) == 0
        assert store_all(ranks, hashes("a"), [0], job=job + 1) == 1


def test_a_store_job_is_answered_once(live: Observed) -> None:
    with rank_of(live, 4096, 4) as rank:
        job = rank.next_job()
        assert rank.store(hashes("a"), [0], job=job) == 1
        with pytest.raises(UsageError, match="is over"):
            rank.store(hashes("a"), [0], job=job)


# -- all or nothing -----------------------------------------------------------------------------------------


def test_a_block_is_seen_after_its_commit_and_not_before(live: Observed) -> None:
    with rank_of(live, 4096, 8) as writer, rank_of(live, 4096, 8) as reader:
        live.faults("commit=delay:0.4")
        request = writer.ask_store(hashes(*range(4)), range(4))
        wait_until(lambda: live.stats()["pool_reserved_blocks"] == 4)
        while not writer.has_reply(request):
            assert reader.match(hashes(*range(4)))[0] == 0 or writer.has_reply(request)
            assert live.stats()["pool_resident_blocks"] in (0, 4)
            time.sleep(0.02)
        assert writer.reply(request).result() == {"kept": 4, "dropped": 0, "partial": False}
        assert reader.match(hashes(*range(4)))[0] == 4


@pytest.mark.parametrize("fault", ["commit=fail", "store@1=fail", "store@3=fail", "store@6=fail"])
def test_a_store_that_fails_anywhere_is_not_seen_at_all(live: Observed, fault: str) -> None:
    before = live.stats()
    with rank_of(live, 4096, 8) as rank:
        live.faults(fault)
        request = rank.ask_store(hashes(*range(6)), range(6))
        assert rank.reply(request).result() == {"kept": 0, "dropped": 6, "partial": False}
        assert rank.match(hashes(*range(6)))[0] == 0
        after = live.stats()
        assert after["store_failures"] - before["store_failures"] == 1
        assert after["stored_blocks"] == before["stored_blocks"]
        assert after["aborted_blocks"] - before["aborted_blocks"] == 6
        live.faults("")
        assert rank.store(hashes(*range(6)), range(6)) == 6


@pytest.mark.parametrize("number", [0, 1])
def test_one_rank_that_fails_fails_the_store_of_all(live: Observed, number: int) -> None:
    name = engine_name()
    with ExitStack() as stack:
        ranks = ready_engine(
            stack,
            [Rank(live.socket, piece(50 * n, 50), engine=name, rank=n, world=2, namespace="both") for n in range(2)],
        )
        live.faults(f"store@{1 + 2 * number}=fail")
        requests = []
        for rank in ranks:
            # One after the other, so that it is known whose copy fails.
            requests.append(rank.ask_store(hashes("a", "b"), [0, 1]))
            time.sleep(0.1)
        answers = [rank.reply(request).result() for rank, request in zip(ranks, requests, strict=True)]
        assert [answer["kept"] for answer in answers] == [0, 0]
        assert ranks[0].match(hashes("a", "b"))[0] == 0


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


@pytest.mark.parametrize("blocks", [2, 6], ids=["in its last slice", "before its last slice"])
def test_a_store_that_is_withdrawn_while_it_runs_never_becomes_visible(live: Observed, blocks: int) -> None:
    with rank_of(live, LARGE, 6) as rank:
        live.faults("store=delay:0.08")
        job = rank.next_job()
        request = rank.ask_store(hashes(*range(blocks)), range(blocks), job=job)
        wait_until(lambda: not rank.control.quiet())
        rank.control.withdraw_through(job)
        wait_until(rank.control.quiet)
        # From here on the engine may use the blocks for something else.
        rank.memory[:] = 0xAA
        assert rank.reply(request).result()["kept"] == 0
        assert rank.match(hashes(*range(6)))[0] == 0
        live.faults("")
        assert rank.store(hashes(*range(6)), range(6)) == 6


def test_a_store_withdrawn_before_it_starts_is_void(live: Observed) -> None:
    with rank_of(live, 4096, 2) as rank:
        job = rank.next_job()
        rank.control.withdraw_through(job)
        assert rank.store(hashes("a"), [0], job=job) == 0
        assert rank.match(hashes("a"))[0] == 0
        assert rank.store(hashes("a"), [0]) == 1


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


def test_a_load_outlives_a_clear_with_the_bytes_it_was_promised(live: Observed) -> None:
    with rank_of(live, LARGE, 8) as rank, BlockCache("other", LARGE, arena_blocks=4, socket=live.socket) as other:
        request, _ = loaded_slowly(live, rank, 4)
        assert live.ask("clear")["cleared_blocks"] == 4
        assert rank.match(hashes(*range(4)))[0] == 0
        live.faults("load=delay:0.05")
        assert other.put(dict.fromkeys(hashes(*range(16)), b"\x99" * LARGE)) > 0
        assert rank.reply(request).result()["loaded"] == 4
        assert all((rank.block(number) == 0x11).all() for number in range(4, 8))


# -- readers and writers at the same time -------------------------------------------------------------------


def test_two_engines_that_store_the_same_block_make_one_copy(live: Observed) -> None:
    with rank_of(live, 4096, 4) as one, rank_of(live, 4096, 4) as other:
        for round_number in range(10):
            prefix = hashes((round_number, 0), (round_number, 1))
            for rank in (one, other):
                rank.block(0)[:] = np.frombuffer(content(prefix[0], 4096), np.uint8)
                rank.block(1)[:] = np.frombuffer(content(prefix[1], 4096), np.uint8)
            live.faults("store=delay:0.01" if round_number % 2 else "")
            requests = [(rank, rank.ask_store(prefix, [0, 1])) for rank in (one, other)]
            assert [rank.reply(request).result()["kept"] for rank, request in requests] == [2, 2]
            wait_until(lambda count=2 * round_number + 2: live.stats()["pool_resident_blocks"] == count)
            for rank in (one, other):
                hit, lease = rank.match(prefix)
                assert hit == 2
                assert rank.load(lease, [2, 3]) == 2
                assert rank.block(2).tobytes() == content(prefix[0], 4096)
                assert rank.block(3).tobytes() == content(prefix[1], 4096)
                assert rank.call("release", lease=lease)["released"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_under_a_parent_that_another_engine_writes_shares_its_fate(live: Observed, fails: bool) -> None:
    with rank_of(live, 4096, 4) as one, rank_of(live, 4096, 4) as other:
        live.faults("store@1=fail;commit@1=delay:0.3" if fails else "commit@1=delay:0.3")
        parent = one.ask_store(hashes("p"), [0])
        wait_until(lambda: live.stats()["pool_reserved_blocks"] == 1)
        both = other.ask_store(hashes("p", "c"), [0, 1])
        assert other.match(hashes("p", "c"))[0] == 0
        assert one.reply(parent).result()["kept"] == (0 if fails else 1)
        assert other.reply(both).result()["kept"] == (0 if fails else 2)
        assert other.match(hashes("p", "c"))[0] == (0 if fails else 2)
        live.settle(2.0, sessions=3, engines=3, leases=not fails, pool_pinned_blocks=not fails)


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
        assert rank.call("acquire", keys=rank.keys(hashes("none"))) == {"found": b"\x00", "lease": 0}
        assert live.gauges()["pool_pinned_blocks"] == 0


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


# -- leases -------------------------------------------------------------------------------------------------


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
        assert time.monotonic() - started < 1.0
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
    assert time.monotonic() - started < 2.0


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
