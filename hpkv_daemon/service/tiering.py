"""Between pool and tier: what becomes resident is written behind, what is asked for is brought back."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence

from hpkv_client.types import BlockKey
from hpkv_client.wire import Body
from hpkv_daemon.core.departures import Reason
from hpkv_daemon.core.index import NONE, State
from hpkv_daemon.core.store import BlockStore, Reservation
from hpkv_daemon.service.sessions import Reactor
from hpkv_daemon.tiers import base
from hpkv_daemon.tiers.base import BlockJob, Changed, Done, Outcome, Recovered, Tier

log = logging.getLogger(__name__)

OWNER = "(tier)"
BATCH_BYTES = 16 << 20
"""Payloads of one batch in either direction: small enough that others get their turn in between."""
WRITTEN_SHARE = 8
"""At most about one part in this many of the pool is being written at any time: it cannot be evicted meanwhile."""
MOST_QUEUED = 1 << 16
"""Blocks that wait to be written; with more, those that wait longest are passed over, for the sweep to find."""
SWEEP_SLOTS = 4096
"""Slots that one tick looks at for blocks that are not on the tier."""
MOST_PROMISED = 4096
"""Blocks that one look-up has brought back at most."""


class Tiering:
    """Writes behind and reads ahead. Control loop only.

    A block that is written is pinned until that is over. A block that is brought back is reserved like one that an
    engine stores, and becomes resident when its bytes are verified and its parent is there.
    """

    def __init__(self, store: BlockStore, tier: Tier, reactor: Reactor) -> None:
        self._store = store
        self._blocks = store.blocks
        self._tier = tier
        self._queue: deque[tuple[int, BlockKey]] = deque()
        """Slots with what is in them, to be written."""
        self._writing: dict[int, tuple[list[int], int]] = {}
        """Ticket -> pinned slots, and the bytes in them."""
        self._written_bytes = 0
        slots = store.blocks.slots
        self._most_written = slots.extents * slots.extent_bytes // WRITTEN_SHARE
        self._reading: dict[int, list[Reservation]] = {}
        """Ticket -> one reservation for each block."""
        self._coming: set[tuple[int, BlockKey]] = set()
        """Namespace and key of each block that is being brought back."""
        self._waiting: list[tuple[set[tuple[int, BlockKey]], Callable[[], None]]] = []
        self._sweep = 0
        """The next slot of the sweep."""
        self._unswept = 0
        """Slots that the sweep still has to look at."""
        if tier.usage().budget_bytes:
            store.on_resident = self._resident
            self._sweep_all()
        reactor.add_reader(tier.fileno(), self.poll)
        tier.recover()

    # -- writing behind -----------------------------------------------------------------------------------

    def _resident(self, slot: int) -> None:
        key = self._blocks.key_of(slot)
        if self._has(self._blocks.namespace_of(slot).fingerprint, key):
            return
        if len(self._queue) == MOST_QUEUED:
            self._queue.popleft()
            self._sweep_all()
        self._queue.append((slot, key))

    def _has(self, fingerprint: bytes, key: BlockKey) -> bool:
        return bool(self._tier.match(fingerprint, (key,)))

    def _write_some(self) -> None:
        """Hand over what waits, as much as the tier takes, and no more than a part of the pool: it is pinned."""
        while self._queue and self._written_bytes < self._most_written:
            slots, jobs, size = [], [], 0
            while self._queue and size < min(BATCH_BYTES, self._most_written):
                slot, key = self._queue.popleft()
                # It may have left, and another one come, since it was queued.
                if self._blocks.table.state[slot] == State.RESIDENT and self._blocks.key_of(slot) == key:
                    slots.append(slot)
                    jobs.append(self._job(slot))
                    size += jobs[-1].length
            if not jobs:
                return
            try:
                ticket = self._tier.write(jobs)
            except ValueError as problem:
                # What an earlier daemon left there contradicts these blocks: they stay in memory only.
                log.warning("storage does not take blocks: %s", problem)
                continue
            if ticket is None:
                # Full, or degraded: the sweep offers them again.
                self._sweep_all()
                return
            for slot in slots:
                self._blocks.pin(slot)
            self._writing[ticket] = slots, size
            self._written_bytes += size

    def _job(self, slot: int) -> BlockJob:
        home, above = self._blocks.namespace_of(slot), self._blocks.table.parent[slot]
        parent = None if above == NONE else self._blocks.key_of(above)
        offset = self._blocks.slots.offset(slot)
        return BlockJob(home.fingerprint, self._blocks.key_of(slot), parent, home.block_bytes, offset)

    def _sweep_all(self) -> None:
        """Some resident block may not be on the tier: look at all of them, in time."""
        self._unswept = len(self._blocks.table.state)

    def _sweep_some(self) -> None:
        """Look for resident blocks that the tier does not have."""
        state = self._blocks.table.state
        if not self._unswept or self._queue or self._writing or self._tier.usage().state is not base.State.READY:
            return
        first = self._sweep if self._sweep < len(state) else 0
        self._sweep = min(first + SWEEP_SLOTS, len(state))
        self._unswept = max(0, self._unswept - SWEEP_SLOTS)
        for slot in range(first, self._sweep):
            if state[slot] == State.RESIDENT:
                key = self._blocks.key_of(slot)
                if not self._has(self._blocks.namespace_of(slot).fingerprint, key):
                    self._queue.append((slot, key))

    # -- reading ahead ------------------------------------------------------------------------------------

    def bring(self, namespace: int, parent: BlockKey | None, keys: Sequence[BlockKey]) -> int:
        """Bring a chain back of which ``parent`` is resident; how many leading keys are on their way now."""
        home = self._blocks.namespaces[namespace]
        wanted = keys[: min(len(keys), MOST_PROMISED)]
        here = self._tier.match(home.fingerprint, wanted)
        coming, above = 0, parent
        fresh: list[Reservation] = []
        for key in wanted[:here]:
            if (namespace, key) not in self._coming:
                if self._blocks.find(namespace, key) != NONE:
                    # An engine is storing it: what is below it will hang under that.
                    break
                reservation = self._store.reserve(namespace, above, (key,), OWNER)
                if reservation.slots[0] < 0:
                    self._store.abort(reservation)
                    break
                fresh.append(reservation)
            coming, above = coming + 1, key
        return coming if self._read(namespace, fresh) else coming - len(fresh)

    def bring_each(self, namespace: int, keys: Sequence[BlockKey]) -> int:
        """The same for blocks that form no chain; how many of these are on their way now."""
        home = self._blocks.namespaces[namespace]
        coming = 0
        fresh: list[Reservation] = []
        for key, here in zip(keys, self._tier.contains(home.fingerprint, keys), strict=True):
            if (namespace, key) in self._coming:
                coming += 1
            elif here and self._blocks.find(namespace, key) == NONE and len(fresh) < MOST_PROMISED:
                reservation = self._store.reserve_each(namespace, (key,), OWNER)
                if reservation.slots[0] < 0:
                    self._store.abort(reservation)
                    break
                fresh.append(reservation)
        return coming + len(fresh) if self._read(namespace, fresh) else coming

    def when_here(self, namespace: int, keys: Sequence[BlockKey], then: Callable[[], None]) -> None:
        """Call ``then`` as soon as none of these is on its way any more."""
        left = {(namespace, key) for key in keys} & self._coming
        if left:
            self._waiting.append((left, then))
        else:
            then()

    def _read(self, namespace: int, reservations: list[Reservation]) -> bool:
        """Begin to fill reserved slots, in batches; False, and all of them given up, when the tier refuses."""
        size = max(1, BATCH_BYTES // self._blocks.namespaces[namespace].block_bytes)
        for start in range(0, len(reservations), size):
            batch = reservations[start : start + size]
            jobs = [self._job(reservation.slots[0]) for reservation in batch]
            try:
                ticket = self._tier.read(jobs)
            except ValueError as problem:
                log.warning("storage does not give blocks: %s", problem)
                ticket = None
            if ticket is None:
                for reservation in reversed(reservations[start:]):
                    self._store.abort(reservation)
                return False
            self._reading[ticket] = batch
            self._coming.update((namespace, job.key) for job in jobs)
        return True

    # -- events -------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """What the tier has to say."""
        for event in self._tier.poll():
            if isinstance(event, Done):
                self._over(event)
            elif isinstance(event, Changed):
                self._tell(event)
            elif isinstance(event, Recovered) and event.done == event.total:
                log.info("storage: %d blocks found in %d segments", event.blocks, event.total)
        self._write_some()

    def _tell(self, event: Changed) -> None:
        if event.state is base.State.DEGRADED:
            log.warning("storage is degraded: %s; blocks are kept in memory only, and it is tried again", event.reason)
        elif event.state is base.State.READY:
            log.info("storage is ready")

    def _over(self, done: Done) -> None:
        written = self._writing.pop(done.ticket, None)
        if written is not None:
            slots, size = written
            self._written_bytes -= size
            for slot in slots:
                self._blocks.unpin(slot)
            if any(outcome is not Outcome.OK for outcome in done.outcomes):
                self._sweep_all()
            return
        for reservation, outcome in zip(self._reading.pop(done.ticket, []), done.outcomes, strict=True):
            slot = reservation.slots[0]
            self._coming.discard((self._blocks.table.namespace[slot], self._blocks.key_of(slot)))
            if outcome is Outcome.OK:
                self._store.commit(reservation, "promoted")
            else:
                key = self._blocks.key_of(slot)
                self._store.abort(reservation)
                self._blocks.departures.note(key, Reason.UNREADABLE)
        waiting, self._waiting = self._waiting, []
        for left, then in waiting:
            left &= self._coming
            if left:
                self._waiting.append((left, then))
            else:
                then()

    def tick(self) -> None:
        """A few times a second."""
        self.poll()
        self._sweep_some()
        self._write_some()
        self._tier.flush()

    # -- the rest -----------------------------------------------------------------------------------------

    def forget(self, namespace: int | None) -> None:
        """Everything of a namespace is forgotten, of all with None."""
        homes = self._blocks.namespaces if namespace is None else [self._blocks.namespaces[namespace]]
        for home in homes:
            self._tier.forget_namespace(home.fingerprint)

    def describe(self) -> Body:
        """What the tier holds, for ``info``."""
        usage = self._tier.usage()
        return {
            "state": usage.state.name.lower(),
            "reason": usage.reason,
            "budget_bytes": usage.budget_bytes,
            "used_bytes": usage.used_bytes,
            "live_bytes": usage.live_bytes,
            "blocks": usage.blocks,
            "queued_blocks": len(self._queue),
            "queued_bytes": usage.queued_bytes,
            "pid": usage.pid,
        }

    def count(self) -> Counter[str]:
        """Counters, under names of their own."""
        return Counter({f"storage_{name}": count for name, count in self._tier.usage().counters.items()})

    def check(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant."""
        self._tier.check()
        reserved = sum(len(batch) for batch in self._reading.values())
        assert reserved == len(self._coming), f"{reserved} blocks are read, {len(self._coming)} are promised"

    def close(self, seconds: float, forget: Callable[[int], object]) -> None:
        """Let the tier write what it has, for so long at most. ``forget`` ends the watch over its descriptor."""
        self._write_some()
        forget(self._tier.fileno())
        self._tier.close(seconds)
