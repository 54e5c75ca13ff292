"""A tier that keeps nothing: what a daemon without storage has, so that nobody asks whether there is one."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpkv_client.types import BlockKey
from hpkv_daemon.tiers.base import COUNTERS, BlockJob, Event, Forgotten, Recovered, State, Usage


class NoopTier:
    """A ``Tier`` that refuses everything. Owns one descriptor, until ``close``."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events: list[Event] = []
        self._tickets = 0
        self._counters = dict.fromkeys(COUNTERS, 0)

    @property
    def largest_block(self) -> int:
        """See ``Tier``."""
        return 0

    def fileno(self) -> int:
        """See ``Tier``."""
        return self._fd

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        os.eventfd_write(self._fd, 1)

    def recover(self) -> None:
        """See ``Tier``."""
        self._tell(Recovered(0, 0, 0))

    def match(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> int:  # noqa: ARG002
        """See ``Tier``."""
        return 0

    def contains(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> list[bool]:  # noqa: ARG002
        """See ``Tier``."""
        return [False] * len(keys)

    def inquire(self, fingerprint: bytes, keys: Sequence[BlockKey], chain: bool) -> bool:  # noqa: ARG002
        """See ``Tier``: everything is known."""
        return False

    def touch(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> None:
        """See ``Tier``."""

    def write(self, jobs: Sequence[BlockJob]) -> int | None:
        """See ``Tier``."""
        self._counters["refused_writes"] += len(jobs)
        return None

    def read(self, jobs: Sequence[BlockJob]) -> int | None:
        """See ``Tier``."""
        self._counters["refused_reads"] += len(jobs)
        return None

    def forget(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> int:  # noqa: ARG002
        """See ``Tier``."""
        self._tickets += 1
        self._tell(Forgotten(self._tickets))
        return self._tickets

    def forget_namespace(self, fingerprint: bytes) -> int:
        """See ``Tier``."""
        return self.forget(fingerprint, ())

    def scrub(self, bytes_per_second: int) -> bool:  # noqa: ARG002
        """See ``Tier``."""
        return False

    def poll(self) -> list[Event]:
        """See ``Tier``."""
        if self._events:
            os.eventfd_read(self._fd)
        events, self._events = self._events, []
        return events

    def flush(self) -> bool:
        """See ``Tier``."""
        return True

    def usage(self) -> Usage:
        """See ``Tier``."""
        state = State.READY if self._fd >= 0 else State.CLOSED
        return Usage(state, "", 0, 0, 0, 0, 0, 0, dict(self._counters))

    def check(self) -> None:
        """See ``Tier``."""

    def close(self, seconds: float) -> None:  # noqa: ARG002
        """See ``Tier``."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
