"""A mover that copies nothing and succeeds at once: measures and tests the control path alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hpkv_daemon.movers.base import Alive, Attached, Attachment, CopyJob, Died, Done, Event, Outcome


class NoopMover:
    """A ``Mover`` without a device. Owns an eventfd; ``close`` it."""

    device = "noop"
    descriptor_socket = ""
    pid = 0

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events: list[Event] = []
        self._tickets = 0

    def fileno(self) -> int:
        """See ``Mover``."""
        return self._event

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        os.eventfd_write(self._event, 1)

    def attach(self, attachment: int, what: Attachment) -> None:  # noqa: ARG002
        """See ``Mover``."""
        self._tell(Attached(attachment, ""))

    def detach(self, attachment: int) -> None:
        """See ``Mover``."""

    def submit(self, job: CopyJob) -> int:  # noqa: ARG002
        """See ``Mover``."""
        self._tickets += 1
        self._tell(Done(self._tickets, Outcome.OK, "", 0, 0.0))
        return self._tickets

    def cancel(self, ticket: int) -> None:
        """See ``Mover``. Nothing is ever under way."""

    def flush(self) -> bool:
        """See ``Mover``."""
        return True

    def ping(self) -> None:
        """See ``Mover``."""
        self._tell(Alive())

    def poll(self) -> Iterator[Event]:
        """See ``Mover``."""
        if self._events:
            os.eventfd_read(self._event)
        events, self._events = self._events, []
        yield from events

    def kill(self) -> None:
        """See ``Mover``."""
        self._tell(Died("killed"))

    def close(self) -> None:
        """See ``Mover``."""
        os.close(self._event)

    def ended(self, timeout: float = 0.0) -> bool:  # noqa: ARG002
        """See ``Mover``."""
        return True
