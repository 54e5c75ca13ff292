"""Quotas: nobody takes a reserve away, nobody holds more than its maximum, whatever the others do."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkv_client.errors import ConfigError
from hpkv_client.types import Keys, typed_digest
from hpkv_client.values import NOTHING, Quota, Share
from hpkv_daemon.core.policy import POLICIES
from hpkv_daemon.core.quotas import Account
from hpkv_daemon.core.slots import ALIGNMENT
from hpkv_daemon.core.store import BlockStore

EXTENT = 8 * ALIGNMENT
TENANTS = ("a", "b", "c")


def percent(amount: int) -> Share:
    return Share(Fraction(amount), percent=True)


def opened(policy: str, extents: int, quotas: list[Quota], pages: tuple[int, ...]) -> tuple[BlockStore, list[Account]]:
    """A store with a namespace for each tenant, and the tenants' accounts."""
    store = BlockStore(extents * EXTENT, POLICIES[policy], EXTENT, quotas=quotas)
    for number, tenant in enumerate(TENANTS):
        assert store.open_namespace(tenant.encode() * 32, pages[number] * ALIGNMENT, tenant) == number
    return store, [store.blocks.accounts.of(tenant) for tenant in TENANTS]


def put(store: BlockStore, tenant: int, chain: int, length: int) -> int:
    """Store a chain; how many of its blocks found room or were there."""
    keys = [typed_digest(tenant, chain, depth) for depth in range(length)]
    reservation = store.reserve(tenant, None, keys, "owner")
    store.commit(reservation)
    return store.match(tenant, Keys.of(keys))


quota_lists = st.lists(st.tuples(st.integers(0, 33), st.none() | st.integers(34, 100)), min_size=3, max_size=3).map(
    lambda shares: [
        Quota(tenant, percent(reserved), None if maximum is None else percent(maximum))
        for tenant, (reserved, maximum) in zip(TENANTS, shares, strict=True)
    ]
)
stores = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(1, 6)), max_size=60)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(
    extents=st.integers(4, 9),
    quotas=quota_lists,
    pages=st.tuples(*(st.integers(1, 3) for _ in TENANTS)),
    steps=stores,
)
def test_reserves_stay_and_maxima_hold(
    policy: str, extents: int, quotas: list[Quota], pages: tuple[int, ...], steps: list[tuple[int, int, int]]
) -> None:
    store, accounts = opened(policy, extents, quotas, pages)
    for tenant, chain, length in steps:
        before = [account.held for account in accounts]
        put(store, tenant, chain, length)
        for number, account in enumerate(accounts):
            if number != tenant:
                assert account.held >= min(before[number], account.reserved)
            assert account.maximum is None or account.held <= account.maximum
        store.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(extents=st.integers(4, 9), reserved=st.integers(1, 100), steps=stores)
def test_a_tenant_below_its_reserve_gets_room(
    policy: str, extents: int, reserved: int, steps: list[tuple[int, int, int]]
) -> None:
    store, accounts = opened(policy, extents, [Quota("a", percent(reserved), None)], (1, 1, 1))
    for tenant, chain, length in steps:
        put(store, tenant, chain, length)
    account, number = accounts[0], 100
    while account.held + ALIGNMENT <= account.reserved:
        held = account.held
        assert put(store, 0, number, 1) == 1
        assert account.held == held + ALIGNMENT
        number += 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_flood_cannot_evict_the_reserved_share_of_another(policy: str) -> None:
    quotas = [Quota("a", percent(25), None)]
    store, _ = opened(policy, 8, quotas, (1, 1, 2))
    for chain in range(16):
        assert put(store, 0, chain, 1) == 1
    for chain in range(500):
        put(store, 1, chain, 3)
        put(store, 2, chain, 2)
    assert sum(put_is_there(store, 0, chain) for chain in range(16)) == 16
    free, _ = opened(policy, 8, [], (1, 1, 2))
    for chain in range(16):
        assert put(free, 0, chain, 1) == 1
    for chain in range(500):
        put(free, 1, chain, 3)
        put(free, 2, chain, 2)
    assert sum(put_is_there(free, 0, chain) for chain in range(16)) == 0


def put_is_there(store: BlockStore, tenant: int, chain: int) -> bool:
    return store.contains(tenant, typed_digest(tenant, chain, 0))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_tenant_at_its_maximum_replaces_its_own_blocks(policy: str) -> None:
    store, accounts = opened(policy, 8, [Quota("a", NOTHING, percent(25))], (1, 1, 1))
    for chain in range(40):
        assert put(store, 0, chain, 1) == 1
    assert accounts[0].held == 16 * ALIGNMENT
    assert [put_is_there(store, 0, chain) for chain in range(24, 40)] == [True] * 16
    for chain in range(48):
        assert put(store, 1, chain, 1) == 1
    assert accounts[0].held == 16 * ALIGNMENT


def test_models_without_a_quota_share_one_account_and_a_pattern_gives_each_its_own() -> None:
    store = BlockStore(8 * EXTENT, POLICIES["lru"], EXTENT, quotas=[Quota("llama*", NOTHING, percent(50))])
    of = store.blocks.accounts.of
    assert of("qwen") is of("mistral")
    assert of("llama-8b") is not of("llama-70b")
    assert of("llama-8b") is of("llama-8b")
    assert of("llama-8b").maximum == 4 * EXTENT


def assert_victims_are_their_own(store: BlockStore) -> None:
    """Each policy names a block of one of its own namespaces, and each namespace has the policy of its account."""
    known = {id(policy): owner for policies in store.blocks._policies for owner, policy in policies}
    for namespace in store.blocks.namespaces:
        assert known[id(namespace.policy)] is namespace.account
    for policies in store.blocks._policies:
        for _, policy in policies:
            victim = policy.victim()
            assert victim is None or store.blocks.namespace_of(victim).policy is policy


changes = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 2), st.integers(0, 12), st.integers(1, 6)),
        st.tuples(st.just("quotas"), quota_lists),
        st.tuples(st.just("lease"), st.integers(0, 2), st.integers(0, 12)),
        st.tuples(st.just("clear"), st.integers(0, 2)),
        st.tuples(st.just("release")),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(
    extents=st.integers(4, 9),
    named=st.sets(st.sampled_from(TENANTS)),
    pages=st.tuples(*(st.integers(1, 3) for _ in TENANTS)),
    steps=changes,
)
def test_quotas_change_under_a_full_pool(
    policy: str, extents: int, named: set[str], pages: tuple[int, ...], steps: list[tuple[str, ...]]
) -> None:
    """Whoever gets or loses a quota takes its blocks along, and what is too much leaves as soon as nobody reads it."""
    store, _ = opened(policy, extents, [], pages)
    for step, *what in steps:
        if step == "put":
            put(store, *what)
        elif step == "clear":
            store.clear(what[0])
        elif step == "lease":
            tenant, chain = what
            store.acquire(tenant, Keys.of([typed_digest(tenant, chain, depth) for depth in range(6)]), "reader", 1.0)
        elif step == "release":
            store.drop("reader")
        else:
            store.blocks.set_quotas([quota for quota in what[0] if quota.pattern in named])
            assert {account.name for account in store.blocks.accounts} == named | {""}
        store.check()
        assert_victims_are_their_own(store)
    store.drop("reader")
    store.blocks.settle_quotas()
    for account in store.blocks.accounts:
        assert not account.waning
        assert not account.exceeds(0)


def test_quotas_that_reserve_too_much_change_nothing() -> None:
    store, accounts = opened("lru", 8, [Quota("a", percent(50), None)], (1, 1, 1))
    with pytest.raises(ConfigError, match="reserved of a pool"):
        store.blocks.set_quotas([Quota("a", percent(60), None), Quota("b", percent(60), None)])
    assert accounts[0].reserved == 4 * EXTENT
    assert store.blocks.accounts.of("b") is store.blocks.accounts.of("c")
