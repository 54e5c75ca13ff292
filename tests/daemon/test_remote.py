"""The remote tier of real daemons: what one node stored is a hit on the next, whatever happens to the store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
import pytest

from hpkv_client.client import BlockCache
from hpkv_daemon.cli.overview import Sample, overview
from hpkv_daemon.service.metrics import METRICS
from tests.daemons import DaemonFactory, hpkvd, refusal
from tests.scrape import Scraper
from tests.stores import Folder, S3Server, names_in
from tests.support import Observed, Rank, content, hashes, observed_daemon, plain_shard, wait_until

SIZE = 64 << 10
POOL = 4 << 20
"""Room for 64 blocks."""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    path = tmp_path / "shared"
    path.mkdir()
    return Folder(path)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    made = S3Server()
    yield made
    made.close()


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest) -> Folder | S3Server:
    found = request.getfixturevalue("folder" if request.param == "file" else "server")
    assert isinstance(found, Folder | S3Server)
    for path in names_in(found.objects):
        obstore.delete(found.objects, path)
    return found


@contextmanager
def node(store: Folder | S3Server, **env: Any) -> Iterator[Observed]:
    """A daemon with a small pool and a remote tier."""
    settings = {"HPKV_KV_MEM_POOL_SIZE": POOL, "HPKV_REMOTE": store.url, "HPKV_REMOTE_ADMISSION": "all"}
    with observed_daemon(**(settings | store.variables | env)) as live:
        wait_until(lambda: state(live) == "ready", 20)
        yield live


def state(live: Observed) -> str:
    """How the remote tier is."""
    return str(live.ask("info")["remote"]["state"])


def written(live: Observed) -> None:
    """Wait until nothing waits to be written."""

    def idle() -> bool:
        info = live.ask("info")
        return not any(info[tier][what] for tier in ("storage", "remote") for what in ("queued_blocks", "queued_bytes"))

    wait_until(idle, 20)


def keys(count: int, name: str = "key") -> list[bytes]:
    return [f"{name} {i}".encode() for i in range(count)]


def blocks(names: list[bytes]) -> dict[bytes, bytes]:
    return {key: content(key, SIZE) for key in names}


def put(live: Observed, names: list[bytes]) -> None:
    """Store blocks a few at a time, so that each is written before the pool needs its slot."""
    with BlockCache("app", SIZE, socket=live.socket) as cache:
        for start in range(0, len(names), 16):
            some = names[start : start + 16]
            assert cache.put(blocks(some)) == len(some)
            written(live)


def got(live: Observed, names: list[bytes]) -> list[bytes | None]:
    with BlockCache("app", SIZE, socket=live.socket) as cache:
        return cache.get(names)


def test_what_one_node_stored_another_one_gets(store: Folder | S3Server) -> None:
    names = keys(40)
    with node(store) as one, node(store) as other:
        put(one, names)
        assert got(other, [*names, b"nobody has this"]) == [*blocks(names).values(), None]
        stats = other.stats()
        assert stats["promoted_blocks"] == stats["remote_read_blocks"] == 40
        assert got(other, names) == list(blocks(names).values())
        assert other.stats()["remote_read_blocks"] == 40
        (row,) = [row for row in overview_of(other)["tiers"] if row["tier"] == "remote"]
        assert row["state"] == "ready"
        assert row["read_bytes_per_second"] > 0
        for live in (one, other):
            live.assert_sound()


def test_a_node_that_was_rebuilt_empty_hits_what_it_stored_before(folder: Folder) -> None:
    names = keys(30)
    with node(folder) as live:
        put(live, names)
    with node(folder) as again:
        assert got(again, names) == list(blocks(names).values())


def test_a_prefix_of_another_node_comes_as_a_prefix(folder: Folder) -> None:
    chain = hashes(*(f"block {i}" for i in range(40)))
    with node(folder) as one, node(folder) as other:
        with Rank(one.socket, plain_shard(SIZE, 40)) as rank:
            rank.hello().register().ready()
            for number, prefix in enumerate(chain):
                rank.block(number)[:] = bytearray(content(prefix, SIZE))
            rank.store(chain, range(40))
            written(one)
        with Rank(other.socket, plain_shard(SIZE, 40)) as rank:
            rank.hello().register().ready()
            first = rank.call("match", keys=rank.keys([*chain, *hashes("beyond")]))
            assert (first["hit"], first["coming"]) == (0, 41)
            wait_until(lambda: settled_hit(rank, chain) == 40, 20)
            lease = rank.match(chain)[1]
            rank.load(lease, range(40))
            assert all(bytes(rank.block(number)) == content(prefix, SIZE) for number, prefix in enumerate(chain))
            rank.call("release", lease=lease)
        for live in (one, other):
            live.assert_sound()


def settled_hit(rank: Rank, chain: list[bytes]) -> int:
    """How much of the chain is in memory; -1 while more may come."""
    answer = rank.call("match", keys=rank.keys(chain))
    if answer["lease"]:
        rank.call("release", lease=answer["lease"])
    return -1 if answer["coming"] else int(answer["hit"])


def test_a_prefix_that_nobody_has_is_waited_for_once(folder: Folder) -> None:
    chain = hashes(*(f"block {i}" for i in range(40)))
    with node(folder) as live, Rank(live.socket, plain_shard(SIZE, 4)) as rank:
        rank.hello().register().ready()
        wait_until(lambda: settled_hit(rank, chain) == 0)
        lookups = live.stats()["remote_lookups"]
        assert settled_hit(rank, chain) == 0
        assert live.stats()["remote_lookups"] == lookups == 1


def test_memory_disk_and_remote_give_one_prefix(folder: Folder, tmp_path: Path) -> None:
    names = keys(60)
    with node(folder) as one:
        put(one, names[30:])
    disk = {"HPKV_KV_STORAGE_PATH": tmp_path / "disk", "HPKV_STORAGE_SIZE": "128m"}
    with node(folder, HPKV_REMOTE_ADMISSION="second-touch", **disk) as other:
        wait_until(lambda: other.ask("info")["storage"]["state"] == "ready", 20)
        put(other, names[:30])
        put(other, keys(64, "flood"))
        for start in range(0, 60, 20):
            some = names[start : start + 20]
            assert got(other, some) == [content(key, SIZE) for key in some]
        assert other.stats()["storage_read_blocks"] >= 20
        assert other.stats()["remote_read_blocks"] == 30
        other.assert_sound()


def test_only_what_was_wanted_twice_is_written_by_default(folder: Folder) -> None:
    names = keys(20)
    with node(folder, HPKV_REMOTE_ADMISSION="second-touch") as live:
        put(live, names)
        assert names_in(folder.objects) == []
        assert got(live, names[:5]) == list(blocks(names[:5]).values())
        wait_until(lambda: len(names_in(folder.objects)) == 5, 20)


def test_a_reset_forgets_for_all_nodes_and_a_clear_for_one(folder: Folder) -> None:
    names, chain = keys(10), hashes(*(f"block {i}" for i in range(4)))
    with node(folder) as live:
        put(live, names)
        live.ask("clear")
        assert got(live, names) == list(blocks(names).values())
        with Rank(live.socket, plain_shard(SIZE, 4)) as rank:
            rank.hello().register().ready()
            rank.store(chain, range(4))
            written(live)
            assert len(names_in(folder.objects)) == 14
            rank.call("reset")
            wait_until(lambda: len(names_in(folder.objects)) == 10, 20)
            wait_until(lambda: settled_hit(rank, chain) == 0)


def test_a_damaged_object_is_a_miss_and_is_stored_anew(folder: Folder) -> None:
    names = keys(8)
    with node(folder) as one:
        put(one, names)
    (path, *_) = names_in(folder.objects)
    whole = bytes(obstore.get(folder.objects, path).bytes())
    obstore.put(folder.objects, path, whole[:-1] + bytes([whole[-1] ^ 1]), use_multipart=False)
    with node(folder) as other:
        found = got(other, names)
        assert found.count(None) == 1
        assert all(block in (None, content(key, SIZE)) for key, block in zip(names, found, strict=True))
        assert other.stats()["remote_bad_blocks"] == 1
        put(other, [names[found.index(None)]])
        assert len(names_in(folder.objects)) == 8


def test_a_store_that_is_down_blocks_nothing_that_is_local(server: S3Server) -> None:
    before = len(names_in(server.objects))
    with node(server) as live:
        put(live, keys(8, "down"))
        server.freeze()
        try:
            started = time.monotonic()
            assert got(live, [b"elsewhere"]) == [None]
            assert time.monotonic() - started < 20
            wait_until(lambda: state(live) == "degraded", 20)
            started = time.monotonic()
            assert got(live, keys(8, "down")) == list(blocks(keys(8, "down")).values())
            for number in range(5):
                assert got(live, [f"another {number}".encode()]) == [None]
            with BlockCache("app", SIZE, socket=live.socket) as cache:
                assert cache.put(blocks(keys(8, "down more"))) == 8
            assert time.monotonic() - started < 20
        finally:
            server.thaw()
        wait_until(lambda: state(live) == "ready", 60)
        # What the daemon gave up may have arrived all the same, once the server went on.
        wait_until(lambda: len(names_in(server.objects)) >= before + 16, 60)
        live.assert_sound()


def test_nothing_secret_is_told(server: S3Server) -> None:
    with node(server) as live:
        server.deny()
        try:
            with BlockCache("app", SIZE, socket=live.socket) as cache:
                assert cache.put(blocks(keys(4))) == 4
            wait_until(lambda: state(live) == "degraded", 20)
            told = f"{live.ask('info')} {live.ask('config')} {live.stats()} {live.handle.text()}"
        finally:
            server.deny(False)
    assert server.url in told
    assert "403" in told
    assert server.variables["AWS_SECRET_ACCESS_KEY"] not in told
    assert server.variables["AWS_ACCESS_KEY_ID"] not in told


def test_a_url_with_credentials_is_refused_without_showing_them() -> None:
    factory = DaemonFactory()
    try:
        for url in ("s3://key:hush-hush@bucket", "s3://bucket/folder?secret=hush-hush"):
            said = refusal("serve", env=factory.environment(HPKV_REMOTE=url), exit_code=78)
            assert "hush-hush" not in said
            assert "HPKV_REMOTE" in said
        said = refusal("serve", env=factory.environment(HPKV_REMOTE_KEY_FILE="/nowhere"), exit_code=78)
        assert "/nowhere" in said
    finally:
        factory.close()


def remote_command(store: Folder | S3Server, *arguments: str, exit_code: int = 0) -> dict[str, Any]:
    """Run ``hpkvd remote``; what it prints as JSON."""
    factory = DaemonFactory()
    try:
        env = factory.environment(HPKV_REMOTE=store.url) | store.variables
        if exit_code:
            return {"error": refusal("remote", *arguments, "--json", env=env, exit_code=exit_code)}
        done = hpkvd("remote", *arguments, "--json", env=env)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found
    finally:
        factory.close()


def test_operators_check_list_and_remove(server: S3Server) -> None:
    store = server
    for path in names_in(store.objects):
        obstore.delete(store.objects, path)
    checked = remote_command(store, "check")
    assert {"put_seconds", "exists_seconds", "get_seconds", "delete_seconds"} < set(checked)
    assert names_in(store.objects) == []
    with node(store) as live:
        put(live, keys(6))
        namespace = live.ask("info")["namespaces"][0]["id"]
        (row,) = remote_command(store, "ls")["namespaces"]
        assert (row["namespace"], row["blocks"]) == (namespace, 6)
        assert row["stored_bytes"] > 6 * SIZE
        remote_command(store, "rm", "--namespace", "0" * 63, exit_code=2)
        assert remote_command(store, "rm", "--namespace", "0" * 64)["deleted_blocks"] == 0
        assert remote_command(store, "rm", "--namespace", namespace)["deleted_blocks"] == 6
        assert names_in(store.objects) == []


def test_a_check_of_a_store_that_refuses_or_is_not_there_says_so(server: S3Server, tmp_path: Path) -> None:
    server.deny()
    try:
        assert "403" in remote_command(server, "check", exit_code=77)["error"]
    finally:
        server.deny(False)
    missing = tmp_path / "missing"
    missing.mkdir()
    gone = Folder(missing)
    missing.rmdir()
    assert "put does not work" in remote_command(gone, "check", exit_code=69)["error"]


def test_what_the_tier_does_is_in_the_metrics(folder: Folder) -> None:
    with node(folder, HPKV_METRICS="127.0.0.1:0") as live:
        put(live, keys(6))
        live.ask("clear")
        assert got(live, keys(6)) == list(blocks(keys(6)).values())
        found = Scraper(live.channel).metrics()
        wanted = {metric.name for metric in METRICS if metric.name.startswith("hpkv_remote_")}
        assert wanted <= found.names
        moved = {
            (sample.labels["tier"], sample.labels["direction"]): sample.value
            for family in found.families
            if family.name == "hpkv_transfer_blocks"
            for sample in family.samples
        }
        assert (moved["remote", "store"], moved["remote", "load"]) == (6, 6)


def overview_of(live: Observed) -> dict[str, Any]:
    """What ``hpkvd top`` shows."""
    sample = Sample(0.0, live.stats(), live.ask("info"))
    return overview(sample, sample)
