"""More than the pool can hold: the newest is what hits, what was kept is there, and what was dropped is counted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hpkv_client.client import BlockCache
from tests.support import Observed, Rank, content, hashes, observed_daemon, plain_shard

SLOTS, SIZE = 16, 1 << 16
LENGTH = 4
"""Blocks of a prompt."""
PROMPTS = 3 * SLOTS // LENGTH
NEWEST = range(PROMPTS - SLOTS // LENGTH, PROMPTS)


@pytest.fixture(scope="module", params=["lru", "s3fifo"])
def shared(request: pytest.FixtureRequest) -> Iterator[Observed]:
    """A daemon with room for 16 blocks, under each policy."""
    with observed_daemon(HPKV_KV_MEM_POOL_SIZE=SLOTS * SIZE, HPKV_POLICY=request.param) as observed:
        yield observed


@pytest.fixture
def live(shared: Observed) -> Iterator[Observed]:
    """The shared daemon, empty before the test and clean after it."""
    shared.ask("clear")
    yield shared
    shared.assert_sound()


def prompt(name: object, number: int) -> list[bytes]:
    """Prefix hashes of a prompt."""
    return hashes(*((name, number, block) for block in range(LENGTH)))


def fill(rank: Rank, first: int, keys: list[bytes]) -> None:
    """Put the blocks' contents into the rank's memory."""
    for number, key in enumerate(keys, first):
        rank.block(number)[:] = np.frombuffer(content(key, SIZE), np.uint8)


def test_after_a_burst_the_newest_prompts_are_found_in_full_and_the_oldest_not_at_all(live: Observed) -> None:
    with Rank(live.socket, plain_shard(SIZE, 2 * LENGTH)).register() as rank:
        rank.ready()
        for number in range(PROMPTS):
            fill(rank, 0, prompt("burst", number))
            assert rank.store(prompt("burst", number), range(LENGTH)) == LENGTH
        # Oldest first, so that no look-up saves what a later one asks for.
        hits = [rank.match(prompt("burst", number)) for number in range(PROMPTS)]
        assert [hit for hit, _ in hits] == [LENGTH if number in NEWEST else 0 for number in range(PROMPTS)]
        for number in NEWEST:
            assert rank.load(hits[number][1], range(LENGTH, 2 * LENGTH)) == LENGTH
            wanted = [content(key, SIZE) for key in prompt("burst", number)]
            assert [rank.block(LENGTH + block).tobytes() for block in range(LENGTH)] == wanted


def test_after_a_burst_the_newest_blocks_without_a_prefix_are_found_and_the_oldest_not(live: Observed) -> None:
    with BlockCache("burst", SIZE, arena_blocks=LENGTH, socket=live.socket) as cache:
        for number in range(PROMPTS):
            assert cache.put({key: content(key, SIZE) for key in prompt("single", number)}) == LENGTH
        for number in range(PROMPTS):
            keys = prompt("single", number)
            wanted = [content(key, SIZE) if number in NEWEST else None for key in keys]
            assert cache.get(keys) == wanted


def test_a_prompt_that_others_ask_for_outlives_a_burst_of_prompts_that_nobody_does(live: Observed) -> None:
    with Rank(live.socket, plain_shard(SIZE, LENGTH)).register() as rank:
        rank.ready()
        wanted = prompt("wanted", 0)
        assert rank.store(wanted, range(LENGTH)) == LENGTH
        for number in range(PROMPTS):
            hit, lease = rank.match(wanted)
            assert hit == LENGTH
            assert rank.call("release", lease=lease)["released"]
            assert rank.store(prompt("once", number), range(LENGTH)) == LENGTH
        assert rank.match(prompt("once", 0))[0] == 0
        assert rank.match(wanted)[0] == LENGTH


def test_what_a_store_says_it_kept_hits_at_once_and_what_it_dropped_is_counted(live: Observed) -> None:
    def dropped() -> int:
        stats = live.stats()
        return int(stats["dropped_full_blocks"] + stats["dropped_orphan_blocks"])

    with Rank(live.socket, plain_shard(SIZE, SLOTS)).register() as rank:
        rank.ready()
        seen = []
        # More and more of the pool is leased: a prompt is kept in full, then in part, then not at all.
        for number in range(6):
            before, keys = dropped(), hashes(*((number, block) for block in range(LENGTH + 1)))
            answer = rank.reply(rank.ask_store(keys, range(LENGTH + 1))).result()
            assert answer["kept"] + answer["dropped"] == LENGTH + 1
            assert dropped() - before == answer["dropped"]
            hit, _ = rank.match(keys)
            assert hit == answer["kept"]
            seen.append(hit)
        assert seen == [5, 5, 5, 1, 0, 0]
        before = dropped()
        orphan = rank.reply(rank.ask_store(hashes("child"), [0], parent=hashes("nobody")[0])).result()
        assert (orphan["kept"], orphan["dropped"], dropped() - before) == (0, 1, 1)
