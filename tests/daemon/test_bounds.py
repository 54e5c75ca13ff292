"""What lies outside of a rank's memory or of a block is refused over the wire, before anything is mapped or copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from hpkv_client.errors import HpkvError, UsageError
from hpkv_client.types import Run
from hpkv_client.wire import Body, pack_blocks, run_to_wire
from tests.engines import engine_name, rank_of
from tests.support import Observed, Rank, hashes, observed_daemon, plain_shard


@pytest.fixture(scope="module")
def shared() -> Iterator[Observed]:
    """The daemon of this module, and a rank that keeps its mover."""
    with (
        observed_daemon() as observed,
        Rank(observed.socket, plain_shard(4096, 1), engine="resting").register(),
    ):
        yield observed


@pytest.fixture
def live(shared: Observed) -> Iterator[Observed]:
    """The shared daemon, empty before the test and clean after it."""
    shared.ask("clear")
    yield shared
    shared.settle(sessions=1, engines=1)
    assert shared.stats()["internal_errors"] == 0
    assert "Traceback" not in shared.handle.text()


@pytest.mark.parametrize("outside", [[4], [0, 4], [(1 << 32) - 1, 0]], ids=str)
@pytest.mark.parametrize("verb", ["load", "get", "store", "put"])
def test_a_block_outside_of_the_memory_is_refused_before_any_copy(
    live: Observed, verb: str, outside: list[int]
) -> None:
    with rank_of(live, 4096, 4) as rank:
        rank.memory[:] = 0x11
        known, fresh = hashes("a", "b"), hashes("c", "d")
        assert rank.store(known, [0, 1]) == 2
        _, lease = rank.match(known)
        rank.memory[:] = 0x22

        def ask(blocks: list[int]) -> Body:
            keys = rank.keys((known if verb == "get" else fresh)[: len(blocks)])
            which: Body = {"lease": lease, "first": 0} if verb == "load" else {"keys": keys}
            parent: Body = {"parent": None} if verb == "store" else {}
            return rank.call(verb, job=rank.next_job(), blocks=pack_blocks(blocks), **which, **parent)

        # A mover that copied anything of it would have counted it.
        before = live.stats()
        with pytest.raises(UsageError, match="of an engine with 4 blocks"):
            ask(outside)
        after = live.stats()
        for name in ("stored_blocks", "loaded_blocks", "store_failures", "load_failures", "offered_blocks"):
            assert after[name] == before[name]
        assert after["pool_reserved_blocks"] == 0
        assert (rank.memory == 0x22).all()
        # The last blocks there are do.
        ask([3, 2])
        moved = (rank.block(3) == 0x11).all() and (rank.block(2) == 0x11).all()
        assert moved == (verb in ("load", "get"))
        assert rank.call("contains", keys=rank.keys(fresh))["found"] == bytes([verb in ("store", "put")] * 2)
        assert (rank.memory[: 2 * 4096] == 0x22).all()


LARGEST = (1 << 63) - 1
RIGHT = Run(region=0, local_offset=0, block_stride=4096, canonical_offset=0, fragment=512, count=8)
RIGHT = replace(RIGHT, local_step=512, canonical_step=512)


@pytest.mark.parametrize(
    ("change", "blocks", "message"),
    [
        ({"region": 1}, 4, "leaves its region"),
        ({"local_offset": 1}, 4, "leaves its region"),
        ({"local_offset": LARGEST}, 4, "leaves its region"),
        ({"block_stride": 4097}, 4, "leaves its region"),
        ({"block_stride": LARGEST}, 4, "leaves its region"),
        ({"local_step": 513}, 4, "leaves its region"),
        ({"local_step": LARGEST}, 4, "leaves its region"),
        ({}, 5, "leaves its region"),
        ({}, (1 << 32) - 1, "leaves its region"),
        ({"count": 9}, 4, "leaves its layer"),
        ({"fragment": 513}, 4, "leaves its layer"),
        ({"canonical_offset": 1}, 4, "leaves its layer"),
        ({"canonical_step": 513}, 4, "leaves its layer"),
        ({"canonical_step": LARGEST}, 4, "leaves its layer"),
        ({"count": LARGEST, "local_step": 0, "canonical_step": 0}, 4, "more bytes than it has"),
        ({"local_offset": -1}, 4, "must be an integer"),
        ({"block_stride": -4096}, 4, "must be an integer"),
    ],
)
def test_a_shape_that_leaves_memory_or_block_is_refused_and_never_mapped(
    live: Observed, change: dict[str, int], blocks: int, message: str
) -> None:
    with Rank(live.socket, plain_shard(4096, 4), engine=engine_name()).hello() as rank:
        run = run_to_wire(replace(RIGHT, **change))
        with pytest.raises(HpkvError, match=message):
            rank.call("register", **rank.registration(layers=[["layer.0", 4096, [run]]], blocks=blocks))
        # Nor does it come up in what others are told.
        assert [engine["engine"] for engine in live.ask("info")["engines"]] == ["resting"]
        assert rank.shared.handle.name not in live.maps()
        # It is only this that was wrong.
        rank.register(layers=[["layer.0", 4096, [run_to_wire(RIGHT)]]]).ready()
        assert rank.shared.handle.name in live.maps()
        assert rank.store(hashes("a"), [3]) == 1
