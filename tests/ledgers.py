"""The index of a pool without a daemon: what it needs to know of the pool, and copies of it at one instant."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpkv_daemon.core.policy import POLICIES
from hpkv_daemon.core.store import BlockStore
from hpkv_daemon.pool import ledger as ledgers
from hpkv_daemon.pool.ledger import PoolLedger


@dataclass
class PoolFile:
    """All that an index knows of its pool."""

    path: Path
    size: int
    cold: str = ""
    identity: int = 7

    def open(self, extent_bytes: int) -> PoolLedger:
        """Its index."""
        return PoolLedger.open(self, extent_bytes)  # type: ignore[arg-type]

    @property
    def index(self) -> Path:
        """The index' file."""
        return self.path.with_name("index")


def snapshot(ledger: PoolLedger) -> tuple[int, list[tuple[int, bytes]]]:
    """The index' file as a process that dies right now would leave it: size, and its pieces by offset."""
    fd = ledger._fd
    head = ledgers.PAGE_BYTES * (1 + ledger._namespaces)
    pieces = [(0, head), (ledgers.RECORDS_AT, ledger._records * ledgers.RECORD_BYTES)]
    return os.fstat(fd).st_size, [(at, os.pread(fd, length, at)) for at, length in pieces]


def write_snapshot(path: Path, taken: tuple[int, list[tuple[int, bytes]]]) -> None:
    """Make a file of it."""
    size, pieces = taken
    with path.open("wb") as file:
        file.truncate(size)
        for at, content in pieces:
            os.pwrite(file.fileno(), content, at)


def reopened(pool: PoolFile, extent_bytes: int, policy: str = "lru", **more: Any) -> tuple[BlockStore, PoolLedger]:
    """The store of the next daemon on this pool."""
    ledger = pool.open(extent_bytes)
    store = BlockStore(pool.size, POLICIES[policy], extent_bytes, ledger=ledger, **more)
    if not ledger.cold:
        store.restore(ledger.recorded())
    return store, ledger


def put(store: BlockStore, namespace: int, keys: list[bytes], parent: bytes | None = None) -> int:
    """Store a chain; how many became resident."""
    return store.commit(store.reserve(namespace, parent, keys, "writer"))


def placed(store: BlockStore) -> dict[tuple[bytes, bytes], tuple[int, int]]:
    """Slot and offset of every resident block, by fingerprint and key."""
    found = {}
    for namespace in store.blocks.namespaces:
        for key, slot in namespace.slots.items():
            if store.blocks.resident(store.find_namespace(namespace.fingerprint) or 0, key) >= 0:
                found[namespace.fingerprint, key] = (slot, store.offset(slot))
    return found


def victims(store: BlockStore) -> list[bytes]:
    """The keys of all blocks in the order in which they would be evicted. Empties the store."""
    order = []
    while store.blocks.usage.resident_blocks:
        slot = store.blocks._victim(store.blocks.namespaces[0])
        assert slot is not None
        order.append(store.blocks.key_of(slot))
        store.blocks.evict(slot)
    return order
