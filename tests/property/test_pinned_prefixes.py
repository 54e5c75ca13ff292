"""Pinned prefixes: they stay whatever else is stored, take no more than their share, and leave no trace when let go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkv_client.errors import Busy, UsageError
from hpkv_client.types import Keys, typed_digest
from hpkv_daemon.core.policy import POLICIES
from hpkv_daemon.core.slots import ALIGNMENT
from hpkv_daemon.core.store import BlockStore

EXTENT = 8 * ALIGNMENT
SHARED = 3
"""Chains of one namespace have their first blocks in common: pinned prefixes overlap."""


def keys_of(namespace: int, chain: int, length: int) -> list[bytes]:
    return [typed_digest(namespace, min(depth, SHARED) if depth < SHARED else chain, depth) for depth in range(length)]


def put(store: BlockStore, namespace: int, chain: int, length: int) -> None:
    store.commit(store.reserve(namespace, None, keys_of(namespace, chain, length), "owner"))


places = st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(1, 7))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), places),
        st.tuples(st.just("pin"), places),
        st.tuples(st.just("unpin"), st.integers(0, 5)),
        st.tuples(st.just("clear"), st.none() | st.integers(0, 1)),
        st.tuples(st.just("flood"), st.integers(0, 1)),
        st.tuples(st.just("lease"), places),
        st.tuples(st.just("drop")),
    ),
    max_size=40,
)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(steps=steps)
def test_pinned_prefixes_stay_and_count_what_they_cover(policy: str, steps: list[tuple]) -> None:
    store = BlockStore(12 * EXTENT, POLICIES[policy], EXTENT)
    for number in range(2):
        assert store.open_namespace(bytes([number]) * 32, (number + 1) * ALIGNMENT) == number
    floods = 0
    for step, *what in steps:
        if step == "put":
            put(store, *what[0])
        elif step == "pin":
            namespace, chain, length = what[0]
            key = keys_of(namespace, chain, length)[-1]
            was = store.contains(namespace, key)
            try:
                assert store.pinned.pin(namespace, key).blocks == length
                assert was
            except UsageError:
                assert not was
            except Busy:
                assert was
        elif step == "unpin":
            for prefix in list(store.pinned)[: what[0]]:
                store.pinned.unpin(prefix)
        elif step == "clear":
            store.clear(what[0])
        elif step == "flood":
            for number in range(120):
                floods += 1
                put(store, what[0], 1000 + floods, SHARED + 2)
                assert number >= 0
        elif step == "lease":
            store.acquire(what[0][0], Keys.of(keys_of(*what[0])), "reader", 1.0)
        else:
            store.drop("reader")
        store.check()
        for prefix in store.pinned:
            assert store.contains(prefix.namespace, prefix.key)
    for prefix in store.pinned:
        store.pinned.unpin(prefix)
    store.drop("reader")
    assert (len(store.pinned), store.pinned.held_bytes, store.blocks.usage.pinned_blocks) == (0, 0, 0)
    store.check()


def test_a_pin_that_would_take_too_much_changes_nothing() -> None:
    store = BlockStore(4 * EXTENT, POLICIES["lru"], EXTENT)
    store.open_namespace(bytes(32), ALIGNMENT)
    put(store, 0, 0, 9)
    with pytest.raises(Busy, match="a quarter of the pool"):
        store.pinned.pin(0, keys_of(0, 0, 9)[-1])
    assert store.pinned.pin(0, keys_of(0, 0, 8)[-1]).blocks == 8
    assert store.pinned.held_bytes == EXTENT
    store.check()
