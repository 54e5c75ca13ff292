"""Keeps one process connected: hello, register, heartbeat, and all of it again when the daemon comes back.

A thread with a socket of its own does this, so that an idle or busy owner stays registered. The owner reads
``Link`` snapshots, never waits for the thread, and uses its own ``Channel`` for everything else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpkv_client.errors import HpkvError, UnknownSession, VersionMismatch
from hpkv_client.transport import Channel, require_socket
from hpkv_client.wire import PROTOCOL, Body

log = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""How long one request of the keeper may take before the daemon counts as down."""
_EAGER_SECONDS = 0.1
"""Pause between heartbeats until the engine is ready, and between attempts right after a loss."""
_LAZY_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Link:
    """The state of the connection at one moment. ``usable``: blocks can be matched and moved."""

    session: int = 0
    epoch: str = ""
    up: bool = False
    ready: bool = False
    problem: str = ""

    @property
    def usable(self) -> bool:
        """Whether it makes sense to ask the daemon anything."""
        return self.up and self.ready


class SessionKeeper:
    """Owns the thread. ``start`` it, read ``link``, ``stop`` it.

    ``hello`` is the body of the hello; ``register`` makes the body of the registration (None: nothing to
    register); ``launch`` is called before the first attempt and may start a daemon.
    """

    def __init__(
        self,
        socket_path: Path,
        hello: Body,
        register: Body | None = None,
        launch: Callable[[], None] | None = None,
    ) -> None:
        self._path = socket_path
        self._hello = {"major": PROTOCOL[0], "minor": PROTOCOL[1], **hello}
        self._registration = register
        self._launch = launch
        self._link = Link()
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._stopping = False
        self._told = ""
        self._thread = threading.Thread(target=self._run, name="hpkv-session", daemon=True)

    @property
    def link(self) -> Link:
        """The latest state; cheap, from any thread."""
        return self._link

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def wait(self, timeout: float, condition: Callable[[Link], bool]) -> Link:
        """The first state that meets the condition, or the one after ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: condition(self._link), timeout)
        return self._link

    def suspect(self) -> None:
        """The owner got no answer in time: nothing is asked until the daemon has answered a heartbeat."""
        link = self._link
        if link.up:
            self._set(Link(link.session, link.epoch, up=False, ready=False, problem="no answer in time"))
        self._wake.set()

    def stop(self) -> None:
        """Say goodbye, if the daemon listens, and end the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(ANSWER_SECONDS + 1)

    def _set(self, link: Link) -> None:
        with self._changed:
            self._link = link
            self._changed.notify_all()

    def _run(self) -> None:
        channel = Channel(self._path)
        try:
            while not self._stopping:
                pause = self._step(channel)
                self._wake.wait(pause)
                self._wake.clear()
            if self._link.up:
                channel.send("bye", {})
                # One round trip flushes the goodbye before the socket closes.
                channel.call("ping", {}, 0.5)
        except HpkvError as problem:
            log.debug("goodbye failed: %s", problem)
        finally:
            channel.close()

    def _step(self, channel: Channel) -> float:
        try:
            if not channel.session:
                self._connect(channel)
            answer = channel.call("heartbeat", {}, ANSWER_SECONDS)
        except UnknownSession:
            channel.session = 0
            return 0.0
        except HpkvError as problem:
            self._lost(channel, problem)
            return _LAZY_SECONDS if isinstance(problem, VersionMismatch) else _EAGER_SECONDS * 5
        link = Link(channel.session, answer["epoch"], True, answer["ready"], answer["problem"])
        if link != self._link:
            self._tell(link)
            self._set(link)
        return _LAZY_SECONDS if link.ready or self._registration is None and link.problem else _EAGER_SECONDS

    def _connect(self, channel: Channel) -> None:
        if self._launch is not None:
            # Once: a daemon that an operator stops later stays stopped.
            launch, self._launch = self._launch, None
            launch()
        require_socket(self._path)
        answer = channel.call("hello", self._hello, ANSWER_SECONDS)
        channel.session = answer["session"]
        if self._registration is not None:
            try:
                channel.call("register", self._registration, ANSWER_SECONDS)
            except HpkvError:
                channel.send("bye", {})
                channel.session = 0
                raise

    def _lost(self, channel: Channel, problem: HpkvError) -> None:
        channel.session = 0
        channel.reset()
        link = Link(problem=str(problem))
        self._tell(link)
        self._set(link)

    def _tell(self, link: Link) -> None:
        """One line per change of state, not per attempt."""
        state = "ready" if link.usable else link.problem or ("connected" if link.up else "down")
        if state == self._told:
            return
        self._told = state
        if link.usable:
            log.info("HPKV: ready (daemon epoch %s)", link.epoch)
        elif link.problem:
            log.warning("HPKV: not caching: %s", link.problem)
