"""What the parts of the disk tier have in common: index, process, counters, health, and the batches under way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from hpkv_daemon.tiers.base import COUNTERS, Direction, Done, Event, Outcome
from hpkv_daemon.tiers.disk.format import Kind
from hpkv_daemon.tiers.disk.index import DiskIndex
from hpkv_daemon.tiers.disk.table import Segment
from hpkv_daemon.tiers.host import TierProcess

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0


class Health:
    """Whether writes make sense now. After a failure the next try comes after 1 s, then 2 s ... 60 s."""

    def __init__(self) -> None:
        self.reason = ""
        """Why they do not, or empty."""
        self.outcome = Outcome.OK
        self._retry_at = 0.0
        self._delay = FIRST_RETRY_SECONDS

    def fail(self, outcome: Outcome, problem: str, now: float) -> None:
        """A write failed."""
        if not self.reason:
            log.warning("storage takes no writes: %s", problem)
        self.outcome, self.reason = outcome, problem or outcome.name
        self._retry_at = now + self._delay
        self._delay = min(LAST_RETRY_SECONDS, self._delay * 2)

    def heal(self) -> None:
        """A write succeeded."""
        if self.reason:
            log.warning("storage takes writes again")
        self.outcome, self.reason = Outcome.OK, ""
        self._delay = FIRST_RETRY_SECONDS

    def due(self, now: float) -> bool:
        """Whether it is time to try; asked again only after the delay, however the try ends."""
        if not self.reason or now < self._retry_at:
            return False
        self._retry_at = now + self._delay
        return True


@dataclass(slots=True)
class Batch:
    """Blocks of one ticket. ``end`` each of them once."""

    ticket: int
    direction: Direction
    lengths: list[int]
    started: float
    emit: Callable[[Event], None]
    clock: Callable[[], float]
    outcomes: list[Outcome] = field(init=False)
    left: int = field(init=False)
    problem: str = ""

    def __post_init__(self) -> None:
        self.left = len(self.lengths)
        self.outcomes = [Outcome.VOID] * self.left

    def end(self, index: int, outcome: Outcome, problem: str) -> None:
        """One block is over; with the last one, ``Done`` is told."""
        self.outcomes[index] = outcome
        self.problem = self.problem or problem
        self.left -= 1
        if not self.left:
            pairs = zip(self.lengths, self.outcomes, strict=True)
            moved = sum(length for length, outcome in pairs if outcome is Outcome.OK)
            seconds = self.clock() - self.started
            self.emit(Done(self.ticket, self.direction, tuple(self.outcomes), self.problem, moved, seconds))


End = Callable[[Outcome, str], None]


@dataclass(slots=True, eq=False)
class Item:
    """One record to write. ``offset`` is that of the payload in the pool. Each of ``ends`` is called once."""

    kind: Kind
    fingerprint: bytes
    key: bytes
    parent: bytes = b""
    length: int = 0
    offset: int = 0
    before: int = 0
    ends: list[End] = field(default_factory=list)
    void: bool = False
    """Forgotten meanwhile."""
    retried: bool = False

    def end(self, outcome: Outcome, problem: str = "") -> None:
        """It is over."""
        for end in self.ends:
            end(outcome, problem)


class Shared:
    """See the module. Not thread-safe: the control loop is its only user."""

    def __init__(self, index: DiskIndex, process: TierProcess, clock: Callable[[], float]) -> None:
        self.index = index
        self.process = process
        self.clock = clock
        self.health = Health()
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.events: list[Event] = []
        self._started = clock()
        self._tickets = 0

    def tell(self, event: Event) -> None:
        """The next ``poll`` answers it, too."""
        self.events.append(event)

    def tick(self) -> int:
        """Sixteenths of a second since the start, from 1: what the index orders use by. 32 bits hold eight years."""
        return int((self.clock() - self._started) * 16) + 1

    def ticket(self) -> int:
        """A number that was not used before."""
        self._tickets += 1
        return self._tickets

    def batch(self, direction: Direction, lengths: list[int]) -> Batch:
        """Begin a batch."""
        return Batch(self.ticket(), direction, lengths, self.clock(), self.tell, self.clock)


def place_of(segment: Segment) -> list[int]:
    """A segment as orders name it."""
    return [segment.number, segment.life, segment.size]
