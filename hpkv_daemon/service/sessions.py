"""Sessions: who is connected, and how their end is noticed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from hpkv_client.errors import UnknownSession


class Reactor(Protocol):
    """The part of an event loop that the service needs."""

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back whenever ``fd`` is readable."""

    def remove_reader(self, fd: int) -> object:
        """Stop that."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> object:
        """Call back once, in ``delay`` seconds."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The sender of a frame: its ZeroMQ identity and, from the kernel, its uid and pid.

    ``pid`` is 0 for a peer whose process this daemon cannot see (other PID namespace).
    """

    identity: bytes
    uid: int
    pid: int


@dataclass(slots=True)
class Session:
    """One connected rank or client. ``pidfd`` is -1 when only heartbeats tell that it lives."""

    token: int
    name: str
    engine: str
    uid: int
    pid: int
    pidfd: int
    started: float
    seen: float


class SessionTable:
    """All live sessions. Calls ``on_death`` with a session whose process ended."""

    def __init__(self, reactor: Reactor, on_death: Callable[[Session], None]) -> None:
        self._reactor = reactor
        self._on_death = on_death
        self._sessions: dict[int, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, peer: Peer, name: str, engine: str, now: float) -> Session:
        """A session for this peer; its process is watched from now on where it is visible."""
        token = secrets.randbits(62) | 1
        session = Session(token, name, engine, peer.uid, peer.pid, _pidfd(peer.pid), now, now)
        self._sessions[token] = session
        if session.pidfd >= 0:
            self._reactor.add_reader(session.pidfd, lambda: self._on_death(session))
        return session

    def get(self, token: int, uid: int, now: float) -> Session:
        """The session, marked as seen now. Raises ``UnknownSession``, also for another user's session."""
        session = self._sessions.get(token)
        if session is None or session.uid != uid:
            raise UnknownSession("unknown session", "say hello again")
        session.seen = now
        return session

    def close(self, session: Session) -> None:
        """Forget the session and stop watching its process."""
        if self._sessions.pop(session.token, None) and session.pidfd >= 0:
            self._reactor.remove_reader(session.pidfd)
            os.close(session.pidfd)

    def silent_since(self, moment: float) -> list[Session]:
        """Sessions that only heartbeats keep alive and that have sent nothing since ``moment``.

        A visible process is never judged by its silence: busy is not dead.
        """
        return [
            session for session in self._sessions.values() if session.pidfd < 0 and session.seen < moment
        ]


def _pidfd(pid: int) -> int:
    if pid <= 0:
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        # Gone already or not allowed: heartbeats decide.
        return -1
