"""What operators do to the disk of a running daemon."""

from __future__ import annotations

import json
from pathlib import Path

from hpkv_client.client import BlockCache
from tests.daemons import hpkvd
from tests.storage import SIZE, daemon_on, damage, fill, kept, keys, state
from tests.support import Observed, content, wait_until


def command(live: Observed, *words: str, code: int = 0) -> dict[str, object]:
    """What a command of the command line answers."""
    done = hpkvd(*words, "--json", env=live.handle.env)
    assert done.returncode == code, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def test_a_drained_pool_may_be_discarded(storage: Path) -> None:
    names = keys(48)
    rare = {"HPKV_STORAGE_WRITE": "demote", "HPKV_STORAGE_IDLE_SECONDS": 3600, "HPKV_STORAGE_ADMISSION": "second-touch"}
    with daemon_on(storage, **rare) as live:
        with BlockCache("app", SIZE, socket=live.socket) as cache:
            assert cache.put({key: content(key, SIZE) for key in names}) == 48
        assert kept(live) == 0
        answer = command(live, "drain")
        assert (answer["over"], answer["problem"], answer["written_blocks"]) == (True, "", 48)
        assert command(live, "drain")["written_blocks"] == 0
        assert hpkvd("stop", "--discard", env=live.handle.env).returncode == 0
        live.handle.restart()
        wait_until(lambda: state(live) == "ready", 20)
        assert live.stats()["pool_resident_blocks"] == 0
        with BlockCache("app", SIZE, socket=live.socket) as cache:
            assert cache.get(names) == [content(key, SIZE) for key in names]


def test_a_drain_that_the_disk_does_not_take_fails_and_says_why(storage: Path) -> None:
    with daemon_on(storage) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        live.faults("disk_write=fail")
        assert cache.put({key: content(key, SIZE) for key in keys(8)}) == 8
        wait_until(lambda: state(live) == "degraded", 20)
        assert command(live, "drain", code=1)["problem"] == live.ask("info")["storage"]["reason"]
        live.faults("")
        wait_until(lambda: state(live) == "ready", 60)
        command(live, "drain")
        assert kept(live) == 8


def test_without_storage_there_is_nothing_to_drain_to_or_to_verify() -> None:
    from tests.support import observed_daemon

    with observed_daemon() as live:
        assert command(live, "drain", code=1)["problem"] == "there is no storage"
        done = hpkvd("scrub", env=live.handle.env)
        assert (done.returncode, done.stdout) == (2, "")
        assert "HPKV_KV_STORAGE_PATH" in done.stderr


def test_a_scrub_finds_what_is_damaged_and_only_that(storage: Path) -> None:
    names = keys(40)
    with daemon_on(storage) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        fill(live, cache, names)
        found = command(live, "scrub", "--rate", "1g")
        assert (found["over"], found["good_blocks"], found["bad_blocks"]) == (True, 40, 0)
        fill(live, cache, keys(64, "flood"))
        damage(storage, content(names[7], SIZE))
        found = command(live, "scrub", code=1)
        assert (found["good_blocks"], found["bad_blocks"]) == (103, 1)
        assert kept(live) == 103
        assert command(live, "scrub")["bad_blocks"] == 0
        assert cache.get(names[6:9]) == [content(names[6], SIZE), None, content(names[8], SIZE)]


def test_a_scrub_goes_on_alone_and_keeps_to_its_rate(storage: Path) -> None:
    with daemon_on(storage) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        fill(live, cache, keys(32))
        assert not command(live, "scrub", "--no-wait", "--rate", str(16 * SIZE))["over"]
        assert hpkvd("scrub", env=live.handle.env).returncode == 75
        assert None not in cache.get(keys(32))
        wait_until(lambda: live.ask("scrub")["over"], 30)
        assert live.ask("scrub")["good_blocks"] == 32


def test_the_storage_of_another_daemon_is_imported_and_each_block_verified(storage: Path) -> None:
    names, theirs = keys(60), storage / "theirs"
    with daemon_on(theirs) as live:
        with BlockCache("app", SIZE, socket=live.socket) as cache:
            fill(live, cache, names)
        assert hpkvd("stop", env=live.handle.env).returncode == 0
    damage(theirs, content(names[11], SIZE))
    ours = storage / "ours"
    with daemon_on(ours) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        fill(live, cache, names[:10])
        answer = command(live, "import", str(theirs))
        assert (answer["imported_blocks"], answer["known_blocks"], answer["bad_blocks"]) == (49, 10, 1)
        assert kept(live) == 59
        assert command(live, "import", str(theirs))["imported_blocks"] == 0
        for start in range(0, 60, 20):
            some = names[start : start + 20]
            assert cache.get(some) == [None if key == names[11] else content(key, SIZE) for key in some]
        assert live.ask("check")["ok"]
    with daemon_on(theirs) as live, BlockCache("app", SIZE, socket=live.socket) as cache:
        assert cache.get(names[20:30]) == [content(key, SIZE) for key in names[20:30]], "their files are still theirs"


def test_what_is_no_storage_or_in_use_is_not_imported(storage: Path, tmp_path: Path) -> None:
    theirs, ours = storage / "theirs", storage / "ours"
    with daemon_on(theirs) as other, daemon_on(ours) as live:
        done = hpkvd("import", str(theirs), env=live.handle.env)
        assert (done.returncode, f"pid {other.handle.pid}" in done.stderr) == (75, True)
        done = hpkvd("import", str(ours), env=live.handle.env)
        assert done.returncode == 75
        done = hpkvd("import", str(tmp_path), env=live.handle.env)
        assert done.returncode == 2
        assert not list(tmp_path.iterdir())
        assert live.ask("check")["ok"]
