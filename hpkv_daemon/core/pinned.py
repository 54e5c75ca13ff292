"""Prefixes that an operator pinned: they are never evicted, and take a bounded share of the pool. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hpkv_client.errors import Busy, UsageError
from hpkv_client.types import BlockKey
from hpkv_client.values import format_size
from hpkv_daemon.core.blocks import Blocks
from hpkv_daemon.core.index import NONE

MOST_SHARE = 4
"""At most one part in this many of the pool may be pinned: the rest has to do for everybody else."""


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """The prefix that ends with a block."""

    namespace: int
    key: BlockKey
    slot: int
    blocks: int


class PinnedPrefixes:
    """The pins of one pool. Only the last block of a prefix is pinned: what is above a block never leaves before it."""

    def __init__(self, blocks: Blocks, pool_bytes: int) -> None:
        self._blocks = blocks
        self._prefixes: dict[tuple[int, BlockKey], PinnedPrefix] = {}
        self._covered: Counter[int] = Counter()
        """Slot -> how many pinned prefixes it is part of."""
        self.limit_bytes = pool_bytes // MOST_SHARE
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    def __iter__(self) -> Iterator[PinnedPrefix]:
        return iter(list(self._prefixes.values()))

    def pin(self, namespace: int, key: BlockKey) -> PinnedPrefix:
        """Keep the prefix that ends with this block until ``unpin``; a second pin changes nothing.

        Raises ``UsageError`` if it is not resident, ``Busy`` if that would be more than may be pinned.
        """
        known = self._prefixes.get((namespace, key))
        if known is not None:
            return known
        slot = self._blocks.resident(namespace, key)
        if slot == NONE:
            raise UsageError("the prefix is not in memory", "ask an engine for it first, or 'hpkvd warm' it")
        chain = self._blocks.table.chain(slot, self._blocks.table.depth[slot] + 1)
        fresh = sum(not self._covered[above] for above in chain) * self._blocks.namespaces[namespace].block_bytes
        if self.held_bytes + fresh > self.limit_bytes:
            raise Busy(
                f"{format_size(fresh)} more than the {format_size(self.held_bytes)} that are pinned exceed "
                f"{format_size(self.limit_bytes)}, a quarter of the pool",
                "'hpkvd unpin' others, or enlarge the pool",
            )
        self.held_bytes += fresh
        self._covered.update(chain)
        self._blocks.pin(slot)
        found = self._prefixes[namespace, key] = PinnedPrefix(namespace, key, slot, len(chain))
        return found

    def unpin(self, prefix: PinnedPrefix) -> None:
        """It may be evicted again."""
        del self._prefixes[prefix.namespace, prefix.key]
        size = self._blocks.namespaces[prefix.namespace].block_bytes
        for above in self._blocks.table.chain(prefix.slot, prefix.blocks):
            self._covered[above] -= 1
            if not self._covered[above]:
                del self._covered[above]
                self.held_bytes -= size
        self._blocks.unpin(prefix.slot)

    def drop(self, namespaces: Collection[int]) -> None:
        """Forget the pins of namespaces that are about to be cleared."""
        for prefix in self:
            if prefix.namespace in namespaces:
                self.unpin(prefix)

    def check(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant."""
        covered: dict[int, int] = {}
        for prefix in self:
            assert self._blocks.resident(prefix.namespace, prefix.key) == prefix.slot, "a pinned prefix is gone"
            for above in self._blocks.table.chain(prefix.slot, prefix.blocks):
                covered[above] = self._blocks.namespaces[prefix.namespace].block_bytes
        held = sum(covered.values())
        assert held == self.held_bytes, f"{held} bytes are pinned, {self.held_bytes} are counted"
        assert held <= self.limit_bytes, f"{held} bytes are pinned, {self.limit_bytes} may be"
