"""The prefix tree of blocks: who is resident, who is whose parent. Pure.

State lives in arrays indexed by slot number and in one dict of bytes to int per namespace. Neither holds
objects that the garbage collector walks, so a million blocks cost no collection pause.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import IntEnum

from hpkv_client.types import KEY_BYTES, BlockKey, Keys
from hpkv_daemon.core.counts import BlockCounts
from hpkv_daemon.core.ledger import NONE
from hpkv_daemon.core.policy import Policy
from hpkv_daemon.core.quotas import Account

__all__ = ["NONE", "BlockTable", "Namespace", "State", "longest_prefix"]


class State(IntEnum):
    """Life of a slot. Only RESIDENT blocks are ever matched or read."""

    FREE = 0
    RESERVED = 1
    """A writer fills it."""
    COMPLETE = 2
    """All its bytes are in, its parent is not resident yet."""
    RESIDENT = 3
    VOID = 4
    """Hidden while its writer is still at it; becomes CONDEMNED when the writer is done."""
    CONDEMNED = 5
    """Hidden; freed as soon as it has no reader and no child."""


class Namespace:
    """The blocks of one model and KV format."""

    __slots__ = (
        "account",
        "block_bytes",
        "block_tokens",
        "counts",
        "fingerprint",
        "group",
        "policy",
        "size_class",
        "slots",
        "tenant",
        "used",
    )

    def __init__(
        self,
        fingerprint: bytes,
        block_bytes: int,
        size_class: int,
        tenant: str,
        account: Account,
        policy: Policy,
        counts: BlockCounts,
    ) -> None:
        self.tenant = tenant
        self.account = account
        self.policy = policy
        """Orders its blocks, and those of the same size of the same account."""
        self.fingerprint = fingerprint
        self.block_bytes = block_bytes
        self.block_tokens = 0
        """For people, and for events; 0 until an engine says it, like the number of its KV-cache group."""
        self.group = 0
        self.size_class = size_class
        self.slots: dict[BlockKey, int] = {}
        """Key -> slot, for RESERVED, COMPLETE and RESIDENT blocks."""
        self.used = False
        """Whether anything was ever stored in it."""
        self.counts = counts
        """What became of its blocks; shared with others, if they are not counted apart."""


class BlockTable:
    """Per-slot columns and the tree links between slots."""

    def __init__(self) -> None:
        self.state = bytearray()
        self.pins = array("i")
        self.children = array("i")
        self.namespace = array("i")
        self.depth = array("i")
        """How many blocks lie above this one."""
        self.parent = array("i")
        self._first_child = array("i")
        self._next_sibling = array("i")
        self._previous_sibling = array("i")
        self._keys = bytearray()

    def ensure(self, capacity: int) -> None:
        """Make room for slot numbers below ``capacity``."""
        present = len(self.state)
        if capacity <= present:
            return
        missing = max(capacity - present, present // 2)
        self.state.extend(bytes(missing))
        self._keys.extend(bytes(missing * KEY_BYTES))
        for column in (self.pins, self.children, self.namespace, self.depth):
            column.frombytes(bytes(missing * column.itemsize))
        for links in (self.parent, self._first_child, self._next_sibling, self._previous_sibling):
            links.extend(array("i", [NONE]) * missing)

    def key_of(self, slot: int) -> BlockKey:
        """The key of the block in the slot."""
        return bytes(self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES])

    def attach(self, slot: int, namespace: int, key: BlockKey, parent: int, state: State) -> None:
        """Fill a free slot's columns and hang it under its parent (``NONE``: a root)."""
        self.state[slot] = state
        self.pins[slot] = self.children[slot] = 0
        self.namespace[slot] = namespace
        self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = key
        self.parent[slot] = parent
        self.depth[slot] = 0
        self._first_child[slot] = self._previous_sibling[slot] = self._next_sibling[slot] = NONE
        if parent != NONE:
            head = self._first_child[parent]
            self._next_sibling[slot] = head
            if head != NONE:
                self._previous_sibling[head] = slot
            self._first_child[parent] = slot
            self.children[parent] += 1
            self.depth[slot] = self.depth[parent] + 1

    def detach(self, slot: int) -> None:
        """Take a childless slot out of the tree; its columns stay readable until it is attached again."""
        parent, before, after = self.parent[slot], self._previous_sibling[slot], self._next_sibling[slot]
        if before != NONE:
            self._next_sibling[before] = after
        elif parent != NONE:
            self._first_child[parent] = after
        if after != NONE:
            self._previous_sibling[after] = before
        if parent != NONE:
            self.children[parent] -= 1
        self.parent[slot] = self._previous_sibling[slot] = self._next_sibling[slot] = NONE

    def children_of(self, slot: int) -> Iterator[int]:
        """The slots right below ``slot``. Safe against detaching the yielded one."""
        child = self._first_child[slot]
        while child != NONE:
            following = self._next_sibling[child]
            yield child
            child = following

    def subtree(self, slot: int) -> list[int]:
        """``slot`` and all slots below it, parents before children."""
        found = [slot]
        for above in found:
            found.extend(self.children_of(above))
        return found

    def chain(self, slot: int, length: int) -> list[int]:
        """The ``length`` slots that end in ``slot``, root first."""
        slots = []
        for _ in range(length):
            slots.append(slot)
            slot = self.parent[slot]
        slots.reverse()
        return slots


def longest_prefix(table: BlockTable, namespace: Namespace, keys: Keys) -> int:
    """How many leading keys are resident.

    A binary search: a resident block's parent is always resident, so residency along a prefix is monotone.
    """
    slots, state = namespace.slots, table.state

    def resident(i: int) -> bool:
        slot = slots.get(keys[i], NONE)
        return slot != NONE and state[slot] == State.RESIDENT

    low, high = 0, len(keys)
    if not high or not resident(0):
        return 0
    if resident(high - 1):
        return high
    low = 1
    while low < high:
        middle = (low + high) // 2
        if resident(middle):
            low = middle + 1
        else:
            high = middle
    return low
