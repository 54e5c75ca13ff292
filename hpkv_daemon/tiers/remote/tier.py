"""The remote tier as the control loop sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpkv_client.types import KEY_BYTES, BlockKey
from hpkv_daemon.tiers.base import BlockJob, Changed, Direction, Event, Forgotten, Outcome, State, Usage
from hpkv_daemon.tiers.host import Reply, TierProcess
from hpkv_daemon.tiers.remote.lookups import Lookups
from hpkv_daemon.tiers.remote.patience import Breaker, Throttle
from hpkv_daemon.tiers.remote.shared import Batch, Shared, for_each
from hpkv_daemon.tiers.remote.writer import Writer

STUCK_SECONDS = 30.0
"""A process that completes nothing for so long is replaced; its requests have time limits of their own."""
QUEUE_BYTES = 256 << 20
"""Payloads of writes that may be on their way, and as much of reads: each holds a slot of the pool."""

LARGEST_BLOCK = 1 << 30
NO_LIMIT = 1 << 62
_PAGE = 4096


class RemoteTier:
    """A ``Tier`` in a store that others run. Owns the process from ``recover`` until ``close``.

    Nothing is known at first about what is there: ``inquire`` finds out, and ``match`` tells. The pool's descriptor is
    inherited by the process, not kept here. ``key_file``: encrypt with the key in it. ``bytes_per_second`` limits
    writes; 0 does not. ``clock`` must stand still while the daemon is stopped. Not thread-safe.
    """

    def __init__(
        self,
        url: str,
        pool_fd: int,
        pool_bytes: int,
        *,
        key_file: Path | None = None,
        bytes_per_second: int = 0,
        clock: Callable[[], float] = time.monotonic,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self._clock = clock
        self._pool_bytes = pool_bytes
        self._queue_bytes = queue_bytes
        self._process = TierProcess(
            "hpkv_daemon.tiers.remote.process",
            "remote",
            [str(pool_fd), str(pool_bytes), url, str(key_file or "")],
            (pool_fd,),
            lambda: None,
            lambda: None,
            clock,
            STUCK_SECONDS,
        )
        self._shared = Shared(self._process, clock)
        self._lookups = Lookups(self._shared)
        self._writer = Writer(self._shared, Throttle(bytes_per_second))
        self._reading_bytes = 0
        self._clearing: set[bytes] = set()
        """Namespaces that the process was told to clear."""
        self._told = (State.STARTING, "")

    @property
    def largest_block(self) -> int:
        """See ``Tier``. Every store takes so much in one request; none of ours is uploaded in parts."""
        return LARGEST_BLOCK

    def fileno(self) -> int:
        """See ``Tier``."""
        return self._process.fileno()

    def recover(self) -> None:
        """See ``Tier``. There is nothing to recover: what is there is asked for when it is needed."""
        self._process.start()

    # -- look-ups -----------------------------------------------------------------------------------------

    def match(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> int:
        """See ``Tier``: for all that is known."""
        unreadable = self._shared.unreadable(fingerprint)
        return 0 if unreadable else self._shared.presence.match(fingerprint, keys, self._clock())

    def contains(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> list[bool]:
        """See ``Tier``: for all that is known."""
        now = self._clock()
        readable = not self._shared.unreadable(fingerprint)
        return [readable and bool(self._shared.presence.find(fingerprint, key, now)) for key in keys]

    def inquire(self, fingerprint: bytes, keys: Sequence[BlockKey], chain: bool) -> bool:
        """See ``Tier``."""
        return self._lookups.inquire(fingerprint, keys, chain)

    def touch(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> None:
        """See ``Tier``. The store decides itself what leaves it."""

    # -- blocks -------------------------------------------------------------------------------------------

    def write(self, jobs: Sequence[BlockJob]) -> int | None:
        """See ``Tier``. Refused are batches that do not fit into the queue, and all while writes fail."""
        self._check_jobs(jobs)
        size, now, shared = sum(job.length for job in jobs), self._clock(), self._shared
        refused = self._writer.queued_bytes + size > self._queue_bytes or shared.writing.is_open(now)
        if refused or shared.closed or not jobs or any(job.fingerprint in shared.to_clear for job in jobs):
            shared.counters["refused_writes"] += len(jobs)
            return None
        batch = shared.batch(Direction.WRITE, jobs)
        for number, job in enumerate(jobs):
            self._writer.put(batch, number, job)
        self._writer.pump()
        return batch.ticket

    def read(self, jobs: Sequence[BlockJob]) -> int | None:
        """See ``Tier``. Refused are batches that do not fit into the queue, and all while reads fail."""
        self._check_jobs(jobs)
        size, now, shared = sum(job.length for job in jobs), self._clock(), self._shared
        refused = self._reading_bytes + size > self._queue_bytes or not jobs
        if refused or any(shared.unreadable(job.fingerprint) for job in jobs):
            shared.counters["refused_reads"] += len(jobs)
            return None
        batch = shared.batch(Direction.READ, jobs)
        self._reading_bytes += size
        blocks = [(job.fingerprint, job.key, job.length, job.offset) for job in jobs]
        self._process.ask(lambda reply: self._have_read(batch, size, now, reply), "read", blocks)
        return batch.ticket

    def _have_read(self, batch: Batch, size: int, started: float, reply: Reply) -> None:
        now, shared = self._clock(), self._shared
        self._reading_bytes -= size
        shared.judge(shared.reading, reply)
        shared.counters["read_microseconds"] += int((now - started) * 1e6)
        for number, (job, outcome) in enumerate(zip(batch.jobs, for_each(reply, len(batch.jobs)), strict=True)):
            ended = Outcome.VOID if job.fingerprint in shared.to_clear else outcome
            self._count_read(job, ended)
            if ended in (Outcome.MISSING, Outcome.BAD):
                shared.presence.learn(job.fingerprint, job.key, False, now)
            shared.end(batch, number, ended, reply.problem)

    def _count_read(self, job: BlockJob, outcome: Outcome) -> None:
        counters = self._shared.counters
        if outcome is Outcome.OK:
            counters["read_blocks"] += 1
            counters["read_bytes"] += job.length
            return
        counters["failed_reads"] += 1
        counters["missing_blocks"] += outcome is Outcome.MISSING
        counters["bad_blocks"] += outcome is Outcome.BAD

    def _check_jobs(self, jobs: Sequence[BlockJob]) -> None:
        for job in jobs:
            if len(job.fingerprint) != KEY_BYTES or len(job.key) != KEY_BYTES or job.length < 1:
                raise ValueError(f"malformed job for a block of {job.length} bytes")
            if job.offset < 0 or job.offset % _PAGE or job.offset + job.length > self._pool_bytes:
                raise ValueError(f"no slot of {job.length} bytes is at byte {job.offset} of the pool")

    # -- forgetting ---------------------------------------------------------------------------------------

    def forget(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> int:
        """See ``Tier``. The blocks are deleted for all nodes; another one may put them again."""
        ticket, gone, now = self._shared.ticket(), set(keys), self._clock()
        for key in gone:
            self._shared.presence.learn(fingerprint, key, False, now)
        self._writer.void(lambda job: job.fingerprint == fingerprint and job.key in gone)
        if self._process.alive and gone:
            self._process.ask(lambda _: self._shared.tell(Forgotten(ticket)), "delete", fingerprint, sorted(gone))
        else:
            self._shared.tell(Forgotten(ticket))
        return ticket

    def forget_namespace(self, fingerprint: bytes) -> int:
        """See ``Tier``. Until the store has deleted all of it, nothing of it is read or written from here."""
        ticket = self._shared.ticket()
        self._shared.presence.drop_namespace(fingerprint)
        self._shared.to_clear.setdefault(fingerprint, (Breaker(), []))[1].append(ticket)
        self._writer.void(lambda job: job.fingerprint == fingerprint)
        self._clear_some()
        return ticket

    def _clear_some(self) -> None:
        now, writing = self._clock(), self._writer.spaces()
        for fingerprint, (breaker, _) in self._shared.to_clear.items():
            # What is being written would be found afterwards.
            wait = fingerprint in writing or fingerprint in self._clearing or breaker.is_open(now)
            if not wait and self._process.alive:
                self._clearing.add(fingerprint)
                self._process.ask(self._cleared_of(fingerprint), "clear", fingerprint)

    def _cleared_of(self, fingerprint: bytes) -> Callable[[Reply], None]:
        def cleared(reply: Reply) -> None:
            self._clearing.discard(fingerprint)
            breaker, tickets = self._shared.to_clear[fingerprint]
            if not reply.ok:
                breaker.fail(reply.problem, self._clock())
                return
            del self._shared.to_clear[fingerprint]
            for ticket in tickets:
                self._shared.tell(Forgotten(ticket))

        return cleared

    def scrub(self, bytes_per_second: int) -> bool:  # noqa: ARG002
        """See ``Tier``. Whoever runs the store does that."""
        return False

    # -- the rest -----------------------------------------------------------------------------------------

    def poll(self) -> list[Event]:
        """See ``Tier``."""
        if not self._shared.closed:
            self._process.poll()
            self._look_after()
        state = self._state()
        if state != self._told:
            self._told = state
            self._shared.events.append(Changed(*state))
        events, self._shared.events = self._shared.events, []
        return events

    def _look_after(self) -> None:
        self._lookups.look_after()
        if not self._process.alive:
            return
        if self._shared.reading.due(self._clock()):
            # Not a request of an engine is to find out whether the store works again.
            nothing = bytes(KEY_BYTES)
            self._process.ask(self._probed, "exists", nothing, [nothing])
        self._clear_some()
        self._writer.pump()

    def _probed(self, reply: Reply) -> None:
        self._shared.judge(self._shared.reading, reply)

    def flush(self) -> bool:
        """See ``Tier``."""
        return self._process.flush()

    def _state(self) -> tuple[State, str]:
        shared = self._shared
        if shared.closed:
            return State.CLOSED, ""
        if not self._process.alive and not self._process.restarts:
            return State.STARTING, ""
        died = "" if self._process.alive else "its process died"
        uncleared = next((breaker.reason for breaker, _ in shared.to_clear.values() if breaker.reason), "")
        reason = shared.reading.reason or shared.writing.reason or died or uncleared
        return (State.DEGRADED, reason) if reason else (State.READY, "")

    def usage(self) -> Usage:
        """See ``Tier``. How much the store holds and may hold is its own affair: 0, and no limit."""
        state, reason = self._state()
        counters = self._shared.counters | {"restarts": self._process.restarts}
        return Usage(state, reason, NO_LIMIT, 0, 0, 0, self._writer.queued_bytes, self._process.pid, counters)

    def check(self) -> None:
        """See ``Tier``."""
        self._writer.check()

    def close(self, seconds: float) -> None:
        """See ``Tier``."""
        if self._shared.closed:
            return
        deadline = time.monotonic() + seconds
        while not self._writer.idle and self._process.alive and time.monotonic() < deadline:
            self._process.wait(min(0.05, deadline - time.monotonic()))
            self._process.poll()
            self._look_after()
        self._shared.closed = True
        self._process.close()
