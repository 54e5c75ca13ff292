"""A node without processes: time, an event loop and movers that do what they are told, under the real service."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from hpkv_daemon.movers.base import Alive, Attached, Attachment, CopyJob, Died, Direction, Done, Event, Outcome

FIRST_MOVER_FD = 1 << 20
"""Descriptors from here on are the movers'; those below are real ones, of watched processes."""

_MOST_PIECES = 64
"""A block in more pieces is not compared with others piece by piece."""


class Reactor:
    """What the service needs of an event loop, and a clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.readers: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def clock(self) -> float:
        """Seconds."""
        return self.now

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """See ``sessions.Reactor``."""
        assert fd not in self.readers, f"descriptor {fd} is watched twice"
        self.readers[fd] = callback

    def remove_reader(self, fd: int) -> object:
        """See ``sessions.Reactor``."""
        return self.readers.pop(fd, None)

    def call_later(self, delay: float, callback: Callable[[], None]) -> object:
        """See ``sessions.Reactor``."""
        heapq.heappush(self._timers, (self.now + delay, next(self._numbers), callback))
        return None

    def advance(self, seconds: float) -> None:
        """Move the clock; whatever is due is called."""
        self.now += seconds
        while self._timers and self._timers[0][0] <= self.now:
            heapq.heappop(self._timers)[2]()


class Copy(NamedTuple):
    """A copy under way: what it does and where in the pool."""

    direction: Direction
    ranges: list[tuple[int, int]]


@dataclass
class Node:
    """Movers of one node, and every copy that runs on it."""

    reactor: Reactor
    pool_bytes: int
    movers: list[ScriptedMover] = field(default_factory=list)
    copies: dict[tuple[int, int], Copy] = field(default_factory=dict)
    """(mover's pid, ticket) -> copy."""
    eager: bool = True
    """Movers answer at once."""
    lame: bool = False
    """Movers cannot be started."""
    on_copy: Callable[[CopyJob], None] = lambda _: None
    awake: Callable[[], float] = lambda: 0.0
    """The daemon's time for patience."""

    def start_mover(self) -> ScriptedMover:
        """The factory of movers."""
        if self.lame:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        mover = ScriptedMover(self, len(self.movers) + 1)
        self.movers.append(mover)
        return mover

    @property
    def live(self) -> list[ScriptedMover]:
        """Movers that can still say something, oldest first."""
        return [mover for mover in self.movers if not mover.closed]

    def deliver(self) -> None:
        """Let the loop hear what movers said; eager ones say all they have to, until nobody has anything to say."""
        heard = True
        while heard:
            heard = False
            for mover in self.live:
                if self.eager:
                    mover.answer_all()
                if mover.events:
                    heard = True
                    self.reactor.readers[mover.fileno()]()

    def oldest_cancelled(self) -> float:
        """For how long a mover that lives has not confirmed that a copy of it is withdrawn."""
        since = [moment for mover in self.live for moment in mover.unconfirmed()]
        return self.awake() - min(since, default=self.awake())

    def started(self, copy: Copy) -> None:
        """No copy may meet another one in the pool, unless both read."""
        for other in self.copies.values():
            if Direction.STORE in (copy.direction, other.direction):
                for start, end in copy.ranges:
                    for low, high in other.ranges:
                        assert end <= low or high <= start, f"{copy} meets {other}"


class ScriptedMover:
    """A ``Mover`` that copies nothing and ends each copy when, and how, it is told."""

    device = "cpu"

    def __init__(self, node: Node, pid: int) -> None:
        self.pid = pid
        self.events: list[Event] = []
        self.closed = False
        self.dead = False
        self._node = node
        self._attached: dict[int, Attachment] = {}
        self._waiting: list[Attached | Alive | int] = []
        """What it has not answered: an attachment, a ping, or a copy by its ticket."""
        self._cancelled: dict[int, float] = {}
        self._tickets = 0
        self._asked = 0

    def fileno(self) -> int:
        """See ``Mover``."""
        return FIRST_MOVER_FD + self.pid

    def attach(self, attachment: int, what: Attachment) -> None:
        """See ``Mover``."""
        assert not self.closed, "attach after close"
        self._attached[attachment] = what
        self._waiting.append(Attached(attachment, ""))

    def detach(self, attachment: int) -> None:
        """See ``Mover``."""
        assert not self.closed, "detach after close"
        assert attachment in self._attached, f"{attachment} was never attached"
        del self._attached[attachment]

    def submit(self, job: CopyJob) -> int:
        """See ``Mover``."""
        assert not self.closed, "a copy after close"
        what = self._attached.get(job.attachment)
        assert what is not None, f"a copy for {job.attachment}, which is not attached"
        assert len(job.offsets) == len(job.blocks)
        assert all(0 <= block < what.blocks for block in job.blocks), f"{job} leaves the rank's memory"
        self._tickets += 1
        if not self.dead:
            copy = Copy(job.direction, list(self._ranges(job, what)))
            self._node.started(copy)
            self._node.on_copy(job)
            self._node.copies[self.pid, self._tickets] = copy
            self._waiting.append(self._tickets)
        return self._tickets

    def _ranges(self, job: CopyJob, what: Attachment) -> Iterator[tuple[int, int]]:
        end = max((run.last_canonical_byte() for run in what.runs), default=0)
        few = sum(run.count for run in what.runs) <= _MOST_PIECES
        for offset in job.offsets:
            assert 0 <= offset <= self._node.pool_bytes - end, f"{job} leaves the pool"
            for run in what.runs if few else ():
                for index in range(run.count):
                    start = offset + run.canonical_offset + index * run.canonical_step
                    yield start, start + run.fragment

    def cancel(self, ticket: int) -> None:
        """See ``Mover``."""
        assert not self.closed, "cancel after close"
        assert 0 < ticket <= self._tickets, f"ticket {ticket} was never given"
        self._cancelled.setdefault(ticket, self._node.awake())

    def ping(self) -> None:
        """See ``Mover``."""
        assert not self.closed, "ping after close"
        if not self.dead:
            self._waiting.append(Alive())

    def poll(self) -> Iterator[Event]:
        """See ``Mover``."""
        events, self.events = self.events, []
        yield from events

    def flush(self) -> bool:
        """See ``Mover``."""
        return True

    def kill(self) -> None:
        """See ``Mover``."""
        self.die("killed")

    def close(self) -> None:
        """See ``Mover``."""
        assert not self.closed, "close after close"
        assert self.dead or not self._running(), "closed while it holds jobs"
        self.closed = True

    def ended(self, timeout: float = 0.0) -> bool:
        """See ``Mover``."""
        self._asked += 1
        return timeout > 0 or self._asked > 1

    # -- what the script says ------------------------------------------------------------------------------

    def _running(self) -> list[int]:
        return [ticket for pid, ticket in self._node.copies if pid == self.pid]

    def unconfirmed(self) -> list[float]:
        """When each copy was withdrawn that still runs."""
        return [self._cancelled[ticket] for ticket in self._running() if ticket in self._cancelled]

    def answer(self, which: int, outcome: Outcome) -> None:
        """Answer one of the things it was asked, in any order: a copy with this outcome, an attachment likewise."""
        if not self._waiting:
            return
        what = self._waiting.pop(which % len(self._waiting))
        if isinstance(what, int):
            del self._node.copies[self.pid, what]
            moved = 4096 if outcome is Outcome.OK else 0
            self.events.append(Done(what, outcome, "" if moved else "told so", moved, 0.001))
        elif isinstance(what, Attached) and outcome is Outcome.FAILED:
            self.events.append(Attached(what.attachment, "told so"))
        else:
            self.events.append(what)

    def answer_all(self) -> None:
        """Answer everything, well."""
        while self._waiting:
            self.answer(0, Outcome.VOID if self._waiting[0] in self._cancelled else Outcome.OK)

    def die(self, reason: str) -> None:
        """Its process ends, and with it every copy."""
        if self.dead or self.closed:
            return
        self.dead = True
        self._waiting.clear()
        for ticket in self._running():
            del self._node.copies[self.pid, ticket]
        self.events.append(Died(reason))
