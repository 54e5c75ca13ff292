"""The disk tier of a real daemon: what leaves memory is read back, whatever happens in between."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpkv_client.client import BlockCache
from tests.daemons import DaemonFactory, hpkvd
from tests.storage import POOL, SIZE, daemon_on, damage, fill, kept, keys, state
from tests.support import Observed, Rank, content, hashes, observed_daemon, plain_shard, wait_until


def test_blocks_that_left_memory_are_read_back(storage: Path) -> None:
    names = keys(200)
    with daemon_on(storage) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        fill(live, cache, names)
        assert kept(live) == 200
        assert sum(cache.contains(names)) <= 64
        for start in range(0, 200, 32):
            some = names[start : start + 32]
            assert cache.get(some) == [content(key, SIZE) for key in some]
        assert cache.get(keys(3, "other")) == [None] * 3
        stats = live.stats()
        assert stats["promoted_blocks"] >= 200 - 64
        assert stats["storage_read_blocks"] >= 200 - 64
        assert live.ask("check")["ok"]


def test_what_is_on_disk_is_found_by_the_next_daemon_even_without_its_pool(storage: Path) -> None:
    names = keys(100)
    with daemon_on(storage) as live:
        with BlockCache("app", SIZE, socket=live.socket) as cache:
            fill(live, cache, names)
        live.handle.kill()
        for file in live.handle.pool_directory.iterdir():
            file.unlink()
        live.handle.restart()
        wait_until(lambda: state(live) == "ready", 20)
        assert live.stats()["pool_resident_blocks"] == 0
        with BlockCache("app", SIZE, socket=live.socket) as cache:
            for start in range(0, 100, 25):
                some = names[start : start + 25]
                assert cache.get(some) == [content(key, SIZE) for key in some]
        assert live.ask("check")["ok"]


def test_a_prefix_on_disk_comes_back_as_a_prefix(storage: Path) -> None:
    chain = hashes(*(f"block {i}" for i in range(40)))
    with daemon_on(storage) as live:
        with Rank(live.socket, plain_shard(SIZE, 40)) as rank:
            rank.hello().register().ready()
            for number, prefix in enumerate(chain):
                rank.block(number)[:] = bytearray(content(prefix, SIZE))
            rank.store(chain, range(40))
            assert kept(live) == 40
            for i in range(8):
                rank.store(hashes(*(f"flood {i} {j}" for j in range(16))), range(16))
                kept(live)
            hit = rank.match(chain)[0]
            assert hit < 40
            wait_until(lambda: full(rank, chain), 20)
            rank.memory[:] = 0
            lease = rank.match(chain)[1]
            rank.load(lease, range(40))
            assert all(bytes(rank.block(number)) == content(prefix, SIZE) for number, prefix in enumerate(chain))
            rank.call("release", lease=lease)
        live.assert_sound()


def test_a_prefix_ends_before_a_damaged_block_and_explain_says_so(storage: Path) -> None:
    chain = hashes(*(f"block {i}" for i in range(8)))
    with daemon_on(storage) as live, Rank(live.socket, plain_shard(SIZE, 16)) as rank:
        rank.hello().register().ready()
        for number, prefix in enumerate(chain):
            rank.block(number)[:] = bytearray(content(prefix, SIZE))
        rank.store(chain, range(8))
        assert kept(live) == 8
        for i in range(8):
            rank.store(hashes(*(f"flood {i} {j}" for j in range(16))), range(16))
            kept(live)
        damage(storage, content(chain[3], SIZE))
        wait_until(lambda: settled_hit(rank, chain) == 3, 20)
        reason = live.ask("explain", last=1)["lookups"][0]["reason"]
        assert reason == "on storage, but damaged there or not readable"
        rank.store(chain[3:], range(3, 8), parent=chain[2])
        assert settled_hit(rank, chain) == 8


def settled_hit(rank: Rank, chain: list[bytes]) -> int:
    """How much of the chain is in memory; -1 while some of it is being read."""
    answer = rank.call("match", keys=rank.keys(chain))
    if answer["lease"]:
        rank.call("release", lease=answer["lease"])
    return -1 if answer["coming"] else int(answer["hit"])


def full(rank: Rank, chain: list[bytes]) -> bool:
    """Whether the whole chain is in memory by now."""
    hit, lease = rank.match(chain)
    if lease:
        rank.call("release", lease=lease)
    return hit == len(chain)


def test_a_reset_forgets_what_is_on_disk_too(storage: Path) -> None:
    names = keys(32)
    with daemon_on(storage) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        fill(live, cache, names)
        live.ask("clear")
        assert cache.get(names) == [None] * 32
        live.handle.kill()
        live.handle.restart()
        wait_until(lambda: state(live) == "ready", 20)
        with BlockCache("app", SIZE, socket=live.socket) as again:
            assert again.get(names) == [None] * 32
            assert again.put({names[0]: content(names[0], SIZE)}) == 1
            assert again.get(names[:1]) == [content(names[0], SIZE)]


def test_a_block_that_was_damaged_on_disk_is_a_miss_and_is_stored_anew(storage: Path) -> None:
    names = keys(32)
    with daemon_on(storage) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        fill(live, cache, names)
        fill(live, cache, keys(64, "flood"))
        damage(storage, content(names[5], SIZE))
        found = cache.get(names)
        assert found[5] is None
        assert [block for i, block in enumerate(found) if i != 5] == [
            content(key, SIZE) for i, key in enumerate(names) if i != 5
        ]
        assert live.stats()["storage_bad_records"] == 1
        assert cache.put({names[5]: content(names[5], SIZE)}) == 1
        kept(live)
        fill(live, cache, keys(64, "more"))
        assert cache.get([names[5]]) == [content(names[5], SIZE)]


def test_a_disk_that_fails_costs_misses_and_comes_back_by_itself(storage: Path) -> None:
    with daemon_on(storage) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        live.faults("disk_write=fail")
        assert cache.put({key: content(key, SIZE) for key in keys(16)}) == 16
        wait_until(lambda: state(live) == "degraded", 20)
        assert cache.get(keys(16)) == [content(key, SIZE) for key in keys(16)]
        live.faults("")
        wait_until(lambda: state(live) == "ready", 60)
        wait_until(lambda: kept(live) == 16, 20)


def test_a_disk_process_that_dies_is_replaced(storage: Path) -> None:
    names = keys(100)
    with daemon_on(storage) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        fill(live, cache, names)
        os.kill(live.ask("info")["storage"]["pid"], signal.SIGKILL)
        # Until the next one has compared the files with the index, what is on disk only is a miss.
        for start in range(0, 100, 25):
            some = names[start : start + 25]
            expected = [content(key, SIZE) for key in some]
            wait_until(lambda some=some, expected=expected: cache.get(some) == expected, 30)
        assert live.stats()["storage_restarts"] == 1
        assert live.ask("check")["ok"]


def test_a_slow_disk_keeps_no_more_than_its_share_of_the_pool(storage: Path) -> None:
    with daemon_on(storage) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        live.faults("disk_write=delay:1")
        for start in range(0, 256, 8):
            some = keys(256)[start : start + 8]
            assert cache.put({key: content(key, SIZE) for key in some}) == 8, (
                "the pool is full of what is being written"
            )
        assert live.stats()["pool_pinned_blocks"] <= 64 // 4
        assert live.stats()["dropped_full_blocks"] == 0
        live.faults("")
        kept(live)


def test_without_a_path_there_is_no_storage(storage: Path) -> None:
    with observed_daemon(HPKV_KV_MEM_POOL_SIZE=POOL) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        assert cache.put({b"k": content(b"k", SIZE)}) == 1
        usage = live.ask("info")["storage"]
        assert (usage["blocks"], usage["budget_bytes"]) == (0, 0)
        assert not list(storage.iterdir())


@pytest.fixture
def little(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for hardly anything."""
    path = tmp_path / "little"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_without_room_is_left_alone_unless_a_size_was_asked_for(little: Path) -> None:
    with (
        observed_daemon(HPKV_KV_MEM_POOL_SIZE=POOL, HPKV_KV_STORAGE_PATH=little) as live,
        BlockCache("app", SIZE, socket=live.socket) as cache,
    ):
        assert "storage is off" in live.handle.text()
        assert cache.put({b"k": content(b"k", SIZE)}) == 1
        assert cache.get([b"k"]) == [content(b"k", SIZE)]
    factory = DaemonFactory()
    try:
        env = factory.environment(HPKV_KV_STORAGE_PATH=little, HPKV_STORAGE_SIZE="1g")
        done = hpkvd("serve", env=env)
        assert done.returncode == 78
        assert "HPKV_STORAGE_SIZE" in done.stderr.splitlines()[-1]
    finally:
        factory.close()


def test_two_daemons_never_share_a_directory(storage: Path) -> None:
    with daemon_on(storage) as live:
        factory = DaemonFactory()
        try:
            done = hpkvd("serve", env=factory.environment(HPKV_KV_STORAGE_PATH=storage))
            assert done.returncode == 75
            assert f"pid {live.handle.pid}" in done.stderr.splitlines()[-1]
        finally:
            factory.close()


def test_clients_that_ask_for_the_same_blocks_at_once_get_them_read_once(storage: Path) -> None:
    names = keys(48)
    with daemon_on(storage) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        fill(live, cache, names)
        fill(live, cache, keys(64, "flood"))
        read = live.stats()["storage_read_blocks"]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: ask_anew(live, names), range(4)))
        assert answers == [[content(key, SIZE) for key in names]] * 4
        assert live.stats()["storage_read_blocks"] - read <= 48
        assert live.ask("check")["ok"]


def ask_anew(live: Observed, names: list[bytes]) -> list[bytes | None]:
    with BlockCache("app", SIZE, socket=live.socket) as cache:
        return cache.get(names)


def test_a_client_that_leaves_while_its_blocks_are_read_leaves_nothing(storage: Path) -> None:
    chain = hashes(*(f"block {i}" for i in range(16)))
    with daemon_on(storage) as live:
        with Rank(live.socket, plain_shard(SIZE, 16)) as rank:
            rank.hello().register().ready()
            rank.store(chain, range(16))
            assert kept(live) == 16
            for i in range(8):
                rank.store(hashes(*(f"flood {i} {j}" for j in range(16))), range(16))
                kept(live)
            live.faults("disk_read=delay:0.2")
            assert rank.match(chain)[0] == 0
        live.faults("")
        live.settle(20)
        live.assert_sound()
