"""The disk tier as the control loop sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from hpkv_client.types import KEY_BYTES, BlockKey
from hpkv_daemon.tiers.base import BlockJob, Changed, Direction, Event, Forgotten, Outcome, State, Usage
from hpkv_daemon.tiers.disk import directory
from hpkv_daemon.tiers.disk.directory import StorageDirectory
from hpkv_daemon.tiers.disk.format import PAGE, Kind, Record, aligned, footer_bytes
from hpkv_daemon.tiers.disk.index import DiskIndex
from hpkv_daemon.tiers.disk.recovery import Recovery
from hpkv_daemon.tiers.disk.scrub import STEP_RECORDS, Scrub
from hpkv_daemon.tiers.disk.shared import Batch, Item, Shared, place_of
from hpkv_daemon.tiers.disk.table import Segment
from hpkv_daemon.tiers.disk.writer import Writer
from hpkv_daemon.tiers.host import Reply, TierProcess

QUEUE_BYTES = 256 << 20
"""Payloads of writes that may be on their way, and as much of reads: each holds a slot of the pool."""
READERS = 3
LIMIT_SECONDS = 60.0
"""So long after the file system was full, it is tried whether the budget fits again."""


class DiskTier:
    """A ``Tier`` in one directory. Owns the process, and the directory from the constructor until ``close``.

    The pool's descriptor is inherited by the process, not kept here. ``budget_bytes``: see ``StorageDirectory.budget``;
    ``segment_bytes``: by default as ``directory.segment_bytes`` says. ``clock`` must stand still while the daemon is
    stopped. Not thread-safe.
    """

    def __init__(
        self,
        storage: StorageDirectory,
        budget_bytes: int,
        pool_fd: int,
        pool_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        faults: str = "",
        segment_bytes: int | None = None,
        queue_bytes: int = QUEUE_BYTES,
        readers: int = READERS,
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._pool_bytes = pool_bytes
        self._queue_bytes = queue_bytes
        self._index = DiskIndex(budget_bytes, segment_bytes or directory.segment_bytes(budget_bytes))
        arguments = [pool_fd, pool_bytes, faults, storage.path, storage.identity.hex(), readers]
        self._process = TierProcess(
            "hpkv_daemon.tiers.disk.process",
            "disk",
            [str(argument) for argument in arguments],
            (pool_fd, storage.fileno()),
            self._process_began,
            self._process_ended,
            clock,
        )
        self._shared = Shared(self._index, self._process, clock)
        self._writer = Writer(self._shared)
        self._recovery = Recovery(self._shared, lambda: self._writer.enable(True))
        self._scrub: Scrub | None = None
        self._reading_bytes = 0
        self._early: list[Callable[[], None]] = []
        """What was to be forgotten before it was known what is there."""
        self._limit_until = clock()
        self._told = (State.STARTING, "")
        self._closed = False

    @property
    def largest_block(self) -> int:
        """See ``Tier``: one segment must hold it."""
        return (self._index.segment_bytes - 2 * PAGE - footer_bytes(1)) // PAGE * PAGE

    def fileno(self) -> int:
        """See ``Tier``."""
        return self._process.fileno()

    def recover(self) -> None:
        """See ``Tier``."""
        self._process.start()

    # -- look-ups -----------------------------------------------------------------------------------------

    def match(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> int:
        """See ``Tier``."""
        return self._index.match(fingerprint, keys)

    def contains(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> list[bool]:
        """See ``Tier``."""
        return self._index.contains(fingerprint, keys)

    def inquire(self, fingerprint: bytes, keys: Sequence[BlockKey], chain: bool) -> bool:  # noqa: ARG002
        """See ``Tier``: everything is known."""
        return False

    def touch(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> None:
        """See ``Tier``."""
        self._index.touch(fingerprint, keys, self._shared.tick())

    def inventory(self) -> Iterator[list[tuple[bytes, BlockKey, int]]]:
        """See ``Inventory``: the oldest segments first."""
        for segment in sorted(self._index.segments.values(), key=lambda segment: segment.life):
            for first in range(0, segment.records, STEP_RECORDS):
                if self._index.segments.get(segment.number) is segment:
                    live = self._index.live(segment, first, STEP_RECORDS)
                    yield [(record.fingerprint, record.key, record.length) for record in live]

    # -- blocks -------------------------------------------------------------------------------------------

    def write(self, jobs: Sequence[BlockJob]) -> int | None:
        """See ``Tier``. Refused are batches that do not fit into the queue, and all while the tier is DEGRADED."""
        self._check_jobs(jobs)
        size = sum(job.length for job in jobs)
        fits = self._writer.queued_bytes + size <= self._queue_bytes
        small = all(job.length <= self.largest_block for job in jobs)
        if not fits or not small or self._shared.health.reason or self._closed or not jobs:
            self._shared.counters["refused_writes"] += len(jobs)
            return None
        batch = self._shared.batch(Direction.WRITE, [job.length for job in jobs])
        for number, job in enumerate(jobs):
            self._put(batch, number, job)
        self._go_on()
        return batch.ticket

    def _go_on(self) -> None:
        self._writer.pump()
        if self._shared.events:
            self._process.wake()

    def _put(self, batch: Batch, number: int, job: BlockJob) -> None:
        def end(outcome: Outcome, problem: str) -> None:
            batch.end(number, outcome, problem)

        if self._index.find(job.fingerprint, job.key) is not None:
            end(Outcome.OK, "")
            return
        item = self._writer.on_its_way(job.fingerprint, job.key)
        if item is not None:
            item.ends.append(end)
            return
        parent = job.parent or b""
        self._writer.put(Item(Kind.BLOCK, job.fingerprint, job.key, parent, job.length, job.offset, ends=[end]))

    def read(self, jobs: Sequence[BlockJob]) -> int | None:
        """See ``Tier``. Refused are batches that do not fit into the queue, and all while there is no process."""
        self._check_jobs(jobs)
        size = sum(job.length for job in jobs)
        fits = self._reading_bytes + size <= self._queue_bytes
        if not fits or not self._recovery.settled or self._closed or not jobs:
            self._shared.counters["refused_reads"] += len(jobs)
            return None
        batch = self._shared.batch(Direction.READ, [job.length for job in jobs])
        found: list[tuple[int, Segment, Record, int]] = []
        for number, job in enumerate(jobs):
            known = self._index.find(job.fingerprint, job.key)
            if known is None or known[1].length != job.length:
                self._shared.counters["failed_reads"] += 1
                batch.end(number, Outcome.MISSING, "the block is not here")
            else:
                found.append((number, *known, job.offset))
        if found:
            self._order_read(batch, found)
        else:
            self._process.wake()
        return batch.ticket

    def _order_read(self, batch: Batch, found: list[tuple[int, Segment, Record, int]]) -> None:
        tick = self._shared.tick()
        for _, segment, record, _ in found:
            segment.pins += 1
            self._reading_bytes += record.length
            self._index.touch(record.fingerprint, (record.key,), tick)
        self._process.ask(
            lambda reply: self._have_read(batch, found, reply),
            "read",
            [(place_of(segment), record, offset) for _, segment, record, offset in found],
        )

    def _have_read(self, batch: Batch, found: list[tuple[int, Segment, Record, int]], reply: Reply) -> None:
        outcomes = reply.outcomes if len(reply.outcomes) == len(found) else reply.outcomes[:1] * len(found)
        counters = self._shared.counters
        for (number, segment, record, _), outcome in zip(found, outcomes, strict=True):
            segment.pins -= 1
            self._reading_bytes -= record.length
            if outcome is Outcome.OK:
                counters["read_blocks"] += 1
                counters["read_bytes"] += record.length
            else:
                counters["failed_reads"] += 1
            known = self._index.find(record.fingerprint, record.key)
            if outcome is Outcome.BAD and known == (segment, record):
                counters["bad_records"] += 1
                self._index.drop(record.fingerprint, record.key)
            batch.end(number, outcome, "" if outcome is Outcome.OK else reply.problem)
        self._writer.eviction.look_after()

    def _check_jobs(self, jobs: Sequence[BlockJob]) -> None:
        for job in jobs:
            names = (job.fingerprint, job.key, job.parent or job.key)
            if any(len(name) != KEY_BYTES for name in names) or job.length < 1:
                raise ValueError(f"malformed job for a block of {job.length} bytes")
            if job.offset < 0 or job.offset % PAGE or job.offset + aligned(job.length) > self._pool_bytes:
                raise ValueError(f"no slot of {job.length} bytes is at byte {job.offset} of the pool")
            if self._index.length(job.fingerprint) not in (None, job.length):
                raise ValueError(f"blocks of this namespace do not have {job.length} bytes")

    # -- forgetting ---------------------------------------------------------------------------------------

    def forget(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> int:
        """See ``Tier``. Each key takes 4 KiB on the disk until what it forgets is evicted."""
        ticket = self._shared.ticket()
        left = set(keys)

        def begin() -> None:
            before = self._index.next_sequence()
            if not left:
                self._shared.tell(Forgotten(ticket))
            for key in list(left):
                self._shared.counters["forgotten_blocks"] += self._index.drop(fingerprint, key)
                self._index.forget_until_recovered(fingerprint, key, before)
                self._bury(Kind.FORGET_KEY, fingerprint, key, before, lambda key=key: written(key))  # type: ignore[misc]
            self._go_on()

        def written(key: BlockKey) -> None:
            left.discard(key)
            if not left:
                self._shared.tell(Forgotten(ticket))

        for key in left:
            self._writer.void(fingerprint, key)
        self._when_settled(begin)
        return ticket

    def forget_namespace(self, fingerprint: bytes) -> int:
        """See ``Tier``."""
        ticket = self._shared.ticket()

        def begin() -> None:
            before = self._index.next_sequence()
            self._shared.counters["forgotten_blocks"] += self._index.drop_namespace(fingerprint, before)
            told = Forgotten(ticket)
            self._bury(Kind.FORGET_NAMESPACE, fingerprint, fingerprint, before, lambda: self._shared.tell(told))
            self._go_on()

        self._writer.void(fingerprint)
        self._when_settled(begin)
        return ticket

    def _when_settled(self, begin: Callable[[], None]) -> None:
        """Sequences are known only when the files are; before that nothing can be found either."""
        if self._recovery.known:
            begin()
        else:
            self._early.append(begin)

    def _bury(self, kind: Kind, fingerprint: bytes, key: bytes, before: int, then: Callable[[], None]) -> None:
        item = Item(kind, fingerprint, key, before=before)
        item.ends.append(lambda _outcome, _problem: then())
        self._writer.put(item)

    # -- the process --------------------------------------------------------------------------------------

    def _process_began(self) -> None:
        self._recovery.begin()

    def _process_ended(self) -> None:
        self._writer.enable(False)
        self._writer.eviction.process_ended()
        self._recovery.process_ended()

    def scrub(self, bytes_per_second: int) -> bool:
        """See ``Tier``."""
        if self._scrub is not None or not self._recovery.over:
            return False
        self._scrub = Scrub(self._shared, bytes_per_second)
        return True

    def poll(self) -> list[Event]:
        """See ``Tier``."""
        if not self._closed:
            self._process.poll()
            self._look_after()
        state = self._state()
        if state != self._told:
            self._told = state
            self._shared.tell(Changed(*state))
        events, self._shared.events = self._shared.events, []
        return events

    def _look_after(self) -> None:
        now = self._clock()
        self._index.tidy()
        if self._recovery.known:
            early, self._early = self._early, []
            for begin in early:
                begin()
        if self._index.limit_bytes < self._index.budget_bytes and now - self._limit_until > LIMIT_SECONDS:
            self._limit_until = now
            self._index.limit_bytes = self._index.budget_bytes
        if not self._process.alive:
            return
        if self._shared.health.due(now):
            if self._recovery.settled:
                self._writer.probe()
            else:
                self._recovery.begin()
        if self._recovery.settled:
            self._writer.eviction.look_after()
            self._writer.pump()
            if self._scrub is not None:
                self._scrub.go_on()
                self._scrub = None if self._scrub.over else self._scrub

    def flush(self) -> bool:
        """See ``Tier``."""
        return self._process.flush()

    def _state(self) -> tuple[State, str]:
        if self._closed:
            return State.CLOSED, ""
        if self._shared.health.reason:
            return State.DEGRADED, self._shared.health.reason
        if not self._recovery.known:
            return State.STARTING, ""
        return (State.READY if self._recovery.over else State.RECOVERING), ""

    def usage(self) -> Usage:
        """See ``Tier``."""
        state, reason = self._state()
        index, counters = self._index, self._shared.counters | {"restarts": self._process.restarts}
        queued, pid = self._writer.queued_bytes, self._process.pid
        sizes = (index.budget_bytes, index.used_bytes, index.live_bytes, index.blocks)
        return Usage(state, reason, *sizes, queued, pid, counters)

    def check(self) -> None:
        """See ``Tier``."""
        self._index.check()

    def close(self, seconds: float) -> None:
        """See ``Tier``. A segment that could be closed properly is not read in full by the next recovery."""
        if self._closed:
            return
        deadline = time.monotonic() + seconds
        while not self._writer.idle and self._process.alive and time.monotonic() < deadline:
            self._process.wait(min(0.05, deadline - time.monotonic()))
            self._process.poll()
            self._look_after()
        if self._process.alive and self._index.open is not None and self._recovery.settled:
            self._seal_and_wait(deadline)
        self._closed = True
        self._process.close()
        self._storage.close()

    def _seal_and_wait(self, deadline: float) -> None:
        replies: list[Reply] = []
        self._process.ask(replies.append, "seal", place_of(self._index.seal()))
        while not replies and self._process.alive and time.monotonic() < deadline:
            self._process.wait(min(0.05, deadline - time.monotonic()))
            self._process.poll()
