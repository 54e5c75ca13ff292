"""A namespace out of one daemon and into another, while both serve."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpkv_client.client import BlockCache
from tests.daemons import DaemonFactory, hpkvd, refusal
from tests.support import NOBODY, Child, Observed, Rank, content, hashes, observed_daemon, plain_shard

SIZE = 64 << 10
TRUNK, LEFT, RIGHT = hashes("a", "b", "c"), hashes("d", "e"), hashes("f")


@pytest.fixture(scope="module")
def live() -> Iterator[Observed]:
    with observed_daemon(HPKV_KV_MEM_POOL_SIZE="8m", HPKV_SOCKET_MODE="0666") as made:
        made.socket.parent.chmod(0o755)
        yield made


@pytest.fixture
def rank(live: Observed) -> Iterator[Rank]:
    """A ready rank that has stored a tree of six blocks."""
    live.ask("clear")
    with a_rank(live) as made:
        for names, parent in ((TRUNK, None), (LEFT, TRUNK[-1]), (RIGHT, TRUNK[-1])):
            for index, name in enumerate(names):
                made.block(index)[:] = bytearray(content(name, SIZE))
            assert made.store(names, range(len(names)), parent=parent) == len(names)
        yield made
    live.ask("clear")
    live.settle()


def a_rank(live: Observed, **more: object) -> Rank:
    return Rank(live.socket, plain_shard(SIZE, 8), engine="e").hello().register(model="m", **more).ready()


def exported(live: Observed, path: Path, model: str = "m") -> dict:
    ids = {row["model"]: row["id"] for row in live.ask("info")["namespaces"]}
    done = hpkvd("export", str(path), "--namespace", ids[model][:12], "--json", env=live.handle.env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_whole(rank: Rank) -> None:
    """Both branches of the tree are found, with their bytes."""
    for names in ([*TRUNK, *LEFT], [*TRUNK, *RIGHT]):
        hit, lease = rank.match(names)
        assert hit == len(names)
        rank.load(lease, range(hit))
        for index, name in enumerate(names):
            assert bytes(rank.block(index)) == content(name, SIZE)
        rank.call("release", lease=lease)


def test_a_tree_comes_back_into_the_daemon_it_came_from(live: Observed, rank: Rank, tmp_path: Path) -> None:
    path = tmp_path / "m.hpkv"
    told = exported(live, path)
    assert (told["model"], told["blocks"], told["left_out_blocks"]) == ("m", 6, 0)
    assert told["size_bytes"] == path.stat().st_size > 6 * SIZE
    assert path.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [path]
    live.ask("clear")
    assert rank.match(TRUNK)[0] == 0
    back = json.loads(hpkvd("restore", str(path), "--json", env=live.handle.env).stdout)
    assert (back["blocks"], back["kept_blocks"]) == (6, 6)
    assert_whole(rank)
    again = hpkvd("restore", str(path), env=live.handle.env)
    assert "6 of 6 blocks of m are in memory" in again.stderr
    assert live.stats()["pool_resident_blocks"] == 6
    assert live.ask("check")["ok"]
    assert "is there already" in refusal(
        "export", str(path), "--namespace", told["namespace"], env=live.handle.env, exit_code=2
    )


@pytest.mark.usefixtures("rank")
def test_another_daemon_has_it_before_its_engine_comes(live: Observed, daemon: DaemonFactory, tmp_path: Path) -> None:
    path = tmp_path / "m.hpkv"
    exported(live, path)
    other = daemon(HPKV_KV_MEM_POOL_SIZE="8m")
    assert hpkvd("restore", str(path), env=other.env).returncode == 0
    (row,) = other.client().call("info", {}, 30.0)["namespaces"]
    assert (row["model"], row["blocks"]) == ("m", 6)
    with Rank(other.socket, plain_shard(SIZE, 8), engine="x").hello().register(model="m").ready() as engine:
        assert_whole(engine)
    assert other.client().call("check", {}, 30.0)["ok"]


def test_blocks_without_parents_of_a_plain_program(live: Observed, tmp_path: Path) -> None:
    names = [f"k{i}".encode() for i in range(30)]
    path = tmp_path / "p.hpkv"
    with BlockCache("plain program", SIZE, arena_blocks=8, socket=live.socket) as cache:
        cache.put({name: content(name, SIZE) for name in names})
        assert exported(live, path, "plain program")["blocks"] == 30
        cache.clear()
        assert hpkvd("restore", str(path), env=live.handle.env).returncode == 0
        assert cache.get(names) == [content(name, SIZE) for name in names]
        cache.clear()


def test_what_is_evicted_meanwhile_is_left_out_with_what_hangs_below(live: Observed, tmp_path: Path) -> None:
    over = threading.Event()
    with a_rank(live) as rank, BlockCache("flood", SIZE, socket=live.socket) as flood:

        def pour() -> None:
            number = 0
            while not over.is_set():
                number += 1
                flood.put({f"{number} {i}".encode(): bytes(SIZE) for i in range(16)})

        rank.store(hashes(*range(8)), range(8))
        thread = threading.Thread(target=pour)
        thread.start()
        try:
            for number in range(3):
                rank.store(hashes(*(f"{number}-{i}" for i in range(8))), range(8))
                path = tmp_path / f"{number}.hpkv"
                told = exported(live, path)
                assert told["blocks"] >= 0
        finally:
            over.set()
            thread.join()
        live.ask("clear")
        back = json.loads(hpkvd("restore", str(path), "--json", env=live.handle.env).stdout)
        assert back["kept_blocks"] == back["blocks"] == told["blocks"]
        assert live.ask("check")["ok"]
        live.ask("clear")


def test_a_damaged_file_gives_what_comes_before_the_damage(live: Observed, rank: Rank, tmp_path: Path) -> None:
    path = tmp_path / "m.hpkv"
    exported(live, path)
    live.ask("clear")
    data = bytearray(path.read_bytes())
    data[-28 - 10] ^= 1
    path.write_bytes(data)
    assert "block 5 of the file is damaged" in refusal("restore", str(path), env=live.handle.env, exit_code=1)
    assert live.stats()["pool_resident_blocks"] == 5
    hit, lease = rank.match(TRUNK)
    rank.call("release", lease=lease)
    assert hit == 3
    path.write_bytes(b"not at all")
    assert "no export" in refusal("restore", str(path), env=live.handle.env, exit_code=1)


def test_what_is_not_there_is_told(live: Observed, tmp_path: Path) -> None:
    said = refusal("export", str(tmp_path / "x"), "--namespace", "ffffffffffff", env=live.handle.env, exit_code=2)
    assert "see 'hpkvd info'" in said
    assert refusal("restore", str(tmp_path / "nothing"), env=live.handle.env, exit_code=1)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.usefixtures("rank")
def test_another_user_copies_nothing(live: Observed) -> None:
    namespace = live.ask("info")["namespaces"][0]["id"]
    code = (
        f"os.setuid({NOBODY})\n"
        "from hpkv_client.namespace import NamespaceCache, NamespaceId\n"
        "channel = Channel(socket)\n"
        f"name = bytes.fromhex('{namespace}')\n"
        "try: channel.call('blocks', {'namespace': name}, 30.0)\n"
        "except NotPermitted as problem: say(problem.message)\n"
        f"try: NamespaceCache(NamespaceId(name, {SIZE}), arena_blocks=1, socket=socket, timeout=10)\n"
        "except NotPermitted as problem: say(problem.message)\n"
    )
    with Child(live.handle, code) as child:
        assert child.heard() == f"uid {NOBODY} may not list the blocks of others"
        assert child.heard() == f"uid {NOBODY} may not copy whole namespaces"
