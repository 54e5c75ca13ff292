"""Sessions: who is connected, and how their end is noticed."""

from __future__ import annotations

import os
import secrets
import select
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from hpkv_client.errors import UnknownSession, UsageError


class Reactor(Protocol):
    """The part of an event loop that the service needs."""

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back whenever ``fd`` is readable."""

    def remove_reader(self, fd: int) -> object:
        """Stop that."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> object:
        """Call back once, in ``delay`` seconds."""


REMOTE_UID = -1
"""Stands for whoever holds the cluster's key on another node."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The sender of a frame: its ZeroMQ identity and, from the kernel, its uid and pid.

    ``pid`` is 0 for a peer whose process this daemon cannot see (other PID namespace). ``host`` is the address of
    another node, empty for a peer of this one.
    """

    identity: bytes
    uid: int
    pid: int
    host: str = ""


@dataclass(slots=True)
class Session:
    """One connected rank or client. ``watched``: the end of its process is noticed, else only heartbeats tell."""

    token: int
    name: str
    engine: str
    uid: int
    pid: int
    host: str
    watched: bool
    started: float
    seen: float
    counters: dict[str, int] = field(default_factory=dict)
    """What the peer counts, as of its last heartbeat."""


@dataclass(slots=True)
class _Process:
    """A process with sessions. ``pidfd`` is -1 where it is not visible."""

    pidfd: int
    sessions: dict[int, Session] = field(default_factory=dict)


class SessionTable:
    """All live sessions. Calls ``on_death`` with each session of a process that ended."""

    def __init__(self, reactor: Reactor, on_death: Callable[[Session], None]) -> None:
        self._reactor = reactor
        self._on_death = on_death
        self._sessions: dict[int, Session] = {}
        self._processes: dict[tuple[int, int, str], _Process] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def of_process(self, peer: Peer) -> list[Session]:
        """The sessions of the peer's process, longest silent first."""
        process = self._process_of(peer)
        return sorted(process.sessions.values(), key=lambda session: session.seen) if process else []

    def open(self, peer: Peer, name: str, engine: str, now: float) -> Session:
        """A session for this peer; its process is watched from now on where it is visible.

        Raises ``UsageError`` when it has ended before its hello was read.
        """
        process = self._process_of(peer) or self._watch(peer)
        token = secrets.randbits(62) | 1
        session = Session(token, name, engine, peer.uid, peer.pid, peer.host, process.pidfd >= 0, now, now)
        self._sessions[token] = process.sessions[token] = session
        return session

    def _process_of(self, peer: Peer) -> _Process | None:
        """What is known of the peer's process, not of an earlier one whose end is noticed only now."""
        process = self._processes.get((peer.uid, peer.pid, peer.host))
        if process is not None and process.pidfd >= 0 and _has_ended(process.pidfd):
            self._ended(process)
            return None
        return process

    def _watch(self, peer: Peer) -> _Process:
        process = self._processes[peer.uid, peer.pid, peer.host] = _Process(_pidfd(peer.pid))
        if process.pidfd >= 0:
            self._reactor.add_reader(process.pidfd, lambda: self._ended(process))
        return process

    def _ended(self, process: _Process) -> None:
        for session in list(process.sessions.values()):
            self._on_death(session)

    def get(self, token: int, uid: int, now: float) -> Session:
        """The session, marked as seen now. Raises ``UnknownSession``, also for another user's session."""
        session = self._sessions.get(token)
        if session is None or session.uid != uid:
            raise UnknownSession("unknown session", "say hello again")
        session.seen = now
        return session

    def close(self, session: Session) -> None:
        """Forget the session; the last one of a process ends the watch over it."""
        if self._sessions.pop(session.token, None) is None:
            return
        process = self._processes[session.uid, session.pid, session.host]
        del process.sessions[session.token]
        if process.sessions:
            return
        del self._processes[session.uid, session.pid, session.host]
        if process.pidfd >= 0:
            self._reactor.remove_reader(process.pidfd)
            os.close(process.pidfd)

    def check(self) -> None:
        """Raise ``AssertionError`` naming the first session that nobody watches as it should be."""
        watched = {token for process in self._processes.values() for token in process.sessions}
        assert watched == self._sessions.keys(), f"{len(self._sessions)} sessions, of which {len(watched)} are watched"
        for (uid, pid, _), process in self._processes.items():
            assert process.sessions, f"process {pid} of uid {uid} is watched for no session"
            assert process.pidfd < 0 or os.path.exists(f"/proc/self/fd/{process.pidfd}"), (
                f"process {pid}: lost its pidfd"
            )

    def silent_since(self, moment: float) -> list[Session]:
        """Sessions that only heartbeats keep alive and that have sent nothing since ``moment``.

        A visible process is never judged by its silence: busy is not dead.
        """
        return [session for session in self._sessions.values() if not session.watched and session.seen < moment]


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _pidfd(pid: int) -> int:
    if pid <= 0:
        return -1
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise UsageError(f"process {pid} is gone") from None
    except OSError:
        # Not allowed, or no descriptor left: heartbeats decide.
        return -1
