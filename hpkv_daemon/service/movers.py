"""The movers of a node: started with the first rank of a device, ended with the last, replaced when they die."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from hpkv_client.errors import Busy, NoSuchDevice
from hpkv_daemon.movers.base import Attached, Attachment, CopyJob, Died, Done, Locked, Mover, Notice, Outcome
from hpkv_daemon.movers.cuda.mover import PREFIX, uuid_of
from hpkv_daemon.service.sessions import Reactor

log = logging.getLogger(__name__)

CONFIRM_SECONDS = 1.5
"""A mover that does not confirm a cancelled copy within this time is frozen: it is killed."""
ANSWER_SECONDS = 5.0
"""So is one that says nothing for so long though it is asked to, whether it copies or idles."""
START_SECONDS = 30.0
"""Until it has spoken for the first time: an interpreter on a busy machine takes its time to start."""
RESTART_SECONDS = 1.0
_PING_SECONDS = 1.0
_EXIT_SECONDS = 1.0

OnDone = Callable[[Done], None]
OnAttached = Callable[[Attached], None]


@dataclass(slots=True)
class _Device:
    mover: Mover
    deadline: float
    """When the mover counts as frozen unless it is heard of."""
    next_ping: float
    started: bool = False
    """It has been heard of."""
    condemned: str = ""
    """Why it is being killed, if it is."""
    attachments: dict[int, tuple[Attachment, OnAttached]] = field(default_factory=dict)
    unanswered: set[int] = field(default_factory=set)
    """Attachments of which the mover has not said yet whether they are mapped."""
    jobs: dict[int, OnDone] = field(default_factory=dict)
    cancelled: dict[int, float] = field(default_factory=dict)
    """Ticket -> when it was cancelled."""
    alive: bool = True
    locked_bytes: int = 0
    """Page-locked bytes of the pool."""


class Movers:
    """Routes copies to devices and events back.

    ``factories``: device name -> constructor; ``gpus`` makes the mover of a ``cuda:UUID``, None where none is wanted.
    ``clock`` must stand still while this process is stopped: movers answer, but nobody listens.
    """

    def __init__(
        self,
        factories: dict[str, Callable[[], Mover]],
        reactor: Reactor,
        clock: Callable[[], float],
        gpus: Callable[[str], Mover] | None = None,
    ) -> None:
        self._factories = factories
        self._gpus = gpus
        self._reactor = reactor
        self._clock = clock
        self._devices: dict[str, _Device] = {}
        self._ending: list[Mover] = []
        self._home: dict[int, str] = {}
        self._numbers = 0
        self.restarts = 0

    def require(self, device: str) -> None:
        """Raise ``NoSuchDevice`` unless this node has movers for the device.

        Whether a GPU is here its mover finds out: this process never talks to the driver.
        """
        if self._gpus is not None and device.startswith(PREFIX):
            uuid_of(device)
        elif device not in self._factories:
            known = ", ".join(sorted(self._factories)) + (f", {PREFIX}UUID" if self._gpus else "")
            raise NoSuchDevice(f"no mover for device {device[:64]!r} on this node (there is: {known})")

    def attach(self, device: str, what: Attachment, on_attached: OnAttached) -> int:
        """Map a rank's memory; the number of the attachment. Raises ``Busy`` when the mover cannot be started now."""
        self.require(device)
        state = self._devices.get(device)
        if state is None:
            try:
                state = self._devices[device] = self._start(device)
            except OSError as problem:
                raise Busy(f"mover {device} does not start: {problem}", "register again later") from None
        self._numbers += 1
        number = self._numbers
        self._home[number] = device
        state.attachments[number] = (what, on_attached)
        if state.alive:
            state.mover.attach(number, what)
            state.unanswered.add(number)
        return number

    def descriptor_socket(self, number: int) -> str:
        """Where the mover waits for descriptors of an attachment that is not mapped yet; empty if it does not wait."""
        state = self._devices.get(self._home.get(number, ""))
        return state.mover.descriptor_socket if state and number in state.unanswered else ""

    def detach(self, number: int) -> None:
        """Unmap it; running jobs of it end as VOID. The last one ends the mover."""
        device = self._home.pop(number, None)
        if device is None:
            return
        state = self._devices[device]
        del state.attachments[number]
        state.unanswered.discard(number)
        if state.alive:
            state.mover.detach(number)
            if state.started:
                # The owner wants its memory back: a mover that is frozen now must go soon.
                state.mover.ping()
                state.deadline = min(state.deadline, self._clock() + CONFIRM_SECONDS)
        self._end_if_idle(device)

    def submit(self, job: CopyJob, on_done: OnDone) -> int | None:
        """Queue a copy; its ticket, or None when the device's mover is not there right now."""
        state = self._devices[self._home[job.attachment]]
        if not state.alive or state.condemned:
            return None
        ticket = state.mover.submit(job)
        state.jobs[ticket] = on_done
        return ticket

    def cancel(self, device: str, ticket: int) -> None:
        """Ask for an early end of a copy; ``on_done`` of the job is the confirmation."""
        state = self._devices.get(device)
        if state and state.alive and ticket in state.jobs and ticket not in state.cancelled:
            state.cancelled[ticket] = self._clock()
            state.mover.cancel(ticket)

    def check(self, attachments: set[int]) -> None:
        """Raise ``AssertionError`` unless exactly these attachments are kept, by movers whose processes are ours."""
        kept = {number for state in self._devices.values() for number in state.attachments}
        assert kept == self._home.keys() == attachments, f"ranks hold {attachments}, movers {kept}"
        for name, state in self._devices.items():
            assert state.attachments or state.jobs or not state.alive, f"mover {name} serves nobody"

    def describe(self) -> list[dict[str, object]]:
        """Device, pid, queued jobs and page-locked bytes of each mover."""
        return [
            {
                "device": name,
                "pid": state.mover.pid,
                "jobs": len(state.jobs),
                "page_locked_bytes": state.locked_bytes,
            }
            for name, state in self._devices.items()
        ]

    def tick(self) -> None:
        """Kill movers that do not confirm or answer; push out what their sockets did not take."""
        now = self._clock()
        self._ending = [mover for mover in self._ending if not mover.ended()]
        for state in self._devices.values():
            if not state.alive:
                continue
            state.mover.flush()
            if now >= state.next_ping:
                state.next_ping = now + _PING_SECONDS
                state.mover.ping()
            if any(now - since > CONFIRM_SECONDS for since in state.cancelled.values()):
                self._kill(state, "it did not confirm a cancelled copy")
            elif now > state.deadline:
                self._kill(state, "it did not answer")

    def _kill(self, state: _Device, why: str) -> None:
        if not state.condemned:
            log.warning("mover %s (pid %d) is frozen: %s", state.mover.device, state.mover.pid, why)
            state.condemned = why
            state.mover.kill()

    def close(self) -> None:
        """End all movers."""
        for state in self._devices.values():
            if state.alive:
                self._retire(state)
        self._devices.clear()
        for mover in self._ending:
            mover.ended(_EXIT_SECONDS)

    def _retire(self, state: _Device) -> None:
        self._reactor.remove_reader(state.mover.fileno())
        state.mover.close()
        self._ending.append(state.mover)

    def _start(self, device: str) -> _Device:
        if self._gpus is not None and device.startswith(PREFIX):
            mover = self._gpus(device)
        else:
            mover = self._factories[device]()
        self._reactor.add_reader(mover.fileno(), lambda: self._poll(device))
        log.info("mover %s started, pid %d", device, mover.pid)
        now = self._clock()
        return _Device(mover, now + START_SECONDS, now + _PING_SECONDS)

    def _poll(self, device: str) -> None:
        state = self._devices.get(device)
        if state is None or not state.alive:
            return
        for event in state.mover.poll():
            state.started, state.deadline = True, self._clock() + ANSWER_SECONDS
            if isinstance(event, Done):
                state.cancelled.pop(event.ticket, None)
                on_done = state.jobs.pop(event.ticket, None)
                if on_done is not None:
                    on_done(event)
            elif isinstance(event, Attached):
                state.unanswered.discard(event.attachment)
                if event.attachment in state.attachments:
                    state.attachments[event.attachment][1](event)
            elif isinstance(event, Locked):
                state.locked_bytes = event.bytes
            elif isinstance(event, Notice):
                log.warning("mover %s: %s", device, event.text)
            elif isinstance(event, Died):
                self._fail(device, state, state.condemned or event.reason)
                return
        self._end_if_idle(device)

    def _fail(self, device: str, state: _Device, reason: str) -> None:
        """The process and its mappings are gone: every job of it failed, every rank must be mapped anew."""
        if not state.alive:
            return
        state.alive = False
        self._retire(state)
        jobs, state.jobs = state.jobs, {}
        state.cancelled.clear()
        state.unanswered.clear()
        for ticket, on_done in jobs.items():
            on_done(Done(ticket, Outcome.FAILED, f"mover {device} ended: {reason}", 0, 0.0))
        for number, (_, on_attached) in list(state.attachments.items()):
            on_attached(Attached(number, f"mover {device} ended: {reason}"))
        if not state.attachments:
            self._devices.pop(device, None)
            return
        self.restarts += 1
        log.warning("mover %s ended (%s), starting another", device, reason)
        self._reactor.call_later(RESTART_SECONDS, lambda: self._restart(device, state))

    def _restart(self, device: str, state: _Device) -> None:
        if self._devices.get(device) is not state or state.alive:
            return
        if not state.attachments:
            del self._devices[device]
            return
        try:
            fresh = self._start(device)
        except OSError as problem:
            log.warning("mover %s does not start: %s", device, problem)
            self._reactor.call_later(RESTART_SECONDS, lambda: self._restart(device, state))
            return
        fresh.attachments = state.attachments
        self._devices[device] = fresh
        for number, (what, _) in fresh.attachments.items():
            fresh.mover.attach(number, what)
            fresh.unanswered.add(number)

    def _end_if_idle(self, device: str) -> None:
        state = self._devices.get(device)
        if state is None or state.attachments or state.jobs:
            return
        del self._devices[device]
        if state.alive:
            self._retire(state)
            log.info("mover %s ended with its last rank", device)
