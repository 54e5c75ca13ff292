"""Keeps one process connected: hello, register, heartbeat, and all of it again when the daemon comes back.

A thread with a socket of its own does this, so that an idle or busy owner stays registered. The owner reads
``Link`` snapshots, never waits for the thread, and uses its own ``Channel`` for everything else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpkv_client.address import Address
from hpkv_client.errors import HpkvError, NotRunning, UnknownSession, Unreachable
from hpkv_client.transport import Channel, require_socket
from hpkv_client.wire import PROTOCOL, Body

log = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""How long one request of the keeper may take before the daemon counts as down."""
_EAGER_SECONDS = 0.1
"""Pause between heartbeats until the engine is ready, and between attempts right after a loss."""
_LAZY_SECONDS = 2.0
_RETRY_SECONDS = 0.5
_GOODBYE_SECONDS = 0.5
_REFUSED_SECONDS = 30.0
"""Longest pause after a refusal (another version, an unknown layout): it will not change by asking often."""


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
    register); ``launch`` is called before the first attempt and may start a daemon. ``counters`` are the owner's
    own; they travel with each heartbeat, for operators. ``hand_over`` sends the registered memory's descriptors to a
    socket, when the daemon wants them; it is called by the thread.
    """

    def __init__(
        self,
        address: Address,
        hello: Body,
        register: Body | None = None,
        launch: Callable[[], None] | None = None,
        counters: Counter[str] | None = None,
        hand_over: Callable[[Path], None] | None = None,
    ) -> None:
        self._hand_over = hand_over
        self._address = address
        self._hello = {"major": PROTOCOL[0], "minor": PROTOCOL[1], **hello}
        self._registration = register
        self._launch = launch
        self._counters = Counter() if counters is None else counters
        self._link = Link()
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._stopping = False
        self._told = ""
        self._refusals = 0
        self.error: HpkvError | None = None
        """What the last attempt to connect met; None while connected."""
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
            self._counters["breaker_opened"] += 1
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
        channel = Channel(self._address)
        try:
            while not self._stopping:
                self._wake.wait(self._step(channel))
                self._wake.clear()
            if channel.session:
                # What was counted since the last heartbeat is told as well.
                channel.call("heartbeat", {"counters": dict(self._counters)}, _GOODBYE_SECONDS)
                channel.call("bye", {}, _GOODBYE_SECONDS)
        except HpkvError as problem:
            log.debug("goodbye failed: %s", problem)
        finally:
            channel.close()

    def _step(self, channel: Channel) -> float:
        try:
            self._prepare()
            if not channel.session:
                self._connect(channel)
            answer = channel.call("heartbeat", {"counters": dict(self._counters)}, ANSWER_SECONDS)
            link = Link(channel.session, answer["epoch"], True, answer["ready"], answer["problem"])
        except UnknownSession:
            channel.session = 0
            return 0.0
        except (Unreachable, NotRunning) as problem:
            self._lost(channel, problem)
            return _RETRY_SECONDS
        except HpkvError as problem:
            return self._refused(channel, problem)
        except Exception as bug:  # noqa: BLE001  (an engine must not lose its cache for good to one odd answer)
            return self._refused(channel, HpkvError(f"{type(bug).__name__}: {bug}", "report this"))
        self.error = None
        self._refusals = 0
        if link != self._link:
            self._tell(link)
            self._set(link)
        if wanted := answer.get("descriptors"):
            self._send_descriptors(wanted)
        return _LAZY_SECONDS if link.ready or (self._registration is None and link.problem) else _EAGER_SECONDS

    def _send_descriptors(self, socket_name: str) -> None:
        if self._hand_over is None or not isinstance(self._address, Path):
            return
        try:
            self._hand_over(self._address.with_name(socket_name))
        except Exception as problem:  # noqa: BLE001  (an engine must not lose its cache for good to one odd answer)
            # The mover was told, and so is the next heartbeat; or there is none, and it asks again.
            log.debug("descriptors were not handed over: %s", problem)

    def _prepare(self) -> None:
        if self._launch is not None:
            # Once: a daemon that an operator stops later stays stopped.
            launch, self._launch = self._launch, None
            launch()
        require_socket(self._address)

    def _connect(self, channel: Channel) -> None:
        answer = channel.call("hello", self._hello, ANSWER_SECONDS)
        channel.session = answer["session"]
        if self._registration is not None:
            try:
                channel.call("register", self._registration, ANSWER_SECONDS)
            except HpkvError:
                with contextlib.suppress(HpkvError):
                    channel.call("bye", {}, _GOODBYE_SECONDS)
                channel.session = 0
                raise

    def _refused(self, channel: Channel, problem: HpkvError) -> float:
        channel.session = 0
        self._lost(channel, problem)
        self._refusals += 1
        return float(min(_REFUSED_SECONDS, _RETRY_SECONDS * 2 ** min(self._refusals, 16)))

    def _lost(self, channel: Channel, problem: HpkvError) -> None:
        """Report it. The session is kept: a daemon that was only slow still knows it."""
        self.error = problem
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
