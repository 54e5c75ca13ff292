"""Blocks on the move: store jobs over all ranks of an engine, loads under leases. The loop never waits here."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpkv_client.errors import CopyFailed, HpkvError, NotRegistered, UsageError
from hpkv_client.types import Keys
from hpkv_client.wire import Body, unpack_blocks
from hpkv_daemon.core.counts import Histogram
from hpkv_daemon.core.index import NONE
from hpkv_daemon.core.store import KEPT, BlockStore
from hpkv_daemon.faults import Faults
from hpkv_daemon.movers.base import CopyJob, Direction, Done, Outcome
from hpkv_daemon.service.engines import Engine, Rank, StoreJob
from hpkv_daemon.service.events import EventLog
from hpkv_daemon.service.movers import Movers
from hpkv_daemon.service.sessions import Reactor

log = logging.getLogger(__name__)

STORE_JOB_SECONDS = 30.0
"""A store job whose ranks have not all asked by then is given up: one of them is gone."""

COPY_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Buckets of the time from a rank's request until its copy is over."""

Answer = Callable[[bytes, int, Body | HpkvError], None]
"""Sends a deferred reply: (identity, request id, body or error)."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asked, and where the answer goes."""

    identity: bytes
    request: int
    engine: Engine
    rank: Rank


@dataclass(slots=True)
class _Load:
    caller: Caller
    job: int
    lease: int
    ticket: int
    blocks: int
    body: Body
    namespace: int
    started: float


class Transfers:
    """Store and load jobs of all engines. Control loop only."""

    def __init__(
        self,
        store: BlockStore,
        movers: Movers,
        reactor: Reactor,
        awake: Callable[[], float],
        answer: Answer,
        lease_deadline: Callable[[], float],
        faults: Faults,
        events: EventLog,
    ) -> None:
        self._store = store
        self._movers = movers
        self._reactor = reactor
        self._awake = awake
        self._answer = answer
        self._lease_deadline = lease_deadline
        self._faults = faults
        self._events = events
        self._loads: dict[tuple[str, int, int], _Load] = {}
        self._unsettled: list[tuple[Engine, StoreJob]] = []
        self.counters: Counter[str] = Counter()
        self.durations = {("memory", direction): Histogram(COPY_SECONDS) for direction in ("load", "store")}
        """By tier and direction: how long ranks waited for copies that succeeded."""

    def _over(self, caller: Caller, end: Callable[..., None], *arguments: object) -> None:
        """A copy of the caller is over. If its end fails in a way nobody expects, the caller must not wait for it."""
        try:
            end(*arguments)
        except Exception as bug:
            self.counters["internal_errors"] += 1
            log.exception("the end of a copy failed")
            problem = HpkvError(f"internal error: {bug!r}", "report this")
            self._answer(caller.identity, caller.request, problem)

    # -- loads --------------------------------------------------------------------------------------------

    def load(self, caller: Caller, body: Body) -> None:
        """Copy blocks of a leased prefix into the rank's memory; answered when the last byte is there."""
        blocks = _checked_blocks(caller.rank, body["blocks"])
        slots = self._store.begin_transfer(body["lease"], caller.engine.name, body["first"], len(blocks))
        self._start_load(caller, body["job"], body["lease"], slots, blocks, {"loaded": len(blocks)})

    def get(self, caller: Caller, body: Body) -> None:
        """Copy whichever of these unrelated blocks are resident; answered with a byte per key, 1 = copied."""
        keys, blocks = Keys(body["keys"]), _checked_blocks(caller.rank, body["blocks"])
        _require_pairs(keys, blocks)
        deadline = self._lease_deadline()
        namespace = _namespace(caller.engine)
        lease, slots = self._store.acquire_each(namespace, list(keys), caller.engine.name, deadline)
        self.counters["requested_blocks"] += len(keys)
        found = bytes(slot != NONE for slot in slots)
        counts = self._store.blocks.namespaces[namespace].counts
        if lease is None:
            counts.looked_up(len(keys), 0, 0)
            self._answer(caller.identity, caller.request, {"found": found})
            return
        self._store.hold(lease)
        self.counters["matched_blocks"] += len(lease.pinned)
        counts.looked_up(len(keys), sum(found), 0)
        wanted = [block for block, slot in zip(blocks, slots, strict=True) if slot != NONE]
        here = [slot for slot in slots if slot != NONE]
        self._start_load(caller, body["job"], lease.number, here, wanted, {"found": found})

    def _start_load(
        self, caller: Caller, job: int, lease: int, slots: list[int], blocks: Sequence[int], body: Body
    ) -> None:
        key = (caller.engine.name, caller.rank.number, job)
        offsets = tuple(self._store.offset(slot) for slot in slots)
        ticket = None
        if key not in self._loads:
            copy = CopyJob(caller.rank.attachment, Direction.LOAD, job, offsets, tuple(blocks))
            ticket = self._movers.submit(copy, lambda done: self._over(caller, self._load_done, key, done))
        if ticket is None:
            self._end_lease(caller, lease, body)
            self.counters["load_failures"] += 1
            raise CopyFailed(f"load {job} cannot start now", "recompute the blocks")
        namespace, now = _namespace(caller.engine), self._awake()
        self._loads[key] = _Load(caller, job, lease, ticket, len(blocks), body, namespace, now)

    def _end_lease(self, caller: Caller, lease: int, body: Body) -> None:
        self._store.end_transfer(lease, self._lease_deadline())
        if "found" in body:
            self._store.release(lease, caller.engine.name)

    def _load_done(self, key: tuple[str, int, int], done: Done) -> None:
        load = self._loads.pop(key)
        caller = load.caller
        self._end_lease(caller, load.lease, load.body)
        if self._events.followed:
            self._events.tell(
                "loaded",
                engine=caller.engine.name,
                rank=caller.rank.number,
                blocks=load.blocks,
                bytes=done.bytes_moved,
                seconds=round(done.seconds, 6),
                problem=done.problem,
            )
        if done.outcome is Outcome.OK:
            self.counters["loaded_blocks"] += load.blocks
            self.counters["loaded_bytes"] += done.bytes_moved
            self.counters["load_microseconds"] += int(done.seconds * 1e6)
            self._store.blocks.namespaces[load.namespace].counts.loads.add(load.blocks, done.bytes_moved, done.seconds)
            self.durations["memory", "load"].observe(self._awake() - load.started)
            if self._faults.at("reply").fail:
                return
            self._answer(caller.identity, caller.request, load.body)
            return
        self.counters["load_failures"] += 1
        problem = CopyFailed(f"load {load.job} failed: {done.problem}", "recompute the blocks")
        self._answer(caller.identity, caller.request, problem)

    def cancel(self, caller: Caller, job: int) -> bool:
        """Withdraw a load; its own reply confirms that nothing is copied any more. False: it is not running."""
        load = self._loads.get((caller.engine.name, caller.rank.number, job))
        if load is None:
            return False
        self._movers.cancel(caller.rank.device, load.ticket)
        return True

    # -- stores -------------------------------------------------------------------------------------------

    def store(self, caller: Caller, body: Body, chained: bool) -> None:
        """One rank's part of a store job; answered when the rank's memory is not read any more."""
        keys, blocks = Keys(body["keys"]), _checked_blocks(caller.rank, body["blocks"])
        _require_pairs(keys, blocks)
        engine, number = caller.engine, body["job"]
        if engine.ended_without(number, caller.rank.number):
            self._answer(caller.identity, caller.request, {"kept": 0, "dropped": len(keys), "partial": False})
            return
        if engine.has_ended(number):
            raise UsageError(f"store job {number} is over", "number jobs upwards")
        parent = body.get("parent")
        job = engine.stores.get(number)
        if job is None:
            job = self._open_job(engine, number, keys, parent, chained)
        if caller.rank.number not in job.missing:
            raise UsageError(f"store job {number}: rank {caller.rank.number} asked twice")
        if (keys.blob, parent, chained) != (job.keys.blob, job.parent, job.chained):
            # Parts of different blocks must never meet in one slot.
            self._give_up(engine, job)
            raise UsageError(f"store job {number}: rank {caller.rank.number} names other blocks")
        job.missing.discard(caller.rank.number)
        self._copy_part(caller, job, blocks)
        self._advance(engine, job)

    def _open_job(self, engine: Engine, number: int, keys: Keys, parent: bytes | None, chained: bool) -> StoreJob:
        namespace = _namespace(engine)
        if chained:
            reservation = self._store.reserve(namespace, parent, keys, engine.name)
        else:
            reservation = self._store.reserve_each(namespace, keys, engine.name)
        self.counters["offered_blocks"] += len(keys)
        ranks = set(engine.ranks)
        job = StoreJob(number, keys, parent, chained, reservation, self._awake(), ranks, namespace, engine.turn)
        engine.turn += sum(slot >= 0 for slot in reservation.slots)
        engine.stores[number] = job
        return job

    def _copy_part(self, caller: Caller, job: StoreJob, blocks: Sequence[int]) -> None:
        mine = [(self._store.offset(slot), block) for slot, block in job.part_of(caller.rank.shard, blocks)]
        if job.failed or not mine:
            job.replies.append((caller.identity, caller.request))
            return
        offsets, wanted = zip(*mine, strict=True)
        copy = CopyJob(caller.rank.attachment, Direction.STORE, job.number, offsets, wanted)
        now = self._awake()
        ticket = self._movers.submit(copy, lambda done: self._over(caller, self._part_done, caller, job, now, done))
        if ticket is None:
            job.failed = True
            job.replies.append((caller.identity, caller.request))
        else:
            job.copying.add((caller.rank.device, ticket))

    def _part_done(self, caller: Caller, job: StoreJob, started: float, done: Done) -> None:
        job.copying.discard((caller.rank.device, done.ticket))
        if done.outcome is Outcome.OK:
            written = done.bytes_moved // max(1, caller.rank.shard.block_bytes)
            caller.rank.written_blocks += written
            self._store.blocks.namespaces[job.namespace].counts.stores.add(written, done.bytes_moved, done.seconds)
            self.durations["memory", "store"].observe(self._awake() - started)
        else:
            job.failed = True
        self.counters["store_microseconds"] += int(done.seconds * 1e6)
        job.replies.append((caller.identity, caller.request))
        self._advance(caller.engine, job)

    def _advance(self, engine: Engine, job: StoreJob) -> None:
        """End the job if nothing of it is outstanding; else tell the ranks that are through.

        A rank may reuse its blocks before the others are done; the last one hears the job's outcome.
        """
        if job.copying or (job.missing and not job.failed):
            replies, job.replies = job.replies, []
            for identity, request in replies:
                self._answer(identity, request, {"kept": 0, "dropped": 0, "partial": True})
            return
        fault = self._faults.at("commit")
        job.failed = job.failed or fault.fail
        if fault.delay:
            self._reactor.call_later(fault.delay, lambda: self._finish(engine, job))
        else:
            self._finish(engine, job)

    def _finish(self, engine: Engine, job: StoreJob) -> None:
        if engine.has_ended(job.number):
            return
        engine.end(job)
        if job.failed:
            self._store.abort(job.reservation)
            self.counters["store_failures"] += 1
        else:
            self._store.commit(job.reservation)
        if self._events.followed:
            fresh = len(job.reservation.reserved)
            self._events.tell("stored", engine=engine.name, asked=len(job.keys), blocks=fresh, failed=job.failed)
        self._unsettled.append((engine, job))
        self._settle_all()

    def _settle_all(self) -> None:
        waiting, self._unsettled = self._unsettled, []
        for engine, job in waiting:
            self._settle(engine, job)

    def _settle(self, engine: Engine, job: StoreJob) -> None:
        """Answer once every block's fate is known.

        Kept are the blocks that the next match finds, and those that another writer is at.
        """
        kept, waiting = 0, 0
        if engine.namespace is not None:
            fates = list(zip(job.keys, job.reservation.slots, strict=True))
            find = self._store.blocks.find
            kept = sum(find(engine.namespace, key) != NONE for key, slot in fates if slot == KEPT)
            if not job.failed:
                ours = [key for key, slot in fates if slot != KEPT]
                resident, waiting = self._store.outcome(engine.namespace, ours)
                kept += resident
        if waiting:
            self._unsettled.append((engine, job))
            return
        for identity, request in job.replies:
            self._answer(identity, request, {"kept": kept, "dropped": len(job.keys) - kept, "partial": False})
        job.replies = []

    # -- the end of things --------------------------------------------------------------------------------

    def abandon(self, engine: Engine) -> None:
        """A rank of the engine is gone: withdraw all its copies; reservations end when movers confirm.

        Call before the ranks' memory is detached.
        """
        self._store.drop(engine.name)
        for key, load in list(self._loads.items()):
            if key[0] == engine.name:
                self._movers.cancel(load.caller.rank.device, load.ticket)
        for job in list(engine.stores.values()):
            self._give_up(engine, job)

    def _give_up(self, engine: Engine, job: StoreJob) -> None:
        job.failed = True
        for device, ticket in job.copying:
            self._movers.cancel(device, ticket)
        self._advance(engine, job)

    def tick(self, engines: Sequence[Engine]) -> None:
        """Give up store jobs that some rank never joined."""
        now = self._awake()
        self._settle_all()
        for engine in engines:
            late = [job for job in engine.stores.values() if now - job.started > STORE_JOB_SECONDS]
            for job in late:
                if job.missing and not job.failed:
                    self.counters["abandoned_jobs"] += 1
                    self._give_up(engine, job)

    def check(self, engines: Sequence[Engine], present: set[str]) -> None:
        """Raise ``AssertionError`` naming the first job or lease that belongs to nobody.

        ``present``: names of the engines that have a session.
        """
        for (name, rank, number), load in self._loads.items():
            lease = self._store.leases.find(load.lease)
            assert lease, f"load {number} of {name}/{rank} has no lease"
            assert lease.transfers, f"load {number} of {name}/{rank} does not hold its lease"
        for lease in self._store.leases:
            owned = lease.transfers or lease.owner in present
            assert owned, f"lease {lease.number} belongs to {lease.owner!r}, who left"
        for engine in engines:
            for job in engine.stores.values():
                assert self._store.is_open(job.reservation), f"store {job.number} holds no reservation"
                waits = job.copying or job.missing or self._faults.possible
                assert waits, f"store {job.number} waits for nobody"

    @property
    def loads_under_way(self) -> int:
        """Loads that some rank waits for."""
        return len(self._loads)


def _namespace(engine: Engine) -> int:
    if engine.namespace is None:
        raise NotRegistered(f"engine {engine.name!r} is not complete", "register all its ranks")
    return engine.namespace


def _checked_blocks(rank: Rank, blob: bytes) -> tuple[int, ...]:
    blocks = unpack_blocks(blob)
    if blocks and max(blocks) >= rank.shard.blocks:
        raise UsageError(f"block {max(blocks)} of an engine with {rank.shard.blocks} blocks")
    return blocks


def _require_pairs(keys: Keys, blocks: tuple[int, ...]) -> None:
    if len(keys) != len(blocks):
        raise UsageError(f"{len(keys)} keys for {len(blocks)} blocks")
