"""The block store: the only writer of index, slots, leases and policy. Pure; the clock is passed in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from hpkv_client.errors import Busy, LeaseLost, UsageError
from hpkv_client.types import BlockKey, Keys
from hpkv_client.values import Quota
from hpkv_daemon.core.blocks import Blocks
from hpkv_daemon.core.departures import Reason
from hpkv_daemon.core.index import NONE, State, longest_prefix
from hpkv_daemon.core.leases import Lease, LeaseTable
from hpkv_daemon.core.ledger import Ledger, Recorded, RecordedNamespace
from hpkv_daemon.core.pinned import PinnedPrefixes
from hpkv_daemon.core.policy import Policy

KEPT = -1
"""Reservation entry: no copy is needed, the block is resident or another writer is at it."""
NO_ROOM = -2
"""Reservation entry: every slot it could take is leased or reserved."""
ORPHAN = -3
"""Reservation entry: the block's parent is not here, so no prefix could ever lead to it."""


MAX_NAMESPACES = 4096
"""None is ever dropped, so a client that invents them must come to an end."""

_DROPPED = {NO_ROOM: Reason.NO_ROOM, ORPHAN: Reason.NO_PARENT}


@dataclass(slots=True)
class Reservation:
    """Blocks one job fills: ``slots[i]`` is a slot, ``KEPT``, ``NO_ROOM`` or ``ORPHAN`` for the i-th key."""

    number: int
    owner: Hashable
    slots: list[int]
    committed: bool = False

    @property
    def reserved(self) -> list[int]:
        """Only the slots that are really being filled, parents first."""
        return [slot for slot in self.slots if slot >= 0]


class BlockStore:
    """Residency, reservations and leases of one pool. Not thread-safe: the control loop is its only user.

    A reservation's slots belong to its writer until ``commit`` or ``abort``; both may be called only when no
    copy into the slots runs any more.
    """

    def __init__(
        self,
        pool_bytes: int,
        policy: Callable[[], Policy],
        extent_bytes: int | None = None,
        first_lease: int = 1,
        quotas: Sequence[Quota] = (),
        ledger: Ledger | None = None,
    ) -> None:
        self.blocks = Blocks(pool_bytes, policy, extent_bytes, quotas, ledger)
        self.leases = LeaseTable(first_lease)
        self.pinned = PinnedPrefixes(self.blocks, pool_bytes)
        self._by_fingerprint: dict[bytes, int] = {}
        self._reservations: dict[int, Reservation] = {}
        self._numbers = count(1)
        self._restoring = False
        self.on_resident: list[Callable[[int], None]] = []
        """Each is called with the slot of each block that becomes resident."""

    # -- namespaces ---------------------------------------------------------------------------------------

    def open_namespace(self, fingerprint: bytes, block_bytes: int, tenant: str = "") -> int:
        """Number of the namespace, opened at first sight. ``tenant``: whose quota it counts against.

        Raises ``UsageError`` when not one block fits into the pool or when the fingerprint is known with
        another block size, ``Busy`` when there are too many.
        """
        if block_bytes < 1:
            raise UsageError(f"a block of {block_bytes} bytes holds nothing")
        number = self._by_fingerprint.get(fingerprint)
        if number is None:
            if len(self._by_fingerprint) >= MAX_NAMESPACES:
                raise Busy(f"{MAX_NAMESPACES} namespaces are known already", "restart hpkvd to forget old ones")
            number = self.blocks.open_namespace(fingerprint, block_bytes, tenant)
            if number is None:
                slots = self.blocks.slots
                raise UsageError(
                    f"a block of {block_bytes} bytes does not fit into a pool of "
                    f"{slots.extents * slots.extent_bytes} bytes",
                    "start hpkvd with a larger --pool-size",
                )
            self._by_fingerprint[fingerprint] = number
        if not self._restoring:
            self.blocks.count_apart(self.blocks.namespaces[number])
        known = self.blocks.namespaces[number].block_bytes
        if known != block_bytes:
            raise UsageError(f"this namespace has blocks of {known} bytes, not {block_bytes}")
        return number

    def find_namespace(self, fingerprint: bytes) -> int | None:
        """Number of a namespace that was opened before."""
        return self._by_fingerprint.get(fingerprint)

    # -- an earlier life ----------------------------------------------------------------------------------

    def restore(self, recorded: Recorded) -> int:
        """Make the blocks that an earlier store left in this pool resident again; how many.

        Only before anything else was asked of this store. What makes no sense is left out.
        """
        # Of what an earlier daemon knew, only what still has blocks is counted apart.
        self._restoring = True
        numbers = [self._reopen(known) for known in recorded.namespaces]
        self._restoring = False
        return self.blocks.restore(recorded, numbers)

    def _reopen(self, known: RecordedNamespace) -> int:
        try:
            return self.open_namespace(known.fingerprint, known.block_bytes, known.tenant)
        except (UsageError, Busy):
            return NONE

    # -- reading ------------------------------------------------------------------------------------------

    def match(self, namespace: int, keys: Keys) -> int:
        """How many leading keys are resident."""
        return longest_prefix(self.blocks.table, self.blocks.namespaces[namespace], keys)

    def contains(self, namespace: int, key: BlockKey) -> bool:
        """Whether this one block is resident."""
        return self.blocks.resident(namespace, key) != NONE

    def acquire(self, namespace: int, keys: Keys, owner: Hashable, deadline: float) -> Lease | None:
        """A lease on the longest resident prefix of ``keys``, or None when nothing is resident."""
        length = self.match(namespace, keys)
        if not length:
            return None
        top = self.blocks.find(namespace, keys[0])
        deepest = self.blocks.find(namespace, keys[length - 1])
        depth = self.blocks.table.depth
        if depth[deepest] - depth[top] != length - 1:
            # These blocks were not stored as one chain: only the first is known to be what it is asked as.
            length, deepest = 1, top
        return self._grant(owner, namespace, (deepest,), length, deadline)

    def acquire_each(
        self, namespace: int, keys: Sequence[BlockKey], owner: Hashable, deadline: float
    ) -> tuple[Lease | None, list[int]]:
        """A lease on whichever of these unrelated blocks are resident, and their slots (``NONE``: a miss)."""
        slots = [self.blocks.resident(namespace, key) for key in keys]
        # Each once: a key that is named many times must not cost as many pins.
        pinned = tuple(dict.fromkeys(slot for slot in slots if slot != NONE))
        if not pinned:
            return None, slots
        return self._grant(owner, namespace, pinned, len(slots), deadline, tuple(slots)), slots

    def _grant(
        self,
        owner: Hashable,
        namespace: int,
        pinned: tuple[int, ...],
        length: int,
        deadline: float,
        scattered: tuple[int, ...] | None = None,
    ) -> Lease:
        for slot in pinned:
            self.blocks.pin(slot)
            self.blocks.touch(slot)
        return self.leases.grant(owner, namespace, pinned, length, deadline, scattered)

    def begin_transfer(self, number: int, owner: Hashable, first: int, length: int) -> list[int]:
        """Slots of blocks ``first`` .. ``first + length`` of a lease, held until ``end_transfer``.

        Raises ``LeaseLost`` or, for blocks the lease does not cover, ``UsageError``.
        """
        lease = self.leases.get(number, owner)
        if lease is None:
            raise LeaseLost(f"lease {number} is unknown or expired", "match again")
        if first < 0 or length < 0 or first + length > lease.length:
            raise UsageError(f"lease {number} covers {lease.length} blocks, not {first}..{first + length}")
        if lease.scattered is None:
            slots = self.blocks.table.chain(lease.pinned[0], lease.length)[first : first + length]
        else:
            slots = list(lease.scattered[first : first + length])
            if NONE in slots:
                raise UsageError(f"lease {number} covers only the blocks that were found")
        lease.transfers += 1
        return slots

    def hold(self, lease: Lease) -> None:
        """Keep all blocks of a lease for one copy; paired with ``end_transfer``."""
        lease.transfers += 1

    def offset(self, slot: int) -> int:
        """Byte offset of the slot in the pool."""
        return self.blocks.slots.offset(slot)

    def end_transfer(self, number: int, deadline: float) -> None:
        """A copy under the lease is over; the lease lives on until at least ``deadline``."""
        lease = self.leases.find(number)
        if lease is None or not lease.transfers:
            return
        lease.transfers -= 1
        lease.deadline = max(lease.deadline, deadline)
        if lease.released:
            self._end(lease)

    def release(self, number: int, owner: Hashable) -> bool:
        """Give a lease back; a second release or a foreign one changes nothing and answers False."""
        lease = self.leases.get(number, owner)
        if lease is None:
            return False
        self._end(lease)
        return True

    def expire(self, now: float) -> int:
        """End the leases whose time is over; how many."""
        expired = self.leases.expired(now)
        for lease in expired:
            self._end(lease)
        self.blocks.counters["expired_leases"] += len(expired)
        return len(expired)

    def _end(self, lease: Lease) -> None:
        if self.leases.end(lease):
            for slot in lease.pinned:
                self.blocks.unpin(slot)

    # -- writing ------------------------------------------------------------------------------------------

    def reserve(
        self, namespace: int, parent: BlockKey | None, keys: Collection[BlockKey], owner: Hashable
    ) -> Reservation:
        """Decide, in order, what happens to each block of a chain under ``parent`` (None: no block)."""
        entries: list[int] = []
        above, missing = NONE, KEPT
        if parent is not None:
            above = self.blocks.find(namespace, parent)
            missing = KEPT if above != NONE else ORPHAN
        for key in keys:
            if missing != KEPT:
                entries.append(missing)
                continue
            slot = self.blocks.find(namespace, key)
            if slot != NONE:
                if self.blocks.table.parent[slot] != above:
                    missing = ORPHAN
                    entries.append(missing)
                    continue
                entries.append(KEPT)
            else:
                slot = self.blocks.reserve(namespace, key, above)
                if slot == NONE:
                    missing = NO_ROOM
                entries.append(slot if slot != NONE else NO_ROOM)
            above = slot
        return self._open(namespace, keys, entries, owner)

    def reserve_each(self, namespace: int, keys: Collection[BlockKey], owner: Hashable) -> Reservation:
        """Like ``reserve`` for unrelated blocks: each is a root of its own."""
        entries: list[int] = []
        full = False
        for key in keys:
            if self.blocks.find(namespace, key) != NONE:
                entries.append(KEPT)
                continue
            slot = NONE if full else self.blocks.reserve(namespace, key, NONE)
            full = slot == NONE
            entries.append(NO_ROOM if full else slot)
        return self._open(namespace, keys, entries, owner)

    def _open(self, namespace: int, keys: Collection[BlockKey], entries: list[int], owner: Hashable) -> Reservation:
        reservation = Reservation(next(self._numbers), owner, entries)
        self._reservations[reservation.number] = reservation
        counters, counts = self.blocks.counters, self.blocks.namespaces[namespace].counts
        kept, full, orphans = entries.count(KEPT), entries.count(NO_ROOM), entries.count(ORPHAN)
        counters["dropped_full_blocks"] += full
        counters["dropped_orphan_blocks"] += orphans
        counters["kept_blocks"] += kept
        counts.offered += len(entries)
        counts.kept += kept
        counts.full += full
        counts.orphan += orphans
        counts.reserved += len(entries) - kept - full - orphans
        if full or orphans:
            for key, entry in zip(keys, entries, strict=True):
                if entry in _DROPPED:
                    self.blocks.departures.note(key, _DROPPED[entry])
        return reservation

    def commit(self, reservation: Reservation, counted: str = "stored") -> int:
        """All bytes are in: make the blocks resident, each as soon as its parent is; how many are now.

        ``counted``: the counters ``COUNTED_blocks`` and ``COUNTED_bytes`` count them.
        """
        self._close(reservation)
        table, resident = self.blocks.table, 0
        for slot in reservation.reserved:
            if table.state[slot] == State.VOID:
                self.blocks.namespace_of(slot).counts.withdrawn += 1
                self.blocks.release_void(slot)
                continue
            table.state[slot] = State.COMPLETE
            parent = table.parent[slot]
            if parent == NONE or table.state[parent] == State.RESIDENT:
                resident += self._settle(slot, counted)
        return resident

    def _settle(self, slot: int, counted: str) -> int:
        """Make a COMPLETE slot and every COMPLETE slot that waited for it resident."""
        ready, settled = [slot], 0
        for complete in ready:
            if self.blocks.table.state[complete] != State.COMPLETE:
                continue
            self.blocks.make_resident(complete)
            self.blocks.counters[f"{counted}_blocks"] += 1
            home = self.blocks.namespace_of(complete)
            self.blocks.counters[f"{counted}_bytes"] += home.block_bytes
            if counted == "stored":
                home.counts.stored += 1
            else:
                home.counts.promoted += 1
            for told in self.on_resident:
                told(complete)
            settled += 1
            ready.extend(self.blocks.table.children_of(complete))
        return settled

    def abort(self, reservation: Reservation) -> None:
        """The blocks will not come: free them, and void what other writers hung under them."""
        self._close(reservation)
        table = self.blocks.table
        for slot in reservation.reserved:
            if table.state[slot] == State.RESERVED:
                for below in reversed(table.subtree(slot)):
                    self.blocks.departures.note(table.key_of(below), Reason.FAILED)
                    self.blocks.condemn(below)
        for slot in reversed(reservation.reserved):
            self.blocks.namespace_of(slot).counts.aborted += 1
            self.blocks.release_void(slot)
        self.blocks.counters["aborted_blocks"] += len(reservation.reserved)

    def is_open(self, reservation: Reservation) -> bool:
        """Whether its writer is still at it."""
        return self._reservations.get(reservation.number) is reservation

    def _close(self, reservation: Reservation) -> None:
        if self._reservations.pop(reservation.number, None) is None:
            raise UsageError(f"reservation {reservation.number} is already committed or aborted")

    def outcome(self, namespace: int, keys: Iterable[BlockKey]) -> tuple[int, int]:
        """How many of these blocks are resident, and how many are complete but wait for their parent."""
        slots = [self.blocks.find(namespace, key) for key in keys]
        states = [self.blocks.table.state[slot] for slot in slots if slot != NONE]
        return states.count(State.RESIDENT), states.count(State.COMPLETE)

    # -- forgetting ---------------------------------------------------------------------------------------

    def clear(self, namespace: int | None = None) -> int:
        """Forget every block of the namespace (None: of all) at once; how many were resident.

        Leases and operators' pins end; blocks being copied become invisible now and are freed when the copy ends; a
        reservation that was open never becomes visible.
        """
        numbers = range(len(self.blocks.namespaces)) if namespace is None else (namespace,)
        before = self.blocks.usage.resident_blocks
        self.pinned.drop(numbers)
        for lease in self.leases:
            if lease.namespace in numbers and not lease.released:
                self._end(lease)
        for number in numbers:
            table = self.blocks.table
            slots = self.blocks.namespaces[number].slots
            for root in [slot for slot in slots.values() if table.parent[slot] == NONE]:
                # Parents first: a parent that loses its child would otherwise become evictable for a moment.
                for slot in table.subtree(root):
                    self.blocks.condemn(slot)
        cleared = before - self.blocks.usage.resident_blocks
        self.blocks.counters["cleared_blocks"] += cleared
        return cleared

    def drop(self, owner: Hashable) -> int:
        """The owner is gone: end its leases; how many. Its reservations end when the movers confirm."""
        leases = [lease for lease in self.leases.of_owner(owner) if not lease.released]
        for lease in leases:
            self._end(lease)
        return len(leases)

    def check(self, other_pins: int = 0) -> None:
        """Raise ``AssertionError`` naming the first broken invariant. ``other_pins``: those that no lease holds."""
        self.blocks.check()
        self.pinned.check()
        writing = {slot for reservation in self._reservations.values() for slot in reservation.reserved}
        for slot in writing:
            state = self.blocks.table.state[slot]
            assert state in (State.RESERVED, State.VOID), f"slot {slot} is written in state {state}"
        pins = sum(len(lease.pinned) for lease in self.leases)
        other_pins += len(self.pinned)
        table = self.blocks.table
        kept = sum(table.pins[slot] for slot in range(len(table.state)) if table.state[slot] != State.FREE)
        assert pins + other_pins == kept, f"leases pin {pins} times, others {other_pins} times, slots say {kept}"
