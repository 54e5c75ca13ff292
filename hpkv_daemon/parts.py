"""The parts of a daemon that its settings choose: store, tiers, and what is written to them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from hpkv_client.errors import ConfigError, HpkvError, UsageError
from hpkv_client.settings import Settings
from hpkv_daemon.core.admission import WritePolicy
from hpkv_daemon.core.policy import POLICIES
from hpkv_daemon.core.slots import extent_bytes_for
from hpkv_daemon.core.store import BlockStore
from hpkv_daemon.pool.file import Pool
from hpkv_daemon.pool.ledger import PoolLedger
from hpkv_daemon.service.importing import Opener
from hpkv_daemon.tiers.base import Inventory, Tier
from hpkv_daemon.tiers.disk.directory import IDENTITY_NAME, StorageDirectory
from hpkv_daemon.tiers.disk.tier import DiskTier
from hpkv_daemon.tiers.noop import NoopTier
from hpkv_daemon.tiers.remote.tier import RemoteTier

log = logging.getLogger(__name__)


def store_of(settings: Settings, pool: Pool, ledger: PoolLedger) -> BlockStore:
    """The block store of the pool, with all that an earlier daemon left in it."""
    store = BlockStore(
        pool.size,
        POLICIES[settings.policy],
        extent_bytes_for(pool.size),
        first_lease=secrets.randbits(40) << 20,
        quotas=settings.quotas,
        ledger=ledger,
    )
    if ledger.cold:
        log.info("starting cold: %s", ledger.cold)
        return store
    started = time.monotonic()
    recorded = ledger.recorded()
    blocks = store.restore(recorded)
    log.info(
        "restored %d blocks (%d bytes) in %.0f ms; %d were of no use",
        blocks,
        store.blocks.usage.resident_bytes,
        1000 * (time.monotonic() - started),
        len(recorded.slots) - blocks,
    )
    return store


def disk_tier(settings: Settings, pool: Pool, clock: Callable[[], float]) -> Tier:
    """What keeps blocks beyond the pool."""
    if settings.storage_path is None:
        return NoopTier()
    storage = StorageDirectory.open(settings.storage_path)
    try:
        try:
            budget = storage.budget(settings.storage_size)
        except ConfigError as problem:
            if settings.storage_size is not None:
                raise
            # Nobody said how much it must be: memory alone is of use, too.
            log.warning("storage is off: %s", problem)
            storage.close()
            return NoopTier()
        log.info("storage: %d bytes at most in %s", budget, settings.storage_path)
        return DiskTier(storage, budget, pool.fileno(), pool.size, clock=clock, faults=settings.faults)
    except BaseException:
        storage.close()
        raise


def remote_tier(settings: Settings, pool: Pool, clock: Callable[[], float]) -> Tier | None:
    """What keeps blocks beyond this node."""
    if settings.remote is None:
        return None
    encrypted = ", encrypted" if settings.remote_key_file else ""
    log.info("remote: blocks of %s admission in %s%s", settings.remote_admission, settings.remote, encrypted)
    return RemoteTier(
        settings.remote,
        pool.fileno(),
        pool.size,
        key_file=settings.remote_key_file,
        bytes_per_second=settings.remote_bandwidth or 0,
        clock=clock,
    )


def _inventory(path: str, pool: Pool, clock: Callable[[], float]) -> Inventory:
    """What another daemon wrote to a directory, to be read only. Raises ``HpkvError``."""
    if not (Path(path) / IDENTITY_NAME).is_file():
        raise UsageError(f"{path} holds no blocks of a daemon", "name a directory that was its HPKV_KV_STORAGE_PATH")
    storage = StorageDirectory.open(Path(path))
    try:
        # So much that nothing of it has to leave.
        budget = 4 * storage.own_bytes() + (1 << 30)
        return DiskTier(storage, budget, pool.fileno(), pool.size, clock=clock)
    except BaseException:
        storage.close()
        raise


def storage_opener(pool: Pool, loop: asyncio.AbstractEventLoop) -> Opener:
    """Opens storage for an import in a thread: its disk may not answer."""

    def open_storage(path: str, then: Callable[[Inventory | HpkvError], None]) -> None:
        def opened(future: asyncio.Future[Inventory]) -> None:
            problem = future.exception()
            if problem is None:
                then(future.result())
            elif isinstance(problem, HpkvError):
                then(problem)
            else:
                then(HpkvError(f"cannot open {path}: {problem}", "see the daemon's log"))

        loop.run_in_executor(None, _inventory, path, pool, time.monotonic).add_done_callback(opened)

    return open_storage


def disk_writes(settings: Settings) -> WritePolicy:
    """Which blocks are written to the disk, and when."""
    return WritePolicy(
        demote=settings.storage_write == "demote",
        idle_seconds=settings.storage_idle_seconds,
        second_touch=settings.storage_admission == "second-touch",
        daily_bytes=settings.storage_daily_writes,
    )


def remote_writes(settings: Settings) -> WritePolicy:
    """Which blocks are written to the remote store."""
    return WritePolicy(second_touch=settings.remote_admission == "second-touch")
