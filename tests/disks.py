"""A disk tier as tests need it: every block has bytes that belong to its key, and time passes when it is told to."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any, Self

from hpkv_client.memory import SharedMemory
from hpkv_client.types import typed_digest
from hpkv_daemon.tiers.base import BlockJob, Done, Event, Forgotten, Outcome, Recovered, State
from hpkv_daemon.tiers.disk.directory import StorageDirectory
from hpkv_daemon.tiers.disk.tier import DiskTier
from tests.support import content

MIB = 1 << 20
SPACE = typed_digest("test", "disk")
"""A namespace."""
BLOCK_BYTES = 64 << 10
SEGMENT_BYTES = MIB
POOL_BYTES = 16 * MIB


def name(number: object) -> bytes:
    """A block key."""
    return typed_digest("test", "block", str(number))


class Disk:
    """One directory, a pool, and the tier that is open on them. ``close`` it."""

    def __init__(self, path: Path, budget: int = 16 * MIB, **options: Any) -> None:
        self.path = path
        self.memory = SharedMemory(POOL_BYTES)
        self.skew = 0.0
        """Seconds that the tier's clock is ahead."""
        self.events: list[Event] = []
        self.block_bytes = BLOCK_BYTES
        self.tier = self._open(budget, options)

    def _open(self, budget: int, options: dict[str, Any]) -> DiskTier:
        self._budget, self._options = budget, options
        options = {"segment_bytes": SEGMENT_BYTES, "clock": lambda: time.monotonic() + self.skew} | options
        storage = StorageDirectory.open(self.path)
        self.events.clear()
        handle = self.memory.handle
        tier = DiskTier(storage, budget, handle.fd, handle.size, **options)
        tier.recover()
        return tier

    def __enter__(self) -> Self:
        return self.recovered()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the tier and drop the pool."""
        self.tier.close(5.0)
        self.memory.close()

    def reopen(self, budget: int = 0, kill: bool = False, **options: Any) -> Self:
        """End the tier, politely or not, and open another one on the same directory; wait until it is recovered."""
        if kill:
            self.kill()
        self.tier.close(0.0 if kill else 5.0)
        self.tier = self._open(budget or self._budget, options or self._options)
        return self.recovered()

    def recovered(self, seconds: float = 20.0) -> Self:
        """Wait until it knows everything that is there."""
        self.until(
            lambda: any(isinstance(each, Recovered) and each.done == each.total for each in self.events), seconds
        )
        return self

    def kill(self) -> None:
        """Kill its process."""
        with contextlib.suppress(ProcessLookupError):
            if pid := self.tier.usage().pid:
                os.kill(pid, SIGKILL)

    def pass_time(self, seconds: float) -> None:
        """Let so many seconds pass for the tier, in steps that a process has time to answer in."""
        process = self.tier._process
        for _ in range(int(seconds / 2) + 1):
            self.skew += 2
            self.until(lambda: not process.alive or process._clock() - process._heard < 1)
            self.until(lambda: not process.alive or not process._orders or self._busy_for() < 20)

    def _busy_for(self) -> float:
        return self.tier._process._clock() - self.tier._process._completed

    def poll(self) -> list[Event]:
        """Poll once; whatever happens, the budget holds."""
        events = list(self.tier.poll())
        usage = self.tier.usage()
        assert usage.used_bytes <= usage.budget_bytes
        self.events += events
        return events

    def until(self, condition: Callable[[], Any], seconds: float = 20.0, what: str = "") -> Any:
        """Serve the tier until the condition is true."""
        deadline = time.monotonic() + seconds
        while not (answer := condition()):
            assert time.monotonic() < deadline, f"{what or condition} after {seconds} s: {self.tier.usage()}"
            self.tier.flush()
            select.select([self.tier], [], [], 0.05)
            self.poll()
        return answer

    def done(self, ticket: int | None, seconds: float = 20.0) -> tuple[Outcome, ...]:
        """Wait for the end of a batch; its outcomes."""
        assert ticket is not None, "refused"

        def over() -> list[Event]:
            return [each for each in self.events if isinstance(each, Done) and each.ticket == ticket]

        done = self.until(over, seconds, f"no end of {ticket}")[0]
        assert isinstance(done, Done)
        return done.outcomes

    def is_durable(self, ticket: int) -> None:
        """Wait until what was to be forgotten is, for good."""
        self.until(lambda: Forgotten(ticket) in self.events, what="not forgotten")

    def jobs(self, numbers: Iterable[object], space: bytes = SPACE, first: int = 0) -> list[BlockJob]:
        """One job per number, in one slot after another from slot ``first``."""
        return [
            BlockJob(space, name(number), None, self.block_bytes, (first + slot) * self.block_bytes)
            for slot, number in enumerate(numbers)
        ]

    def ask_write(self, numbers: Iterable[object], space: bytes = SPACE, first: int = 0) -> int | None:
        """Fill slots and begin to write them."""
        jobs = self.jobs(numbers, space, first)
        for job in jobs:
            self.memory.mapping[job.offset : job.offset + job.length] = content(space + job.key, job.length)
        return self.tier.write(jobs)

    def write(self, numbers: Iterable[object], space: bytes = SPACE) -> tuple[Outcome, ...]:
        """Write blocks and wait for it."""
        return self.done(self.ask_write(numbers, space))

    def read(self, numbers: Sequence[object], space: bytes = SPACE) -> tuple[Outcome, ...]:
        """Read blocks; what is OK has the right bytes."""
        jobs = self.jobs(numbers, space)
        for job in jobs:
            self.memory.mapping[job.offset : job.offset + job.length] = bytes(job.length)
        outcomes = self.done(self.tier.read(jobs))
        for job, outcome in zip(jobs, outcomes, strict=True):
            if outcome is Outcome.OK:
                found = self.memory.mapping[job.offset : job.offset + job.length]
                assert found == content(space + job.key, job.length), "foreign bytes were served"
        return outcomes

    def has(self, numbers: Iterable[object], space: bytes = SPACE) -> list[bool]:
        """Which of these the tier says it has."""
        return self.tier.contains(space, [name(number) for number in numbers])

    def counter(self, which: str) -> int:
        """One of the tier's counters."""
        return self.tier.usage().counters[which]

    def state(self) -> State:
        """The tier's."""
        return self.tier.usage().state

    def on_disk(self) -> int:
        """Bytes that the segment files take."""
        return sum(file.stat().st_size for file in self.path.glob("segment-*.hpkv"))
