"""What becomes resident is written to the tier behind everybody's back: at once, or when it gets cold."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from hpkv_client.types import BlockKey
from hpkv_client.wire import Body
from hpkv_daemon.core.admission import Admission, IdleTicks, WriteAllowance, WritePolicy, coldest_quarter
from hpkv_daemon.core.blocks import Blocks
from hpkv_daemon.core.index import NONE, State
from hpkv_daemon.core.store import BlockStore
from hpkv_daemon.tiers import base
from hpkv_daemon.tiers.base import BlockJob, Done, Outcome, Tier

log = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
"""Payloads of one batch in either direction: small enough that others get their turn in between."""
WRITTEN_SHARE = 8
"""At most about one part in this many of the pool is being written at any time: it cannot be evicted meanwhile."""
MOST_QUEUED = 1 << 16
"""Blocks that wait to be written; with more, those that wait longest are passed over, for the sweep to find."""
SWEEP_SLOTS = 4096
"""Slots that one step of the sweep looks at for blocks that are not on the tier."""
SWEEP_LOOKUPS = 1024
"""Of which it looks up so many on the tier at most: about 1 ms of the control loop."""
FULL_SHARE = 0.75
"""A pool that is fuller than this is about to evict."""
_SAMPLED_SLOTS = 256
_TOLD_KEYS = 4096
"""Keys found in memory of which the tier is told in one tick: about 2 ms."""
_MOST_USES = 256
"""Look-ups that wait to be told to the tier; with more, the oldest are passed over."""


def job_of(blocks: Blocks, slot: int) -> BlockJob:
    """The transfer of the block in ``slot``."""
    home, above = blocks.namespace_of(slot), blocks.table.parent[slot]
    parent = None if above == NONE else blocks.key_of(above)
    return BlockJob(home.fingerprint, blocks.key_of(slot), parent, home.block_bytes, blocks.slots.offset(slot))


class WriteBehind:
    """Control loop only. ``clock`` stands still while the daemon is stopped. A block that is written is pinned until
    that is over."""

    def __init__(
        self, store: BlockStore, tier: Tier, policy: WritePolicy, clock: Callable[[], float], name: str = "storage"
    ) -> None:
        self._name = name
        self._blocks = store.blocks
        self._tier = tier
        self._policy = policy
        self._clock = clock
        self._admission = Admission(policy.second_touch)
        self._allowance = WriteAllowance(policy.daily_bytes, clock())
        self._idle = IdleTicks(policy.idle_seconds)
        self._cold = 0
        """Blocks used last at or before this tick are cold."""
        self._queue: deque[tuple[int, BlockKey]] = deque()
        """Slots with what is in them, to be written."""
        self._writing: dict[int, tuple[list[int], int]] = {}
        """Ticket -> pinned slots, and the bytes in them."""
        self._written_bytes = 0
        slots = store.blocks.slots
        self._pool_bytes = slots.extents * slots.extent_bytes
        self._most_written = self._pool_bytes // WRITTEN_SHARE
        self._used: deque[tuple[int, Sequence[BlockKey]]] = deque(maxlen=_MOST_USES)
        """Namespace and keys that were found."""
        self._sweep = 0
        """The next slot of the sweep."""
        self._unswept = 0
        """Slots that the sweep still has to look at."""
        self._draining = False
        self._drained_blocks = 0
        self._drain_problem = ""
        self._on = bool(tier.usage().budget_bytes)
        if self._on:
            store.on_resident.append(self._resident)
            self.sweep_all()

    @property
    def pins(self) -> int:
        """Slots that are pinned, each once."""
        return sum(len(slots) for slots, _ in self._writing.values())

    def used(self, namespace: int, keys: Sequence[BlockKey]) -> None:
        """These blocks were of use; cheap, the rest is done in ``tick``."""
        if self._on and keys:
            self._used.append((namespace, keys))

    def allow(self, daily_bytes: int | None) -> None:
        """So much may be written in a day from now on; None: any number of bytes."""
        self._policy = replace(self._policy, daily_bytes=daily_bytes)
        self._allowance.change(daily_bytes, self._clock())
        self.sweep_all()

    # -- what to write ------------------------------------------------------------------------------------

    def _resident(self, slot: int) -> None:
        key = self._blocks.key_of(slot)
        self._admission.stored(key)
        if not self._policy.demote and self._wanted(slot, key):
            self._enqueue(slot, key)

    def _enqueue(self, slot: int, key: BlockKey) -> None:
        if len(self._queue) == MOST_QUEUED:
            self._queue.popleft()
            self.sweep_all()
        self._queue.append((slot, key))

    def _wanted(self, slot: int, key: BlockKey) -> bool:
        """Whether a resident block should be on the tier, and is not."""
        home = self._blocks.namespace_of(slot)
        if not self._draining and not self._admission.admits(key):
            return False
        return home.block_bytes <= self._tier.largest_block and not self._tier.match(home.fingerprint, (key,))

    def _due(self, slot: int) -> bool:
        """Whether it is time to write the block, if it should be written at all."""
        if self._draining or not self._policy.demote:
            return True
        return self._blocks.namespace_of(slot).policy.last_use(slot) <= self._cold

    def _measure_cold(self) -> None:
        """Idle is what was not used for a while; in a pool that is nearly full also what leaves next."""
        blocks = self._blocks
        self._cold = self._idle.sample(self._clock(), blocks.tick)
        if blocks.usage.resident_bytes > FULL_SHARE * self._pool_bytes:
            state = blocks.table.state
            some = range(0, len(state), max(1, len(state) // _SAMPLED_SLOTS))
            uses = [blocks.namespace_of(slot).policy.last_use(slot) for slot in some if state[slot] == State.RESIDENT]
            self._cold = max(self._cold, coldest_quarter(uses))

    def sweep_all(self) -> None:
        """Some resident block may not be on the tier: look at all of them, in time."""
        self._unswept = len(self._blocks.table.state)

    def _sweep_some(self) -> None:
        """Look for resident blocks that the tier should have and has not."""
        if self._policy.demote and not self._unswept:
            # What was too young in one round may be cold in the next.
            self.sweep_all()
        if not self._unswept or self._queue or self._writing or self._tier.usage().state is not base.State.READY:
            return
        state, lookups = self._blocks.table.state, 0
        first = self._sweep if self._sweep < len(state) else 0
        last = min(first + SWEEP_SLOTS, len(state))
        slot = first
        while slot < last and lookups < SWEEP_LOOKUPS:
            if state[slot] == State.RESIDENT and self._due(slot):
                lookups += 1
                key = self._blocks.key_of(slot)
                if self._wanted(slot, key):
                    self._queue.append((slot, key))
            slot += 1
        self._sweep = slot
        self._unswept = max(0, self._unswept - (slot - first))

    def _tell_uses(self) -> None:
        """Whoever evicts on the tier learns what memory was asked for; what was asked for twice may be written."""
        left = _TOLD_KEYS
        while self._used and left > 0:
            namespace, keys = self._used.popleft()
            left -= len(keys)
            home = self._blocks.namespaces[namespace]
            self._tier.touch(home.fingerprint, keys)
            if not self._admission.second_touch:
                continue
            for key in keys:
                fresh = not self._admission.admits(key)
                self._admission.used(key)
                slot = self._blocks.resident(namespace, key)
                if fresh and slot != NONE and not self._policy.demote and self._wanted(slot, key):
                    self._enqueue(slot, key)

    # -- writing ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """A few times a second."""
        if not self._on:
            return
        self._tell_uses()
        if self._policy.demote:
            self._measure_cold()
        self._sweep_some()
        self.go_on()

    def go_on(self) -> None:
        """Hand over what waits, as much as the tier takes, and no more than a part of the pool: it is pinned."""
        if self._draining:
            self._sweep_some()
        while self._queue and self._written_bytes < self._most_written:
            if not self._draining and self._allowance.left(self._clock()) <= 0:
                # The sweep offers them again; meanwhile those that come are worth as much as those that wait.
                self._queue.clear()
                self.sweep_all()
                break
            slots, jobs, size = self._next_batch()
            if not jobs or not self._write(slots, jobs, size):
                break
        self._look_after_drain()

    def _next_batch(self) -> tuple[list[int], list[BlockJob], int]:
        slots, jobs, size = [], [], 0
        while self._queue and size < min(BATCH_BYTES, self._most_written):
            slot, key = self._queue.popleft()
            # It may have left, and another one come, since it was queued.
            if self._blocks.table.state[slot] == State.RESIDENT and self._blocks.key_of(slot) == key:
                slots.append(slot)
                jobs.append(job_of(self._blocks, slot))
                size += jobs[-1].length
        return slots, jobs, size

    def _write(self, slots: Sequence[int], jobs: Sequence[BlockJob], size: int) -> bool:
        """Hand a batch over; False when the tier takes nothing now."""
        try:
            ticket = self._tier.write(jobs)
        except ValueError as problem:
            # What an earlier daemon left there contradicts these blocks: they stay in memory only.
            log.warning("%s does not take blocks: %s", self._name, problem)
            return True
        if ticket is None:
            # Full, or degraded: the sweep offers them again.
            self.sweep_all()
            return False
        for slot in slots:
            self._blocks.pin(slot)
        self._writing[ticket] = list(slots), size
        self._written_bytes += size
        self._allowance.spend(size)
        return True

    def over(self, done: Done) -> bool:
        """A batch ended; False if it is none of these."""
        written = self._writing.pop(done.ticket, None)
        if written is None:
            return False
        slots, size = written
        self._written_bytes -= size
        for slot, outcome in zip(slots, done.outcomes, strict=True):
            if outcome is Outcome.OK:
                home = self._blocks.namespace_of(slot)
                home.counts.moved(self._name)[1].add(1, home.block_bytes, done.seconds / len(slots))
            self._blocks.unpin(slot)
        if self._draining:
            self._drained_blocks += done.outcomes.count(Outcome.OK)
        if any(outcome is not Outcome.OK for outcome in done.outcomes):
            self.sweep_all()
        return True

    # -- draining -----------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Write everything that is resident, whatever the policy says; ``progress`` tells how far it is."""
        self._draining, self._drained_blocks, self._drain_problem = True, 0, ""
        self.sweep_all()
        self.go_on()

    def _look_after_drain(self) -> None:
        if not self._draining:
            return
        usage = self._tier.usage()
        if not self._on or usage.state is base.State.DEGRADED:
            self._drain_problem = usage.reason or "there is no storage"
            self._draining = False
        elif not self._unswept and not self._queue and not self._writing:
            self._draining = False

    def progress(self) -> Body:
        """Of the drain that was begun last."""
        return {
            "over": not self._draining,
            "problem": self._drain_problem,
            "slots": len(self._blocks.table.state),
            "left_slots": self._unswept if self._draining else 0,
            "queued_blocks": len(self._queue) + self.pins,
            "written_blocks": self._drained_blocks,
        }

    def describe(self) -> Body:
        """The part of ``info`` about writes."""
        left = self._allowance.left(self._clock())
        return {
            "queued_blocks": len(self._queue),
            "allowed_bytes": max(0, int(left)) if self._policy.daily_bytes is not None else None,
        }

    def finish(self) -> None:
        """The daemon is about to end: hand over what waits."""
        self.go_on()
