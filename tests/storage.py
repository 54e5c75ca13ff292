"""A real daemon with a small pool and a disk tier, and what tests ask of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpkv_client.client import BlockCache
from tests.support import Observed, content, observed_daemon, wait_until

SIZE = 64 << 10
POOL = 4 << 20
"""Room for 64 blocks."""
BUDGET = 256 << 20


@contextmanager
def daemon_on(storage: Path, **env: Any) -> Iterator[Observed]:
    """A daemon with a small pool and a disk tier, ready to write."""
    settings = {"HPKV_KV_MEM_POOL_SIZE": POOL, "HPKV_KV_STORAGE_PATH": storage, "HPKV_STORAGE_SIZE": BUDGET}
    with observed_daemon(**(settings | env)) as live:
        wait_until(lambda: state(live) == "ready", 20)
        yield live


def state(live: Observed) -> str:
    """How the disk tier is."""
    return str(live.ask("info")["storage"]["state"])


def kept(live: Observed) -> int:
    """Blocks on disk, once nothing waits to be written."""

    def settled() -> Any:
        usage = live.ask("info")["storage"]
        return not (usage["queued_blocks"] or usage["queued_bytes"]) and usage

    return int(wait_until(settled, 20)["blocks"])


def keys(count: int, name: str = "key") -> list[bytes]:
    return [f"{name} {i}".encode() for i in range(count)]


def fill(live: Observed, cache: BlockCache, names: list[bytes]) -> None:
    """Store blocks a few at a time, so that each is on disk before the pool needs its slot."""
    for start in range(0, len(names), 16):
        some = names[start : start + 16]
        assert cache.put({key: content(key, SIZE) for key in some}) == len(some)
        kept(live)


def damage(storage: Path, payload: bytes) -> None:
    """Overwrite a part of a block on the disk."""
    for segment in storage.glob("segment-*.hpkv"):
        at = segment.read_bytes().find(payload)
        if at >= 0:
            with segment.open("r+b") as file:
                file.seek(at + 100)
                file.write(b"damage")
            return
    raise AssertionError("the block is in no segment")
