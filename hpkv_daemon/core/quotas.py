"""Shares of the pool that belong to one tenant, or that it must not exceed. Pure.

A tenant is a model by the name it is served under. Tenants without a quota share what is left and compete for it by
the eviction policy alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hpkv_client.values import Quota


@dataclass(slots=True)
class Account:
    """What one tenant holds and may hold, in payload bytes. ``held`` counts blocks in every state."""

    name: str
    reserved: int = 0
    """Others never evict below this."""
    maximum: int | None = None
    held: int = 0
    waning: bool = False
    """Its maximum was lowered below what it holds, and not all of that could leave yet."""

    def spares(self, size: int) -> bool:
        """Whether others may take ``size`` bytes away."""
        return self.held - size >= self.reserved

    def needs(self, size: int) -> bool:
        """Whether ``size`` bytes more are still its own."""
        return self.held + size <= self.reserved

    def exceeds(self, size: int) -> bool:
        """Whether ``size`` bytes more are too many."""
        return self.maximum is not None and self.held + size > self.maximum


def reserved_bytes(quotas: Sequence[Quota], pool_bytes: int) -> int:
    """What the quotas reserve of a pool in all."""
    return sum(quota.reserved.of(pool_bytes) for quota in quotas)


class Accounts:
    """The accounts of one pool, made when their tenants first come."""

    def __init__(self, quotas: Sequence[Quota], pool_bytes: int) -> None:
        self._quotas = quotas
        self._pool_bytes = pool_bytes
        self._shared = Account("")
        self._by_name: dict[str, Account] = {}

    def of(self, tenant: str) -> Account:
        """The tenant's account: its own if a quota names it, else the one that all others share."""
        known = self._by_name.get(tenant)
        if known is not None:
            return known
        for quota in self._quotas:
            if fnmatchcase(tenant, quota.pattern):
                maximum = None if quota.maximum is None else quota.maximum.of(self._pool_bytes)
                account = Account(tenant, quota.reserved.of(self._pool_bytes), maximum)
                self._by_name[tenant] = account
                return account
        return self._shared

    def change(self, quotas: Sequence[Quota]) -> None:
        """Other quotas from now on: accounts that stay get new limits, and ``of`` answers anew for the others.

        The caller moves what tenants hold to the accounts they have now.
        """
        self._quotas = quotas
        known, self._by_name = self._by_name, {}
        for tenant, account in known.items():
            fresh = self.of(tenant)
            if fresh is not self._shared:
                account.reserved, account.maximum = fresh.reserved, fresh.maximum
                self._by_name[tenant] = account

    def __iter__(self) -> Iterator[Account]:
        return iter([*self._by_name.values(), self._shared])
