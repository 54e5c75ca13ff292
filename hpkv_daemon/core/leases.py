"""Leases: the time-bounded right to read blocks. Pure; the clock is passed in."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True)
class Lease:
    """One reader's right. ``pinned`` slots cannot be evicted while the lease lives.

    For a prefix only its deepest block is pinned: a block with a resident child is never evicted, so that pin
    protects all ``length`` blocks above it. ``transfers`` counts copies in flight: a lease with any does not
    end, whatever its deadline says.
    """

    number: int
    owner: Hashable
    namespace: int
    pinned: tuple[int, ...]
    length: int
    deadline: float
    scattered: tuple[int, ...] | None = None
    """For blocks that form no prefix: the slot of each, ``NONE`` for those that were not resident."""
    transfers: int = 0
    released: bool = False


class LeaseTable:
    """All live leases, by number and by owner.

    ``first`` is the first lease number; a daemon draws it at random so that a number from an earlier epoch
    never names a lease of this one.
    """

    def __init__(self, first: int = 1) -> None:
        self._leases: dict[int, Lease] = {}
        self._of_owner: dict[Hashable, set[int]] = {}
        self._numbers = count(first)

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def grant(
        self,
        owner: Hashable,
        namespace: int,
        pinned: tuple[int, ...],
        length: int,
        deadline: float,
        scattered: tuple[int, ...] | None = None,
    ) -> Lease:
        """A new lease. Its pins are the caller's business."""
        lease = Lease(next(self._numbers), owner, namespace, pinned, length, deadline, scattered)
        self._leases[lease.number] = lease
        self._of_owner.setdefault(owner, set()).add(lease.number)
        return lease

    def get(self, number: int, owner: Hashable) -> Lease | None:
        """The live lease of this owner, or None."""
        lease = self._leases.get(number)
        return lease if lease and lease.owner == owner and not lease.released else None

    def find(self, number: int) -> Lease | None:
        """The lease, released or not, as long as it is pinned."""
        return self._leases.get(number)

    def end(self, lease: Lease) -> bool:
        """Mark the lease released; True if it is gone now, False while copies still run under it."""
        lease.released = True
        if lease.transfers:
            return False
        del self._leases[lease.number]
        numbers = self._of_owner[lease.owner]
        numbers.discard(lease.number)
        if not numbers:
            del self._of_owner[lease.owner]
        return True

    def expired(self, now: float) -> list[Lease]:
        """Leases past their deadline without a copy in flight."""
        return [lease for lease in self._leases.values() if not lease.transfers and lease.deadline <= now]

    def of_owner(self, owner: Hashable) -> list[Lease]:
        """All leases of one owner."""
        return [self._leases[number] for number in self._of_owner.get(owner, ())]
