"""Between pool and tier: what becomes resident is written behind, what is asked for is brought back."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from hpkv_client.errors import Busy, HpkvError, UsageError
from hpkv_client.types import BlockKey
from hpkv_client.wire import Body
from hpkv_daemon.core.admission import WritePolicy
from hpkv_daemon.core.counts import Histogram
from hpkv_daemon.core.departures import Reason
from hpkv_daemon.core.index import NONE
from hpkv_daemon.core.store import BlockStore, Reservation
from hpkv_daemon.service.importing import IMPORT_COUNTS, Import, Opener
from hpkv_daemon.service.sessions import Reactor
from hpkv_daemon.service.write_behind import BATCH_BYTES, WriteBehind, job_of
from hpkv_daemon.tiers import base
from hpkv_daemon.tiers.base import Changed, Done, Inventory, Known, Outcome, Recovered, Scrubbed, Tier

log = logging.getLogger(__name__)

OWNER = "(tier)"
BATCH_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Buckets of the time from the submission of a batch until it is over."""
MOST_PROMISED = 4096
"""Blocks that one look-up has brought back at most."""


class Tiering:
    """Writes behind and reads ahead. Control loop only. ``clock`` stands still while the daemon is stopped.

    A block that is brought back is reserved like one that an engine stores, and becomes resident when its bytes are
    verified and its parent is there.
    """

    def __init__(
        self,
        store: BlockStore,
        tier: Tier,
        reactor: Reactor,
        policy: WritePolicy,
        clock: Callable[[], float],
        open_storage: Opener | None,
        name: str = "storage",
    ) -> None:
        self._name = name
        self._store = store
        self._blocks = store.blocks
        self._tier = tier
        self._behind = WriteBehind(store, tier, policy, clock, name)
        self._reading: dict[int, list[Reservation]] = {}
        """Ticket -> one reservation for each block."""
        self._coming: set[tuple[int, BlockKey]] = set()
        """Namespace and key of each block that is being brought back."""
        self._waiting: list[tuple[set[tuple[int, BlockKey]], Callable[[], None]]] = []
        self._asking: list[tuple[int, Sequence[BlockKey], Callable[[], None]]] = []
        """Who waits for blocks of which it is not known yet whether the tier has them."""
        self._reactor = reactor
        self._open_storage = open_storage
        self._import: Import | None = None
        self._opening = ""
        """The directory that is being opened for an import."""
        self._import_problem: HpkvError | None = None
        self._scrubbed = Scrubbed(0, 0, 0, 0)
        self._label = "remote" if name == "remote" else "disk"
        self.durations = {(self._label, direction): Histogram(BATCH_SECONDS) for direction in ("load", "store")}
        """How long batches took, by their direction as engines see it."""
        reactor.add_reader(tier.fileno(), self.poll)
        tier.recover()

    def allow(self, daily_bytes: int | None) -> None:
        """So much may be written to the tier in a day from now on."""
        self._behind.allow(daily_bytes)

    def used(self, namespace: int, keys: Sequence[BlockKey]) -> None:
        """These blocks were found in memory."""
        self._behind.used(namespace, keys)

    # -- reading ahead ------------------------------------------------------------------------------------

    def bring(self, namespace: int, parent: BlockKey | None, keys: Sequence[BlockKey]) -> int:
        """Bring a chain back of which ``parent`` is resident; how many leading keys are on their way now.

        Those count as well of which the tier is finding out whether it has them.
        """
        home = self._blocks.namespaces[namespace]
        wanted = keys[: min(len(keys), MOST_PROMISED)]
        here = self._tier.match(home.fingerprint, wanted)
        asking = here < len(wanted) and self._tier.inquire(home.fingerprint, wanted[here:], True)
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
        if not self._read(namespace, fresh):
            return coming - len(fresh)
        return len(wanted) if asking and coming == here else coming

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
        if self._read(namespace, fresh):
            coming += len(fresh)
        unknown = self.left(namespace, keys)
        return coming + len(unknown) if unknown and self._tier.inquire(home.fingerprint, unknown, False) else coming

    def _is_here(self, namespace: int, key: BlockKey) -> bool:
        """Whether a block is resident, or on its way."""
        return (namespace, key) in self._coming or self._blocks.find(namespace, key) != NONE

    def left(self, namespace: int, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of the keys that are neither resident nor on their way from this tier."""
        return [key for key in keys if not self._is_here(namespace, key)]

    def when_here(self, namespace: int, keys: Sequence[BlockKey], then: Callable[[], None]) -> None:
        """Call ``then`` as soon as none of these is on its way any more, or might be."""
        left = self.left(namespace, keys)
        if left and self._tier.inquire(self._blocks.namespaces[namespace].fingerprint, left, False):
            self._asking.append((namespace, keys, then))
            return
        # What was being found out when somebody asked for them may be known by now.
        self.bring_each(namespace, left)
        coming = {(namespace, key) for key in keys} & self._coming
        if coming:
            self._waiting.append((coming, then))
        else:
            then()

    def _read(self, namespace: int, reservations: list[Reservation]) -> bool:
        """Begin to fill reserved slots, in batches; False, and all of them given up, when the tier refuses."""
        size = max(1, BATCH_BYTES // self._blocks.namespaces[namespace].block_bytes)
        for start in range(0, len(reservations), size):
            batch = reservations[start : start + size]
            jobs = [job_of(self._blocks, reservation.slots[0]) for reservation in batch]
            try:
                ticket = self._tier.read(jobs)
            except ValueError as problem:
                log.warning("%s does not give blocks: %s", self._name, problem)
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
            elif isinstance(event, Known):
                self._known()
            elif isinstance(event, Scrubbed):
                self._scrubbed = event
                if event.done == event.total:
                    log.info("storage verified: %d good blocks, %d bad ones", event.good, event.bad)
            elif isinstance(event, Recovered) and event.done == event.total:
                log.info("storage: %d blocks found in %d segments", event.blocks, event.total)
        self._behind.go_on()

    def _known(self) -> None:
        asking, self._asking = self._asking, []
        for namespace, keys, then in asking:
            self.when_here(namespace, keys, then)

    def _tell(self, event: Changed) -> None:
        if event.state is base.State.DEGRADED:
            log.warning("%s is degraded: %s; blocks stay in memory, and it is tried again", self._name, event.reason)
        elif event.state is base.State.READY:
            log.info("%s is ready", self._name)

    def _over(self, done: Done) -> None:
        written = self._behind.over(done) or (self._import is not None and self._import.written(done))
        self.durations[self._label, "store" if written else "load"].observe(done.seconds)
        if written:
            return
        seconds = done.seconds / max(1, len(done.outcomes))
        for reservation, outcome in zip(self._reading.pop(done.ticket, []), done.outcomes, strict=True):
            slot = reservation.slots[0]
            self._coming.discard((self._blocks.table.namespace[slot], self._blocks.key_of(slot)))
            if outcome is Outcome.OK:
                home = self._blocks.namespace_of(slot)
                home.counts.moved(self._name)[0].add(1, home.block_bytes, seconds)
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
        self._behind.tick()
        if self._import is not None:
            self._import.tick()
        self._tier.flush()

    # -- the rest -----------------------------------------------------------------------------------------

    def forget(self, namespace: int | None) -> None:
        """Everything of a namespace is forgotten, of all with None."""
        homes = self._blocks.namespaces if namespace is None else [self._blocks.namespaces[namespace]]
        for home in homes:
            self._tier.forget_namespace(home.fingerprint)

    def drain(self, begin: bool) -> Body:
        """Begin to write everything that is in memory, if told to; how far it is."""
        if begin:
            log.info("draining memory to storage")
            self._behind.drain()
        return self._behind.progress()

    def scrub(self, bytes_per_second: int | None) -> Body:
        """Begin to verify everything, so fast at most, if told to; how far it is. Raises ``Busy``, ``UsageError``."""
        if bytes_per_second is not None:
            if not self._tier.usage().budget_bytes:
                raise UsageError("there is no storage to verify", "set HPKV_KV_STORAGE_PATH")
            if not self._tier.scrub(bytes_per_second):
                raise Busy("storage is being verified already, or still being read in", "ask again later")
            self._scrubbed = Scrubbed(0, 1, 0, 0)
            self.poll()
        told = self._scrubbed
        return {
            "over": told.done == told.total,
            "segments": told.total,
            "done_segments": told.done,
            "good_blocks": told.good,
            "bad_blocks": told.bad,
        }

    def adopt(self, path: str) -> Body:
        """Begin to copy the storage in a directory into this one, unless ``path`` is empty; how far it is.

        Raises ``Busy``, ``UsageError``, or why the directory that was named last cannot be read.
        """
        if path:
            self._begin_import(path)
        elif self._import_problem is not None:
            raise self._import_problem
        if self._opening or self._import is None:
            return {"over": not self._opening, "problem": "", **dict.fromkeys(IMPORT_COUNTS, 0)}
        return self._import.progress()

    def _begin_import(self, path: str) -> None:
        if self._opening or (self._import is not None and not self._import.over):
            raise Busy("storage is being imported already", "wait until that is over")
        if self._open_storage is None or not self._tier.usage().budget_bytes:
            raise UsageError("there is no storage to import into", "set HPKV_KV_STORAGE_PATH")
        self._opening, self._import_problem = path, None

        def opened(found: Inventory | HpkvError) -> None:
            self._opening = ""
            if isinstance(found, HpkvError):
                self._import_problem = found
                return
            log.info("importing the blocks in %s", path)
            self._import = Import(path, self._store, self._tier, found, self._reactor)

        self._open_storage(path, opened)

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
            **self._behind.describe(),
            "queued_bytes": usage.queued_bytes,
            "pid": usage.pid,
        }

    def count(self) -> Counter[str]:
        """Counters, under names of their own."""
        return Counter({f"{self._name}_{name}": count for name, count in self._tier.usage().counters.items()})

    @property
    def pins(self) -> int:
        """How many slots are pinned because they are being written."""
        return self._behind.pins

    def check(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant."""
        self._tier.check()
        reserved = sum(len(batch) for batch in self._reading.values())
        assert reserved == len(self._coming), f"{reserved} blocks are read, {len(self._coming)} are promised"

    def close(self, seconds: float, forget: Callable[[int], object]) -> None:
        """Let the tier write what it has, for so long at most. ``forget`` ends the watch over its descriptor."""
        if self._import is not None:
            self._import.close()
        self._behind.finish()
        forget(self._tier.fileno())
        self._tier.close(seconds)
