"""Blocks on their way into the pool: all ranks' shards or none, seen after the commit and not before."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np
import pytest

from hpkv_client.errors import HpkvError, LayoutRefused, UsageError
from hpkv_client.types import RankShard
from tests.engines import engine_name, piece, rank_of, ready_engine, store_all
from tests.support import (
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

LARGE = 1 << 22
"""A mover looks for messages after every second block of this size."""


# -- replicas -----------------------------------------------------------------------------------------------


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


# -- two writers --------------------------------------------------------------------------------------------


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
