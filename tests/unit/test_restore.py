"""What a store makes of the blocks that an earlier one left: the tree, the order, the accounts, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hpkv_client.types import Keys, typed_digest
from hpkv_client.values import parse_quotas
from hpkv_daemon.core.ledger import NONE, Recorded, RecordedNamespace
from hpkv_daemon.core.policy import POLICIES
from hpkv_daemon.core.slots import ALIGNMENT, SlotPool
from hpkv_daemon.core.store import BlockStore
from tests.ledgers import PoolFile, put, reopened, victims

EXTENT = 16 * ALIGNMENT
EXTENTS = 8
ROOM = EXTENT * EXTENTS
FEW, MANY = 16, 128
"""Blocks of one extent, of the pool."""

Entry = tuple[int, int, int, int, bytes]
"""Slot, offset in units of ALIGNMENT, parent, namespace, key."""


def recorded(*entries: Entry, sizes: tuple[int, ...] = (ALIGNMENT, 3 * ALIGNMENT)) -> Recorded:
    """Records as an index would give them; the last use is the position."""
    return Recorded(
        [RecordedNamespace(bytes([number]) * 32, size, "") for number, size in enumerate(sizes)],
        [entry[0] for entry in entries],
        [entry[3] for entry in entries],
        [entry[1] * ALIGNMENT for entry in entries],
        [entry[2] for entry in entries],
        list(range(1, len(entries) + 1)),
        b"".join(entry[4].ljust(32) for entry in entries),
    )


def survivors(*entries: Entry, sizes: tuple[int, ...] = (ALIGNMENT, 3 * ALIGNMENT)) -> set[bytes]:
    """The keys that come back; the store is sound, and all of its room can still be used."""
    store = BlockStore(ROOM, POLICIES["lru"], EXTENT)
    store.restore(recorded(*entries, sizes=sizes))
    store.check()
    found = {key.strip() for namespace in store.blocks.namespaces for key in namespace.slots}
    store.clear()
    number = store.open_namespace(b"fresh" * 6 + b"xx", ALIGNMENT)
    keys = [typed_digest(i) for i in range(MANY)]
    assert len(store.reserve(number, None, keys, "writer").reserved) == MANY
    store.check()
    return found


def test_a_tree_comes_back_in_whatever_order_it_is_told() -> None:
    entries = [(3, 0, NONE, 0, b"root"), (0, 5, 3, 0, b"left"), (9, 7, 3, 0, b"right"), (4, 1, 9, 0, b"leaf")]
    for seed in range(10):
        random.Random(seed).shuffle(entries)
        assert survivors(*entries) == {b"root", b"left", b"right", b"leaf"}


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ((1, MANY, NONE, 0, b"x"), "behind the pool"),
        ((1, -1, NONE, 0, b"x"), "before the pool"),
        ((MANY, 1, NONE, 0, b"x"), "no slot has this number"),
        ((-2, 1, NONE, 0, b"x"), "no slot has this number"),
        ((1, 1, 77, 0, b"x"), "its parent is not there"),
        ((1, 1, 1, 0, b"x"), "it is its own parent"),
        ((1, 0, NONE, 0, b"x"), "another block lies there"),
        ((1, 1, NONE, 0, b"good"), "the key is there already"),
        ((1, 3, NONE, 1, b"x"), "it lies in a span of another size"),
        ((1, 2 * FEW + 1, NONE, 1, b"x"), "no slot of its size begins there"),
        ((1, 7 * FEW, NONE, 3, b"x"), "a span of its size does not fit there"),
        ((1, 3 * FEW, 0, 1, b"x"), "its parent is of another namespace"),
        ((1, 1, NONE, 2, b"x"), "not one of its blocks fits into the pool"),
    ],
)
def test_a_record_that_makes_no_sense_is_dropped_with_what_hangs_under_it(entry: Entry, why: str) -> None:
    sizes = (ALIGNMENT, 3 * ALIGNMENT, 2 * ROOM, 20 * ALIGNMENT)
    below = (2, 2, entry[0], entry[3], b"below")
    assert survivors((0, 0, NONE, 0, b"good"), entry, below, sizes=sizes) == {b"good"}, why


def test_two_that_are_each_others_parents_are_dropped() -> None:
    good = (0, 0, NONE, 0, b"good")
    assert survivors(good, (1, 1, 2, 0, b"a"), (2, 2, 1, 0, b"b"), (3, 3, 2, 0, b"c")) == {b"good"}


def test_a_namespace_that_is_named_twice_is_one() -> None:
    store = BlockStore(ROOM, POLICIES["lru"], EXTENT)
    told = recorded((0, 0, NONE, 0, b"a"), (1, 1, NONE, 1, b"b"), sizes=(ALIGNMENT, ALIGNMENT))
    told.namespaces[1] = told.namespaces[0]
    assert store.restore(told) == 2
    assert [len(namespace.slots) for namespace in store.blocks.namespaces] == [2]
    store.check()


def test_slots_are_adopted_where_spans_of_several_extents_can_begin_anywhere() -> None:
    generator = random.Random(1)
    for _ in range(300):
        sizes = generator.sample([1, 2, 3, 5, 7, 16, 17, 20, 24, 33, 40], 3)
        before, after = SlotPool(ROOM, EXTENT), SlotPool(ROOM, EXTENT)
        for size in sizes:
            number = before.open_class(size * ALIGNMENT)
            assert number == after.open_class(size * ALIGNMENT)
        used: list[tuple[int, int, int]] = []
        for _ in range(generator.randrange(200)):
            if used and generator.random() < 0.4:
                slot, *_ = used.pop(generator.randrange(len(used)))
                before.release(slot)
                continue
            slot = before.allocate(number := generator.randrange(3))
            if slot is not None:
                used.append((slot, number, before.offset(slot)))
        assert list(after.adopt(used)) == [1] * len(used)
        assert [(slot, after.class_of(slot), after.offset(slot)) for slot, *_ in used] == used
        taken = {slot for slot, *_ in used}
        while (slot := after.allocate(generator.randrange(3))) is not None:
            assert slot not in taken
            used.append((slot, after.class_of(slot), after.offset(slot)))
            taken.add(slot)
        pages = [
            page
            for _, number, offset in used
            for page in range(offset // ALIGNMENT, (offset + after.classes[number].slot_bytes) // ALIGNMENT)
        ]
        assert len(pages) == len(set(pages))


@pytest.mark.parametrize("seed", range(5))
def test_blocks_leave_in_the_same_order_after_a_restart(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    pool = PoolFile(tmp_path / "pool", ROOM)
    store, ledger = reopened(pool, EXTENT)
    namespace = store.open_namespace(b"n" * 32, ALIGNMENT)
    chains = [[typed_digest(number, depth) for depth in range(12)] for number in range(20)]
    for _ in range(200):
        chain = generator.choice(chains)
        if generator.random() < 0.5:
            put(store, namespace, chain[: generator.randrange(1, 13)])
        else:
            lease = store.acquire(namespace, Keys.of(chain[: generator.randrange(1, 13)]), "reader", 0.0)
            store.expire(1.0)
            assert lease is None or lease.released
    assert store.blocks.counters["evicted_blocks"]
    ledger.close()
    again, ledger = reopened(pool, EXTENT)
    ledger.close()
    assert again.blocks.tick == store.blocks.tick
    assert victims(again) == victims(store)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_accounts_are_as_before_and_a_smaller_maximum_is_kept_at_once(tmp_path: Path, policy: str) -> None:
    pool = PoolFile(tmp_path / "pool", ROOM)
    wide = parse_quotas("apple=25%:50%")
    store, ledger = reopened(pool, EXTENT, policy, quotas=wide)
    apple, other = store.open_namespace(b"a" * 32, ALIGNMENT, "apple"), store.open_namespace(b"o" * 32, 100, "other")
    for number in range(MANY):
        put(store, apple, [typed_digest("apple", number)])
        put(store, other, [typed_digest("other", number)])
    held = {account.name: account.held for account in store.blocks.accounts}
    assert held["apple"] == ROOM // 2
    ledger.close()
    store, ledger = reopened(pool, EXTENT, policy, quotas=wide)
    assert {account.name: account.held for account in store.blocks.accounts} == held
    store.check()
    ledger.close()
    narrow = parse_quotas("apple=:10%")
    store, ledger = reopened(pool, EXTENT, policy, quotas=narrow)
    assert {account.name: account.held for account in store.blocks.accounts} == {
        "apple": ROOM // 10 // ALIGNMENT * ALIGNMENT,
        "": held[""],
    }
    store.check()
    oldest_left = store.contains(0, typed_digest("apple", MANY - 1)), store.contains(0, typed_digest("apple", 64))
    assert oldest_left == (True, False)
    resident = store.blocks.usage.resident_blocks
    ledger.close()
    store, ledger = reopened(pool, EXTENT, policy, quotas=narrow)
    assert store.blocks.restored_blocks == resident
    ledger.close()
