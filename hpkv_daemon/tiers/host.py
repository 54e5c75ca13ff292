"""The daemon's side of a tier's process: starts it, carries orders and replies, replaces it when it dies or is mute."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hpkv_daemon.link import Link
from hpkv_daemon.tiers.base import Outcome

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""A process that says nothing for so long though it is asked to is killed and replaced."""
START_SECONDS = 30.0
"""Until it has spoken for the first time: an interpreter on a busy machine takes its time to start."""
STUCK_SECONDS = 60.0
"""So is one that completes nothing for so long though it has orders: its medium does not answer."""
FIRST_RESTART_SECONDS = 0.5
LAST_RESTART_SECONDS = 60.0
STEADY_SECONDS = 120.0
"""One that lived for so long is replaced as fast as the first one."""

_PING_SECONDS = 1.0
_EXIT_SECONDS = 0.1

OnReply = Callable[["Reply"], None]
OnFound = Callable[[list[Any]], None]


@dataclass(frozen=True, slots=True)
class Reply:
    """How an order ended: an outcome for each of its blocks, or one for all of it. ``result`` depends on the verb."""

    outcomes: tuple[Outcome, ...]
    problem: str
    result: Any

    @property
    def ok(self) -> bool:
        """Whether all went well."""
        return all(outcome is Outcome.OK for outcome in self.outcomes)

    @property
    def outcome(self) -> Outcome:
        """The first that was not OK, else OK."""
        return next((outcome for outcome in self.outcomes if outcome is not Outcome.OK), Outcome.OK)


@dataclass(frozen=True, slots=True)
class _Order:
    verb: str
    on_reply: OnReply
    on_found: OnFound | None


class TierProcess:
    """One process at a time. Not thread-safe: the control loop is its only user.

    It runs ``module``, and is called ``name`` in the log. ``arguments`` are those of the module after the link,
    ``fds`` what it inherits. ``on_start`` is called for each
    process, before it can have answered anything, ``on_end`` when it is gone, and with it every transfer that it did:
    then every order that is left is replied to with ``DIED``. ``clock`` must stand still while the daemon is stopped.
    """

    def __init__(
        self,
        module: str,
        name: str,
        arguments: list[str],
        fds: Iterable[int],
        on_start: Callable[[], None],
        on_end: Callable[[], None],
        clock: Callable[[], float],
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        self._module = module
        self._name = name
        self._stuck_seconds = stuck_seconds
        self._arguments = arguments
        self._fds = tuple(fds)
        self._on_start = on_start
        self._on_end = on_end
        self._clock = clock
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._child: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._orders: dict[int, _Order] = {}
        self._tickets = 0
        self._began = self._heard = self._completed = self._pinged = 0.0
        self._speaks = False
        self._restart_at = 0.0
        self._restart_seconds = FIRST_RESTART_SECONDS
        self._closed = False
        self.restarts = 0

    @property
    def pid(self) -> int:
        """Of the process, 0 if there is none."""
        return self._child.pid if self._child and self._link else 0

    @property
    def alive(self) -> bool:
        """Whether orders have somewhere to go."""
        return self._link is not None

    def fileno(self) -> int:
        """Becomes readable when ``poll`` has something to do; the same for every process."""
        return self._epoll.fileno()

    def start(self) -> None:
        """Start a process; if that fails it is tried again by ``poll``."""
        now = self._clock()
        if self._child is not None and self._child.poll() is None:
            # The one before is killed and has let go of everything; the kernel is not done with it yet.
            self._plan_restart(now)
            return
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", self._module, str(theirs.fileno())]
        try:
            self._child = subprocess.Popen(
                command + self._arguments, pass_fds=(theirs.fileno(), *self._fds), stdin=subprocess.DEVNULL
            )
        except OSError as problem:
            ours.close()
            log.warning("the %s process does not start: %s", self._name, problem)
            self._plan_restart(now)
            return
        finally:
            theirs.close()
        self._link = Link(ours)
        self._epoll.register(ours.fileno(), select.EPOLLIN)
        self._began = self._heard = self._completed = self._pinged = now
        self._speaks = False
        self._on_start()

    def ask(self, on_reply: OnReply, verb: str, *fields: Any, on_found: OnFound | None = None) -> None:
        """Give an order; must not be called while there is no process."""
        assert self._link is not None
        if not self._orders:
            self._completed = self._clock()
        self._tickets += 1
        self._orders[self._tickets] = _Order(verb, on_reply, on_found)
        self._link.send([verb, self._tickets, *fields])

    def flush(self) -> bool:
        """Send what was not taken yet; True when nothing is left."""
        return self._link.flush() if self._link else True

    def wake(self) -> None:
        """Make ``fileno`` readable until the next ``poll``."""
        os.eventfd_write(self._wake, 1)

    def poll(self) -> None:
        """Handle what has come, and see to a process that is dead, mute or missing."""
        if self._closed:
            return
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if self._link is None:
            if self._clock() >= self._restart_at:
                self.restarts += 1
                self.start()
            return
        for message in self._link.receive():
            self._handle(*message)
        if self._link.closed:
            self._bury()
        else:
            self._look_after()

    def _handle(self, verb: str, ticket: int, *rest: Any) -> None:
        self._heard = self._clock()
        self._speaks = True
        if verb == "note":
            log.warning("the %s process: %s", self._name, rest[0])
        elif verb == "found":
            self._completed = self._heard
            order = self._orders.get(ticket)
            if order is not None and order.on_found is not None:
                order.on_found(rest[0])
            assert self._link is not None
            self._link.send(["more", 0])
        elif verb == "done":
            self._completed = self._heard
            outcomes, problem, result = rest
            reply = Reply(tuple(Outcome(outcome) for outcome in outcomes), problem, result)
            self._orders.pop(ticket).on_reply(reply)

    def _look_after(self) -> None:
        assert self._link is not None
        assert self._child is not None
        now = self._clock()
        patience = ANSWER_SECONDS if self._speaks else START_SECONDS
        stuck = self._orders and now - self._completed > self._stuck_seconds
        if now - self._heard > patience or stuck:
            what = "completes nothing" if stuck else "does not answer"
            log.warning("the %s process %s: it is killed", self._name, what)
            self._child.kill()
            self._heard = self._completed = now
        elif now - self._pinged > _PING_SECONDS:
            self._pinged = now
            self._link.send(["ping", 0])

    def _bury(self) -> None:
        assert self._link is not None
        assert self._child is not None
        # The kernel closes its descriptors after the last thread, and the last transfer of it, has ended.
        self._epoll.unregister(self._link.fileno())
        self._link.close()
        self._child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_EXIT_SECONDS)
        log.warning("the %s process ended (exit status %s)", self._name, self._child.returncode)
        self._link = None
        now = self._clock()
        if now - self._began > STEADY_SECONDS:
            self._restart_seconds = FIRST_RESTART_SECONDS
        self._plan_restart(now)
        self._on_end()
        orders, self._orders = self._orders, {}
        for order in orders.values():
            order.on_reply(Reply((Outcome.DIED,), f"the {self._name} process died", None))

    def _plan_restart(self, now: float) -> None:
        self._restart_at = now + self._restart_seconds
        self._restart_seconds = min(LAST_RESTART_SECONDS, self._restart_seconds * 2)

    def wait(self, seconds: float) -> None:
        """Wait at most so long until the process has said something, or took something."""
        if self._link is not None:
            events = select.POLLIN if self._link.flush() else select.POLLIN | select.POLLOUT
            poller = select.poll()
            poller.register(self._link, events)
            poller.poll(max(0.0, seconds) * 1000)

    def close(self) -> None:
        """End the process and wait until it is gone. No order is replied to any more. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._orders.clear()
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._epoll.close()
        os.close(self._wake)
