"""When a real daemon writes blocks to its disk, and which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpkv_client.client import BlockCache
from tests.storage import SIZE, daemon_on, kept, keys, state
from tests.support import Observed, content, wait_until


def put(cache: BlockCache, names: list[bytes]) -> None:
    assert cache.put({key: content(key, SIZE) for key in names}) == len(names)


def on_disk(live: Observed) -> int:
    return int(live.ask("info")["storage"]["blocks"])


def pass_by(live: Observed, seconds: float) -> None:
    """Until the daemon is so much older."""
    since = live.stats()["uptime_seconds"]
    wait_until(lambda: live.stats()["uptime_seconds"] > since + seconds, 30)


def test_a_block_in_use_stays_off_the_disk_until_it_is_idle(storage: Path) -> None:
    demote: dict[str, Any] = {"HPKV_STORAGE_WRITE": "demote", "HPKV_STORAGE_IDLE_SECONDS": 2}
    with daemon_on(storage, **demote) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        put(cache, keys(8))
        for _ in range(6):
            assert None not in cache.get(keys(8))
            pass_by(live, 0.5)
        assert on_disk(live) == 0
        wait_until(lambda: on_disk(live) == 8, 30)
        assert live.ask("check")["ok"]


def test_what_leaves_a_full_pool_is_on_disk_before(storage: Path) -> None:
    demote: dict[str, Any] = {"HPKV_STORAGE_WRITE": "demote", "HPKV_STORAGE_IDLE_SECONDS": 3600}
    names = keys(160)
    with daemon_on(storage, **demote) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        put(cache, names[:32])
        pass_by(live, 1.0)
        assert on_disk(live) == 0
        for start in range(32, 160, 8):
            put(cache, names[start : start + 8])
            # The pool has room for 64; a quarter of what is in a nearly full one is written ahead.
            wait_until(lambda stored=start + 8: on_disk(live) >= stored - 64 + 12 or stored <= 48, 30)
        assert on_disk(live) < 160
        assert not any(cache.contains(names[:96]))
        for start in (0, 40, 88):
            some = names[start : start + 8]
            assert cache.get(some) == [content(key, SIZE) for key in some]


@pytest.mark.parametrize("second", ["asked for", "stored"])
def test_only_what_was_touched_twice_is_written_if_that_is_asked_for(storage: Path, second: str) -> None:
    with (
        daemon_on(storage, HPKV_STORAGE_ADMISSION="second-touch") as live,
        BlockCache("app", SIZE, socket=live.socket) as cache,
    ):
        names = keys(32)
        put(cache, names)
        if second == "asked for":
            assert None not in cache.get(names[:8])
        else:
            put(cache, keys(64, "flood"))
            assert not any(cache.contains(names))
            put(cache, names[:8])
        wait_until(lambda: on_disk(live) == 8, 30)
        pass_by(live, 1.0)
        assert on_disk(live) == 8
        put(cache, keys(64, "other"))
        assert cache.get(names[:9]) == [content(key, SIZE) for key in names[:8]] + [None]


def test_a_day_takes_no_more_writes_than_it_may(storage: Path) -> None:
    # The first hour's worth is 8 blocks, and one batch, an eighth of the pool, may exceed what is left.
    with (
        daemon_on(storage, HPKV_STORAGE_DAILY_WRITES=24 * 8 * SIZE) as live,
        BlockCache("app", SIZE, socket=live.socket) as cache,
    ):
        put(cache, keys(48))
        wait_until(lambda: on_disk(live) >= 8, 30)
        pass_by(live, 1.0)
        assert 8 <= on_disk(live) <= 16
        assert live.ask("info")["storage"]["allowed_bytes"] < SIZE
        assert cache.get(keys(48)) == [content(key, SIZE) for key in keys(48)]


def test_what_memory_is_asked_for_stays_on_disk_too(storage: Path) -> None:
    """A hot block is never read from the disk; when the disk needs room, it must not go as one that nobody wants."""
    with daemon_on(storage, HPKV_STORAGE_SIZE="64m", HPKV_KV_MEM_POOL_SIZE="32m") as live:
        with BlockCache("app", SIZE, socket=live.socket) as cache:
            hot = keys(4, "hot")
            put(cache, hot)
            wait_until(lambda: kept(live) == 4, 30)
            for start in range(0, 1280, 128):
                put(cache, keys(1280)[start : start + 128])
                kept(live)
                # The disk orders uses by sixteenths of a second, and hears of those in memory a few times a second.
                pass_by(live, 0.3)
                assert cache.get(hot) == [content(key, SIZE) for key in hot]
            assert live.stats()["storage_evicted_blocks"] > 0
        live.handle.kill()
        for file in live.handle.pool_directory.iterdir():
            file.unlink()
        live.handle.restart()
        wait_until(lambda: state(live) == "ready", 20)
        with BlockCache("app", SIZE, socket=live.socket) as cache:
            assert cache.get(hot) == [content(key, SIZE) for key in hot]
            assert cache.get(keys(1)) == [None]
