"""The daemon that tests of loads, stores and leases share, one for each file, and a place on the disk for others."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import Observed, Rank, observed_daemon, plain_shard


@pytest.fixture(scope="module")
def shared() -> Iterator[Observed]:
    """The daemon of this module."""
    with observed_daemon(HPKV_KV_MEM_POOL_SIZE="96m") as observed:
        yield observed


@pytest.fixture(scope="module")
def resting(shared: Observed) -> Iterator[Rank]:
    """A rank that does nothing but keep the mover."""
    with Rank(shared.socket, plain_shard(4096, 1), engine="resting").register() as rank:
        rank.ready()
        yield rank


@pytest.fixture
def live(shared: Observed, resting: Rank) -> Iterator[Observed]:
    """The shared daemon, empty before the test and clean after it."""
    assert resting.call("heartbeat")["ready"]
    shared.ask("clear")
    yield shared
    shared.faults("")
    shared.settle(sessions=1, engines=1)
    assert shared.stats()["internal_errors"] == 0
    assert "Traceback" not in shared.handle.text()


@pytest.fixture
def storage() -> Iterator[Path]:
    """An empty directory on the machine's disk."""
    path = Path(tempfile.mkdtemp(prefix="hpkv-storage-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
