"""A store that may be killed at any instant, also in the middle of one of its calls, and goes on from its index."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from hpkv_client.types import BlockKey
from hpkv_daemon.core.ledger import NONE
from hpkv_daemon.core.policy import POLICIES
from hpkv_daemon.core.slots import ALIGNMENT
from hpkv_daemon.core.store import BlockStore
from hpkv_daemon.pool.ledger import PoolLedger
from tests.ledgers import PoolFile, reopened, snapshot, write_snapshot
from tests.property.test_store_machine import BLOCK_BYTES, EXTENT, StoreMachine, key


class Watched:
    """Passes everything on to a ledger, and calls ``watch`` before and after."""

    def __init__(self, ledger: PoolLedger, watch: Any) -> None:
        self._ledger = ledger
        self._watch = watch

    def opened(self, namespace: int, fingerprint: bytes, block_bytes: int, tenant: str) -> None:
        self._ledger.opened(namespace, fingerprint, block_bytes, tenant)

    def kept(self, slot: int, namespace: int, key: BlockKey, offset: int, parent: int, tick: int) -> None:
        self._watch()
        self._ledger.kept(slot, namespace, key, offset, parent, tick)
        self._watch()

    def used(self, slot: int, tick: int) -> None:
        self._ledger.used(slot, tick)

    def gone(self, slot: int) -> None:
        self._watch()
        self._ledger.gone(slot)
        self._watch()

    def check(self, resident: Iterable[tuple[int, int, BlockKey, int, int]]) -> None:
        self._ledger.check(resident)


class MortalStore(StoreMachine):
    """The life of ``StoreMachine``, with an index. At any instant the index tells a truth that the pages bear out.

    After a step it tells exactly what is resident, in the same slots; a restart goes on from there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="hpkv-t-", dir="/dev/shm"))
        self.copy = self.directory / "copy"
        self.copy.mkdir()
        self.instants: list[tuple[Any, list[int]]] = []
        self.ledger: PoolLedger | None = None

    def new_store(self, pool_bytes: int) -> BlockStore:
        self.pool = PoolFile(self.directory / "pool", pool_bytes)
        return self.life()

    def life(self) -> BlockStore:
        """The store of the next daemon on this pool, with the namespaces under the numbers that the model knows."""
        self.ledger = self.pool.open(EXTENT)
        left = None if self.ledger.cold else self.ledger.recorded()
        watched = Watched(self.ledger, self.note_instant)
        store = BlockStore(self.pool.size, POLICIES[self.policy], EXTENT, ledger=watched)
        for number, size in enumerate(BLOCK_BYTES):
            assert store.open_namespace(bytes([number]) * 32, size) == number
        if left is not None:
            assert store.restore(left) == len(left.slots)
        self.instants.clear()
        return store

    def note_instant(self) -> None:
        assert self.ledger is not None
        self.instants.append((snapshot(self.ledger), list(self.pages)))

    def restored(self, taken: Any) -> dict[tuple[int, int, bytes], tuple[int, int]]:
        """What a daemon that starts on this copy of the index serves.

        Slot and parent by namespace, offset and key.
        """
        copy = PoolFile(self.copy / "pool", self.pool.size)
        write_snapshot(copy.index, taken)
        store, ledger = reopened(copy, EXTENT, self.policy)
        assert ledger.cold == ""
        store.check()
        ledger.close()
        found = {}
        for namespace in store.blocks.namespaces:
            number = namespace.fingerprint[0]
            for block_key, slot in namespace.slots.items():
                found[number, store.offset(slot), block_key] = slot, store.blocks.table.parent[slot]
        return found

    @invariant()
    def every_instant_of_the_step_was_a_good_one_to_die(self) -> None:
        for taken, pages in self.instants:
            contents = {key(*place): content for place, content in self.ids.items()}
            for number, offset, block_key in self.restored(taken):
                first = offset // ALIGNMENT
                there = pages[first : first + -(-BLOCK_BYTES[number] // ALIGNMENT)]
                assert set(there) == {contents[block_key]}
        self.instants.clear()

    @invariant()
    def the_index_tells_exactly_what_is_resident(self) -> None:
        assert self.ledger is not None
        expected = {}
        for (namespace, path), block in self.visible.items():
            if block.state == "resident":
                above = NONE if block.parent is None else self.visible[namespace, block.parent].slot
                place = namespace, self.store.offset(block.slot), key(namespace, path)
                expected[place] = block.slot, above
        assert self.restored(snapshot(self.ledger)) == expected

    @rule(sure=st.integers(0, 2))
    def die_and_go_on(self, sure: int) -> None:
        if sure:
            return
        assert self.ledger is not None
        # Neither closed nor told: the file is as it is.
        dead = self.ledger
        tick = self.store.blocks.tick
        self.store = self.life()
        dead.close()
        assert self.store.blocks.tick <= tick
        self.visible = {place: block for place, block in self.visible.items() if block.state == "resident"}
        self.writers, self.readers = [], []

    def teardown(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.directory)
            if self.ledger is not None:
                stack.callback(self.ledger.close)
            super().teardown()


class MortalS3FifoStore(MortalStore):
    """The same with the other policy."""

    policy = "s3fifo"


_settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestMortalStoreWithLru = MortalStore.TestCase
TestMortalStoreWithLru.settings = _settings
TestMortalStoreWithS3Fifo = MortalS3FifoStore.TestCase
TestMortalStoreWithS3Fifo.settings = _settings
