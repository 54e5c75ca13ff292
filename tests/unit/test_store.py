"""The block store by example: eviction, pins, waiting for parents, fairness between models."""

from __future__ import annotations

import gc
from time import perf_counter

import pytest

from hpkv_client.errors import Busy, LeaseLost, UsageError
from hpkv_client.types import Keys, typed_digest
from hpkv_daemon.core.index import State
from hpkv_daemon.core.policy import POLICIES, Lru
from hpkv_daemon.core.slots import ALIGNMENT
from hpkv_daemon.core.store import KEPT, MAX_NAMESPACES, NO_ROOM, ORPHAN, BlockStore

EXTENT = 4 * ALIGNMENT


def small_store(blocks: int, policy: str = "lru") -> tuple[BlockStore, int]:
    """A pool for exactly so many blocks of the one namespace in it."""
    store = BlockStore(blocks * ALIGNMENT, POLICIES[policy], ALIGNMENT)
    return store, store.open_namespace(b"m" * 32, ALIGNMENT)


def chain(name: str, length: int) -> list[bytes]:
    return [typed_digest(name, depth) for depth in range(length)]


def put(store: BlockStore, namespace: int, keys: list[bytes], parent: bytes | None = None) -> list[int]:
    reservation = store.reserve(namespace, parent, keys, "writer")
    store.commit(reservation)
    store.check()
    return reservation.slots


def put_each(store: BlockStore, namespace: int, keys: list[bytes]) -> list[int]:
    reservation = store.reserve_each(namespace, keys, "writer")
    store.commit(reservation)
    store.check()
    return reservation.slots


def hits(store: BlockStore, namespace: int, keys: list[bytes]) -> int:
    return store.match(namespace, Keys.of(keys))


def held(store: BlockStore, namespace: int, keys: list[bytes], owner: str = "reader") -> int:
    """Lease the prefix; the lease's number."""
    lease = store.acquire(namespace, Keys.of(keys), owner, 10.0)
    assert lease is not None
    return lease.number


# -- eviction ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_prefix_loses_its_tail_first_and_stays_usable(policy: str) -> None:
    store, namespace = small_store(8, policy)
    old = chain("old", 8)
    put(store, namespace, old)
    for length in range(1, 8):
        put(store, namespace, [typed_digest("new", length)])
        if policy == "lru":
            assert hits(store, namespace, old) == 8 - length
        resident = [store.contains(namespace, key) for key in old]
        assert resident == sorted(resident, reverse=True)


def test_a_head_shared_by_two_branches_stays_until_both_are_gone() -> None:
    store, namespace = small_store(4)
    head, left, right = chain("head", 2), typed_digest("left"), typed_digest("right")
    put(store, namespace, [*head, left])
    put(store, namespace, [right], parent=head[-1])
    put(store, namespace, chain("new", 1))
    assert (hits(store, namespace, [*head, left]), hits(store, namespace, [*head, right])) == (2, 3)
    put(store, namespace, chain("newer", 1))
    assert hits(store, namespace, [*head, right]) == 2


def test_the_oldest_block_goes_first_whether_or_not_it_was_ever_read() -> None:
    store, namespace = small_store(4)
    read, never_read = chain("read", 1), chain("never read", 1)
    put(store, namespace, read)
    store.release(held(store, namespace, read), "reader")
    put(store, namespace, never_read)
    put_each(store, namespace, chain("fill", 2))
    put(store, namespace, chain("one more", 1))
    assert not store.contains(namespace, read[0])
    assert store.contains(namespace, never_read[0])


def test_a_read_makes_a_block_young_again() -> None:
    store, namespace = small_store(3)
    first, second = chain("first", 1), chain("second", 1)
    for keys in (first, second, chain("third", 1)):
        put(store, namespace, keys)
    store.release(held(store, namespace, first), "reader")
    put(store, namespace, chain("fourth", 1))
    assert store.contains(namespace, first[0])
    assert not store.contains(namespace, second[0])


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_blocks_under_a_lease_or_a_writer_are_never_victims(policy: str) -> None:
    store, namespace = small_store(6, policy)
    leased, parent = chain("leased", 2), chain("parent", 1)
    put(store, namespace, leased)
    put(store, namespace, parent)
    held(store, namespace, leased)
    growing = store.reserve(namespace, parent[0], chain("growing", 1), "writer")
    for number in range(20):
        put(store, namespace, [typed_digest("stream", number)])
    assert hits(store, namespace, leased) == 2
    assert store.contains(namespace, parent[0])
    assert store.commit(growing) == 1
    assert store.blocks.counters["evicted_blocks"] == 18


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_pool_full_of_pinned_blocks_says_no_room_and_recovers_after_the_release(policy: str) -> None:
    store, namespace = small_store(4, policy)
    pinned, wanted = chain("pinned", 4), chain("wanted", 2)
    put(store, namespace, pinned)
    lease = held(store, namespace, pinned)
    assert put(store, namespace, wanted) == [NO_ROOM, NO_ROOM]
    assert put_each(store, namespace, wanted) == [NO_ROOM, NO_ROOM]
    assert store.blocks.counters["dropped_full_blocks"] == 4
    assert hits(store, namespace, pinned) == 4
    store.release(lease, "reader")
    assert all(slot >= 0 for slot in put(store, namespace, wanted))
    assert hits(store, namespace, wanted) == 2


def test_a_pool_full_of_reservations_says_no_room_and_recovers_after_the_abort() -> None:
    store, namespace = small_store(2)
    stuck = store.reserve_each(namespace, chain("stuck", 2), "writer")
    assert put(store, namespace, chain("wanted", 1)) == [NO_ROOM]
    store.abort(stuck)
    assert put(store, namespace, chain("wanted", 1))[0] >= 0


def test_only_the_part_of_a_chain_that_fits_is_stored() -> None:
    store, namespace = small_store(4)
    long = chain("long", 6)
    slots = put(store, namespace, long)
    assert [slot >= 0 for slot in slots] == [True] * 4 + [False] * 2
    assert slots[4:] == [NO_ROOM] * 2
    assert hits(store, namespace, long) == 4


# -- sizes ---------------------------------------------------------------------------------------------------


def test_a_block_larger_than_the_pool_is_refused_at_once_with_both_sizes() -> None:
    store = BlockStore(8 * EXTENT, Lru, EXTENT)
    with pytest.raises(UsageError, match=f"{8 * EXTENT + 1} bytes.*{8 * EXTENT} bytes; start hpkvd with"):
        store.open_namespace(b"m" * 32, 8 * EXTENT + 1)
    assert store.find_namespace(b"m" * 32) is None
    namespace = store.open_namespace(b"m" * 32, 8 * EXTENT)
    assert put(store, namespace, chain("whole pool", 1))[0] >= 0


@pytest.mark.parametrize("pool", [0, 1, ALIGNMENT - 1])
def test_a_pool_smaller_than_any_block_refuses_every_namespace(pool: int) -> None:
    with pytest.raises(UsageError):
        BlockStore(pool, Lru).open_namespace(b"m" * 32, 1)


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_of_no_bytes_is_refused(size: int) -> None:
    with pytest.raises(UsageError):
        BlockStore(1 << 20, Lru).open_namespace(b"m" * 32, size)


def test_one_fingerprint_has_one_block_size() -> None:
    store = BlockStore(1 << 20, Lru)
    number = store.open_namespace(b"m" * 32, 4096)
    assert store.open_namespace(b"m" * 32, 4096) == number
    with pytest.raises(UsageError, match="4096"):
        store.open_namespace(b"m" * 32, 4097)


def test_invented_namespaces_come_to_an_end_and_known_ones_go_on() -> None:
    store = BlockStore(1 << 20, Lru)
    names = [number.to_bytes(32, "big") for number in range(MAX_NAMESPACES)]
    numbers = [store.open_namespace(name, 4096) for name in names]
    with pytest.raises(Busy):
        store.open_namespace(b"n" * 32, 4096)
    assert store.open_namespace(names[7], 4096) == numbers[7]


def test_a_key_of_the_wrong_length_never_gets_in() -> None:
    store, namespace = small_store(4)
    put(store, namespace, chain("good", 2))
    for key in (b"", b"k" * 31, b"k" * 33):
        with pytest.raises(ValueError, match=str(len(key))):
            store.reserve_each(namespace, [key], "writer")
    store.check()
    assert hits(store, namespace, chain("good", 2)) == 2


# -- writers -------------------------------------------------------------------------------------------------


def test_a_child_that_is_complete_before_its_parent_waits_for_it() -> None:
    store, namespace = small_store(4)
    keys = chain("prefix", 3)
    parent = store.reserve(namespace, None, keys[:1], "one")
    middle = store.reserve(namespace, keys[0], keys[1:2], "two")
    child = store.reserve(namespace, keys[1], keys[2:], "three")
    assert store.commit(child) == 0
    assert store.commit(middle) == 0
    assert hits(store, namespace, keys) == 0
    assert not store.contains(namespace, keys[2])
    assert store.outcome(namespace, keys) == (0, 2)
    assert store.commit(parent) == 3
    assert hits(store, namespace, keys) == 3
    assert store.outcome(namespace, keys) == (3, 0)


def test_an_abort_takes_the_children_of_other_writers_with_it() -> None:
    store, namespace = small_store(8)
    keys = chain("prefix", 4)
    parent = store.reserve(namespace, None, keys[:1], "one")
    complete = store.reserve(namespace, keys[0], keys[1:2], "two")
    store.commit(complete)
    writing = store.reserve(namespace, keys[1], keys[2:3], "three")
    store.abort(parent)
    store.check()
    assert put(store, namespace, keys[3:], parent=keys[2]) == [ORPHAN]
    # Its writer still copies into the slot, so nobody else may have it yet.
    again = store.reserve(namespace, None, keys[:3], "four")
    assert len(again.reserved) == 3
    assert not set(again.reserved) & set(writing.reserved)
    assert store.commit(writing) == 0
    assert store.commit(again) == 3
    assert put(store, namespace, keys[3:], parent=keys[2])[0] >= 0
    assert hits(store, namespace, keys) == 4


def test_a_block_whose_parent_is_not_here_is_an_orphan_and_takes_no_room() -> None:
    store, namespace = small_store(4)
    keys = chain("prefix", 4)
    assert put(store, namespace, keys[2:], parent=keys[1]) == [ORPHAN, ORPHAN]
    assert store.blocks.usage.reserved_blocks == 0
    put(store, namespace, keys[:2])
    assert all(slot >= 0 for slot in put(store, namespace, keys[2:], parent=keys[1]))
    # The same key under another parent would be another prefix.
    assert put(store, namespace, keys[1:2]) == [ORPHAN]


def test_a_block_that_is_here_or_being_written_is_not_stored_twice() -> None:
    store, namespace = small_store(4)
    keys = chain("prefix", 2)
    first = store.reserve(namespace, None, keys, "one")
    second = store.reserve(namespace, None, keys, "two")
    assert second.slots == [KEPT, KEPT]
    assert store.commit(second) == 0
    assert hits(store, namespace, keys) == 0
    assert store.commit(first) == 2
    assert put(store, namespace, keys) == [KEPT, KEPT]


def test_a_reservation_ends_once() -> None:
    store, namespace = small_store(4)
    committed, aborted = (store.reserve(namespace, None, chain(name, 1), "one") for name in "ab")
    store.commit(committed)
    store.abort(aborted)
    for over in (committed, aborted):
        with pytest.raises(UsageError):
            store.commit(over)
        with pytest.raises(UsageError):
            store.abort(over)
    store.check()


def test_aborting_a_long_chain_takes_time_in_proportion_to_its_length() -> None:
    store, namespace = small_store(5000)
    reservation = store.reserve(namespace, None, chain("long", 5000), "one")
    started = perf_counter()
    store.abort(reservation)
    # About 10 ms; walking the rest of the chain for each of its blocks would take seconds.
    assert perf_counter() - started < 0.5


# -- leases --------------------------------------------------------------------------------------------------


def test_releasing_a_lease_one_does_not_hold_changes_nothing() -> None:
    store, namespace = small_store(8)
    keys = chain("prefix", 8)
    put(store, namespace, keys)
    mine, theirs = held(store, namespace, keys, "mine"), held(store, namespace, keys[:4], "theirs")
    assert store.release(mine, "mine") is True
    assert store.release(mine, "mine") is False
    assert store.release(theirs, "mine") is False
    assert store.release(12345, "mine") is False
    store.check()
    for number in range(20):
        put(store, namespace, [typed_digest("stream", number)])
    assert hits(store, namespace, keys) == 4
    assert store.begin_transfer(theirs, "theirs", 0, 4)


def test_a_lease_that_expires_while_a_copy_runs_stays_pinned_until_the_copy_ends() -> None:
    store, namespace = small_store(4)
    keys = chain("prefix", 4)
    put(store, namespace, keys)
    lease = held(store, namespace, keys)
    slots = store.begin_transfer(lease, "reader", 0, 4)
    assert store.expire(1000.0) == 0
    assert put(store, namespace, chain("wanted", 1)) == [NO_ROOM]
    assert store.begin_transfer(lease, "reader", 1, 2) == slots[1:3]
    store.end_transfer(lease, 1005.0)
    assert store.expire(1000.0) == 0
    store.end_transfer(lease, 1003.0)
    assert store.expire(1004.0) == 0
    assert store.expire(1005.0) == 1
    with pytest.raises(LeaseLost):
        store.begin_transfer(lease, "reader", 0, 1)
    assert put(store, namespace, chain("wanted", 1))[0] >= 0


def test_a_dropped_owner_loses_its_leases_but_not_under_a_running_copy() -> None:
    store, namespace = small_store(4)
    idle, busy = chain("idle", 2), chain("busy", 2)
    put(store, namespace, idle)
    put(store, namespace, busy)
    held(store, namespace, idle, "dead")
    lease = held(store, namespace, busy, "dead")
    store.begin_transfer(lease, "dead", 0, 2)
    assert store.drop("dead") == 2
    with pytest.raises(LeaseLost):
        store.begin_transfer(lease, "dead", 0, 2)
    slots = put_each(store, namespace, chain("new", 4))
    assert slots.count(NO_ROOM) == 2
    assert hits(store, namespace, busy) == 2
    store.end_transfer(lease, 0.0)
    assert put_each(store, namespace, chain("newer", 4)).count(NO_ROOM) == 0


def test_the_end_of_a_copy_that_nobody_began_does_not_make_a_lease_immortal() -> None:
    store, namespace = small_store(2)
    put(store, namespace, chain("prefix", 2))
    lease = held(store, namespace, chain("prefix", 2))
    store.end_transfer(lease, 0.0)
    assert store.expire(1000.0) == 1
    store.check()


@pytest.mark.parametrize(("first", "length"), [(-1, 1), (0, 4), (3, 1), (1, -1)])
def test_a_copy_beyond_the_leased_blocks_is_refused(first: int, length: int) -> None:
    store, namespace = small_store(8)
    put(store, namespace, chain("prefix", 5))
    lease = held(store, namespace, chain("prefix", 3))
    with pytest.raises(UsageError):
        store.begin_transfer(lease, "reader", first, length)
    assert store.expire(1000.0) == 1


def test_blocks_stored_apart_are_never_leased_as_one_prefix() -> None:
    store, namespace = small_store(4)
    apart = chain("apart", 3)
    put_each(store, namespace, apart)
    lease = store.acquire(namespace, Keys.of(apart), "reader", 10.0)
    assert lease is not None
    slots = store.begin_transfer(lease.number, "reader", 0, lease.length)
    assert slots == [store.blocks.find(namespace, apart[0])]


def test_a_part_of_a_prefix_can_be_leased_without_its_head() -> None:
    store, namespace = small_store(6)
    keys = chain("prefix", 6)
    slots = put(store, namespace, keys)
    lease = store.acquire(namespace, Keys.of(keys[2:]), "reader", 10.0)
    assert lease is not None
    assert store.begin_transfer(lease.number, "reader", 0, lease.length) == slots[2:]


# -- forgetting ----------------------------------------------------------------------------------------------


def test_a_clear_hides_everything_now_and_frees_what_is_in_use_later() -> None:
    store, namespace = small_store(6)
    read, written = chain("read", 3), chain("written", 2)
    put(store, namespace, read)
    lease = held(store, namespace, read)
    reading = store.begin_transfer(lease, "reader", 0, 3)
    writing = store.reserve(namespace, None, written, "writer")
    assert store.clear() == 3
    store.check()
    assert hits(store, namespace, read) == 0
    slots = put_each(store, namespace, chain("new", 6))
    assert slots.count(NO_ROOM) == 5
    assert not set(slots) & (set(reading) | set(writing.reserved))
    assert store.commit(writing) == 0
    assert hits(store, namespace, written) == 0
    with pytest.raises(LeaseLost):
        store.begin_transfer(lease, "reader", 0, 1)
    store.end_transfer(lease, 0.0)
    assert put_each(store, namespace, chain("newer", 6)).count(NO_ROOM) == 0


def test_a_clear_of_one_namespace_leaves_the_others_alone() -> None:
    store, namespace = small_store(8)
    other = store.open_namespace(b"o" * 32, ALIGNMENT)
    keys = chain("prefix", 2)
    put(store, namespace, keys)
    put(store, other, keys)
    lease = held(store, other, keys)
    assert store.clear(namespace) == 2
    assert (hits(store, namespace, keys), hits(store, other, keys)) == (0, 2)
    assert store.begin_transfer(lease, "reader", 0, 2)


# -- fairness ------------------------------------------------------------------------------------------------

SMALL, LARGE = ALIGNMENT, 3 * ALIGNMENT


def two_models(extents: int, policy: str = "lru") -> tuple[BlockStore, int, int]:
    store = BlockStore(extents * EXTENT, POLICIES[policy], EXTENT)
    return store, store.open_namespace(b"s" * 32, SMALL), store.open_namespace(b"l" * 32, LARGE)


def bytes_of(store: BlockStore, namespace: int) -> int:
    home = store.blocks.namespaces[namespace]
    state = store.blocks.table.state
    return sum(state[slot] == State.RESIDENT for slot in home.slots.values()) * home.block_bytes


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("newcomer_is_large", [True, False])
def test_a_newcomer_gets_its_fair_share_of_a_pool_that_another_model_filled(
    policy: str, newcomer_is_large: bool
) -> None:
    store, small, large = two_models(24, policy)
    first, newcomer = (small, large) if newcomer_is_large else (large, small)
    put_each(store, first, chain("first", 200))
    assert bytes_of(store, first) == 24 * EXTENT
    fair = 24 * EXTENT // 2 - 3 * EXTENT
    for number in range(40):
        put_each(store, small, chain(f"small {number}", 6))
        put_each(store, large, chain(f"large {number}", 2))
        if number * 6 * SMALL > 24 * EXTENT // 2:
            assert bytes_of(store, newcomer) >= fair
        assert bytes_of(store, first) >= fair


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_small_tenant_that_is_in_use_survives_a_stream_from_another(policy: str) -> None:
    store, small, large = two_models(24, policy)
    # Only its last block is touched by a reader, and that one lies in another extent than the first ones.
    hot = chain("hot", 40)
    put(store, small, hot)
    for number in range(1000):
        put(store, large, [typed_digest("stream", number)])
        if number % 10 == 0:
            store.release(held(store, small, hot), "reader")
        assert hits(store, small, hot) == 40
    assert bytes_of(store, large) >= 12 * EXTENT


def test_a_tenant_that_is_not_used_any_more_gives_its_room_to_one_that_is() -> None:
    store, small, large = two_models(24)
    put_each(store, small, chain("cold", 24))
    for number in range(2000):
        put(store, large, [typed_digest("stream", number)])
    assert bytes_of(store, small) == 0
    assert bytes_of(store, large) == 24 * EXTENT


def test_a_newcomer_takes_from_the_one_that_has_most_not_from_one_within_its_share() -> None:
    store, small, large = two_models(22)
    newcomer = store.open_namespace(b"n" * 32, 2 * ALIGNMENT)
    idle = chain("idle", 16)
    put(store, small, idle)
    put_each(store, large, chain("fill", 26))
    assert store.blocks.slots.free_extents() == 0
    assert put(store, newcomer, chain("new", 1))[0] >= 0
    assert hits(store, small, idle) == 16


def test_a_stream_that_has_its_share_takes_nothing_from_one_that_is_in_use_and_has_more() -> None:
    store, small, large = two_models(24)
    third = store.open_namespace(b"t" * 32, 2 * ALIGNMENT)
    hot, rare = chain("hot", 40), chain("rare", 8)
    put(store, small, hot)
    put(store, third, rare)
    for number in range(200):
        put(store, large, [typed_digest("stream", number)])
        for namespace, keys in ((small, hot), (third, rare)):
            store.release(held(store, namespace, keys), "reader")
        assert (hits(store, small, hot), hits(store, third, rare)) == (40, 8)


def test_a_head_that_all_prefixes_share_is_not_given_up_for_the_room_of_one_span() -> None:
    store = BlockStore(20_000 * ALIGNMENT, Lru, 40 * ALIGNMENT)
    small, large = store.open_namespace(b"s" * 32, SMALL), store.open_namespace(b"l" * 32, LARGE)
    root = chain("root", 1)
    reservations = [store.reserve(small, None, root, "writer")]
    reservations += [store.reserve(small, root[0], chain(f"branch {number}", 1), "writer") for number in range(19_999)]
    for reservation in reservations:
        store.commit(reservation)
    slots = [put(store, large, [typed_digest("new", number)])[0] for number in range(5)]
    assert slots[-1] >= 0
    assert store.contains(small, root[0])
    assert store.blocks.counters["evicted_blocks"] <= 200


def test_a_pinned_tenant_keeps_its_room_whoever_asks() -> None:
    store, small, large = two_models(24)
    pinned = chain("pinned", 96)
    put(store, small, pinned)
    lease = held(store, small, pinned)
    assert put(store, large, chain("new", 1)) == [NO_ROOM]
    assert hits(store, small, pinned) == 96
    store.release(lease, "reader")
    assert put(store, large, chain("new", 1))[0] >= 0


def test_room_that_one_model_left_is_free_for_another_at_once() -> None:
    store, small, large = two_models(24)
    put_each(store, small, chain("first", 96))
    store.clear(small)
    reservation = store.reserve_each(large, chain("second", 32), "writer")
    assert len(reservation.reserved) == 32
    assert store.blocks.counters["evicted_blocks"] == 0


def test_a_block_of_half_the_pool_gets_room_beside_small_ones() -> None:
    store = BlockStore(8 * EXTENT, Lru, EXTENT)
    small, huge = store.open_namespace(b"s" * 32, SMALL), store.open_namespace(b"h" * 32, 5 * EXTENT)
    put_each(store, small, chain("small", 32))
    assert put(store, huge, chain("huge", 1))[0] >= 0
    assert store.blocks.usage.resident_blocks == 1 + 12


# -- cost ----------------------------------------------------------------------------------------------------


def visited_by_the_garbage_collector(blocks: int, policy: str) -> int:
    """References that a full collection follows in a full store, after as many blocks were evicted."""
    store = BlockStore(blocks * ALIGNMENT, POLICIES[policy], blocks // 8 * ALIGNMENT)
    namespace = store.open_namespace(b"m" * 32, ALIGNMENT)
    for name in ("first", "second"):
        put_each(store, namespace, chain(name, blocks // 2))
        put(store, namespace, chain(f"{name} chain", blocks // 2))
    gc.collect()
    seen: set[int] = set()
    todo: list[object] = [store]
    visits = 0
    while todo:
        current = todo.pop()
        if id(current) not in seen and gc.is_tracked(current) and not isinstance(current, type):
            seen.add(id(current))
            below = gc.get_referents(current)
            visits += len(below)
            todo += below
    return visits


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_garbage_collection_costs_the_same_however_many_blocks_there_are(policy: str) -> None:
    few, many = (visited_by_the_garbage_collector(blocks, policy) for blocks in (400, 4000))
    assert many < few + 100
