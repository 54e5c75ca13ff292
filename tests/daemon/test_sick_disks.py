"""A real file system that fills up or goes read-only under a daemon that runs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpkv_client.client import BlockCache
from tests.storage import SIZE, daemon_on, kept, keys, state
from tests.support import content, wait_until


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system of its own, with room for 160 MiB, on a loop device."""
    image, mounted = tmp_path / "image", tmp_path / "disk"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(160 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, check=False)
    if made.returncode or subprocess.run(["mount", "-o", "loop", image, mounted], check=False).returncode:
        pytest.skip("no file system can be mounted from a file here")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def put(cache: BlockCache, names: list[bytes]) -> None:
    assert cache.put({key: content(key, SIZE) for key in names}) == len(names)


def read_back(cache: BlockCache, names: list[bytes]) -> bool:
    return cache.get(names) == [content(key, SIZE) for key in names]


def test_a_full_disk_is_used_again_when_there_is_room(disk: Path) -> None:
    with (
        daemon_on(disk / "hpkv", HPKV_STORAGE_SIZE="64m") as live,
        BlockCache("app", SIZE, socket=live.socket) as cache,
    ):
        put(cache, keys(16))
        assert kept(live) == 16
        filler = disk / "filler"
        done = subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=1M"], capture_output=True, check=False)
        assert b"No space left" in done.stderr
        # More than fits into the segments that have their room already.
        for start in range(0, 1280, 32):
            put(cache, keys(1280, "more")[start : start + 32])
            assert read_back(cache, keys(1280, "more")[start : start + 32])
        usage = live.ask("info")["storage"]
        assert usage["used_bytes"] < 64 << 20
        filler.unlink()
        wait_until(lambda: state(live) == "ready", 90)
        before = live.stats()["storage_written_blocks"]
        put(cache, keys(8, "last"))
        wait_until(lambda: live.stats()["storage_written_blocks"] >= before + 8, 60)
        assert kept(live) > 0
        for number in range(4):
            put(cache, keys(24, f"flood {number}"))
        wait_until(lambda: read_back(cache, keys(8, "last")), 30)
        assert live.ask("check")["ok"]


def test_a_disk_that_went_read_only_is_still_read(disk: Path) -> None:
    names = keys(96)
    with (
        daemon_on(disk / "hpkv", HPKV_STORAGE_SIZE="64m") as live,
        BlockCache("app", SIZE, socket=live.socket) as cache,
    ):
        for start in range(0, 96, 16):
            put(cache, names[start : start + 16])
            kept(live)
        # What ext4 does by itself after an error of the device.
        subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=True)
        put(cache, keys(16, "after"))
        wait_until(lambda: state(live) == "degraded", 30)
        assert read_back(cache, keys(16, "after"))
        assert not all(cache.contains(names))
        for start in range(0, 96, 32):
            assert read_back(cache, names[start : start + 32])
        assert state(live) == "degraded"
        assert live.ask("check")["ok"]
