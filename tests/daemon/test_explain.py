"""What operators learn about misses, and about what engines count themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.daemons import hpkvd
from tests.support import Observed, Rank, hashes, observed_daemon, plain_shard

BLOCK_BYTES = 64 << 10


@pytest.fixture(scope="module")
def shared() -> Iterator[Observed]:
    with observed_daemon(HPKV_KV_MEM_POOL_SIZE="1m") as made:
        yield made


@pytest.fixture
def live(shared: Observed) -> Iterator[Observed]:
    """A daemon with room for 16 blocks, emptied and proven clean afterwards."""
    yield shared
    shared.ask("clear")
    shared.assert_sound()


def a_rank(live: Observed, engine: str = "engine", **more: object) -> Rank:
    """A ready rank of an engine of its own, with 20 blocks."""
    rank = Rank(live.socket, plain_shard(BLOCK_BYTES, 20), engine=engine, namespace=str(more.pop("namespace", engine)))
    return rank.hello().register(**more).ready()


def last_reason(live: Observed, engine: str = "engine") -> str:
    """Why the engine's latest look-up missed."""
    found = live.ask("explain", engine=engine, last=1)["lookups"]
    assert len(found) == 1
    return str(found[0]["reason"])


def test_a_hit_needs_no_reason_and_a_miss_in_an_empty_namespace_says_so(live: Observed) -> None:
    with a_rank(live) as rank:
        rank.match(hashes("a", "b"))
        assert last_reason(live) == "nothing was ever stored in this namespace"
        rank.store(hashes("a", "b"), [0, 1])
        lease = rank.match(hashes("a", "b"))[1]
        rank.call("release", lease=lease)
        entry = live.ask("explain", engine="engine", last=1)["lookups"][0]
        assert (entry["asked_blocks"], entry["hit_blocks"], entry["reason"]) == (2, 2, "")


def test_the_reason_is_that_of_the_first_block_that_is_missing(live: Observed) -> None:
    with a_rank(live) as rank:
        rank.store(hashes("a"), [0])
        lease = rank.match(hashes("a", "b", "c"))[1]
        rank.call("release", lease=lease)
        entry = live.ask("explain", request="", last=1)["lookups"][0]
        assert (entry["asked_blocks"], entry["hit_blocks"]) == (3, 1)
        assert entry["reason"] == "never stored here, or too long ago to tell"


def test_evicted_blocks_are_told_from_those_that_never_came(live: Observed) -> None:
    with a_rank(live) as rank:
        rank.store(hashes("early"), [0])
        for i in range(20):
            rank.store(hashes(f"late {i}"), [0])
        rank.match(hashes("early"))
        assert last_reason(live) == "evicted: the pool was full"
        rank.match(hashes("never"))
        assert last_reason(live) == "never stored here, or too long ago to tell"


def test_blocks_for_which_there_was_no_room_or_no_parent_are_told(live: Observed) -> None:
    with a_rank(live) as rank:
        names = [f"long {i}" for i in range(20)]
        rank.store(hashes(*names), range(20))
        rank.match(hashes("long 19"))
        assert last_reason(live) == "not stored: every slot was in use"
        rank.store(hashes("child"), [0], parent=rank.keys(hashes("nobody")))
        rank.match(hashes("child"))
        assert last_reason(live) == "not stored: the block before it was not there"


def test_blocks_of_which_a_part_never_came_are_told(live: Observed) -> None:
    with a_rank(live) as rank:
        live.faults("store=fail")
        rank.store(hashes("torn"), [0])
        live.faults("")
        rank.match(hashes("torn"))
        assert last_reason(live) == "not stored: a rank's part did not come"


def test_a_block_under_way_is_told(live: Observed) -> None:
    with a_rank(live) as rank:
        live.faults("store=delay:0.5")
        request = rank.ask_store(hashes("slow"), [0])
        rank.match(hashes("slow"))
        assert last_reason(live) == "being stored right now"
        rank.reply(request)
        hit, lease = rank.match(hashes("slow"))
        rank.call("release", lease=lease)
        assert (hit, last_reason(live)) == (1, "")


def test_namespaces_that_hold_blocks_are_compared_field_by_field(live: Observed) -> None:
    alike = {"weights": "abc", "block size": "64"}
    with (
        a_rank(live, "one", model="m", fields=alike | {"element type": "bfloat16"}) as one,
        a_rank(live, "two", model="m", fields=alike | {"element type": "float32"}) as two,
    ):
        one.store(hashes("a"), [0])
        two.match(hashes("a"))
        others = [other for other in live.ask("explain", engine="two")["other_namespaces"] if other["model"] == "m"]
        assert [(other["blocks"], other["differs_in"]) for other in others] == [
            (1, "element type (float32 here, bfloat16 there)")
        ]


def test_requests_are_found_by_their_name_and_other_engines_left_out(live: Observed) -> None:
    with a_rank(live, "one") as one, a_rank(live, "two") as two:
        one.call("match", keys=one.keys(hashes("a")), request="cmpl-1")
        two.call("match", keys=two.keys(hashes("b")), request="cmpl-2")
        assert [entry["request"] for entry in live.ask("explain", last=2)["lookups"]] == ["cmpl-2", "cmpl-1"]
        assert [entry["request"] for entry in live.ask("explain", engine="one", last=1)["lookups"]] == ["cmpl-1"]
        assert [entry["engine"] for entry in live.ask("explain", request="cmpl-2")["lookups"]] == ["two"]
        said = json.loads(hpkvd("explain", "one", "--last", "1", "--json", env=live.handle.env).stdout)
        assert said["lookups"][0]["request"] == "cmpl-1"
        assert "lookups.0.request cmpl-2" in hpkvd("explain", "--request", "cmpl-2", env=live.handle.env).stdout


def test_only_the_latest_look_ups_are_kept(live: Observed) -> None:
    with a_rank(live) as rank:
        for i in range(300):
            rank.call("match", keys=rank.keys(hashes(i)), request=str(i))
        kept = live.ask("explain", last=256)["lookups"]
        assert [entry["request"] for entry in kept] == [str(i) for i in range(299, 43, -1)]


def test_an_engines_own_counters_are_summed_over_its_sessions(live: Observed) -> None:
    with a_rank(live) as rank, Rank(live.socket, plain_shard(BLOCK_BYTES, 1)) as scheduler:
        scheduler.hello()
        rank.call("heartbeat", counters={"late_jobs": 1, "breaker_opened": 2})
        scheduler.call("heartbeat", counters={"breaker_opened": 1, "lookups": 5})
        scheduler.call("heartbeat", counters={"breaker_opened": 2, "lookups": 7})
        engine = live.ask("info")["engines"][0]
        assert engine["counters"] == {"breaker_opened": 4, "late_jobs": 1, "lookups": 7}
