"""What the parts of the remote tier have in common: process, counters, breakers, events, and the batches under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpkv_daemon.tiers.base import BlockJob, Direction, Done, Event, Outcome
from hpkv_daemon.tiers.host import Reply, TierProcess
from hpkv_daemon.tiers.remote.patience import Breaker
from hpkv_daemon.tiers.remote.presence import Presence

COUNTERS = (
    "written_blocks",
    "written_bytes",
    "write_microseconds",
    "existing_blocks",
    "failed_writes",
    "refused_writes",
    "read_blocks",
    "read_bytes",
    "read_microseconds",
    "failed_reads",
    "refused_reads",
    "missing_blocks",
    "bad_blocks",
    "lookups",
    "lookup_questions",
    "lookup_timeouts",
    "restarts",
)
"""Names in ``Usage.counters``. ``existing_blocks`` were to be written and are there already; ``missing_blocks`` were
believed to be there and are not; microseconds are summed over orders."""

_WORKS = (Outcome.OK, Outcome.MISSING, Outcome.BAD)


class Batch:
    """Blocks of one ticket; ``end`` each once."""

    def __init__(self, ticket: int, direction: Direction, jobs: Sequence[BlockJob], started: float) -> None:
        self.ticket = ticket
        self.jobs = jobs
        self._direction = direction
        self._started = started
        self._outcomes = [Outcome.VOID] * len(jobs)
        self._left = len(jobs)
        self._problem = ""

    def end(self, number: int, outcome: Outcome, problem: str, now: float) -> Done | None:
        """One block is over; with the last one, the event to tell."""
        self._outcomes[number] = outcome
        self._problem = self._problem or (problem if outcome is not Outcome.OK else "")
        self._left -= 1
        if self._left:
            return None
        moved = sum(job.length for job, one in zip(self.jobs, self._outcomes, strict=True) if one is Outcome.OK)
        outcomes = tuple(self._outcomes)
        return Done(self.ticket, self._direction, outcomes, self._problem, moved, now - self._started)


class Shared:
    """See the module. Not thread-safe: the control loop is its only user."""

    def __init__(self, process: TierProcess, clock: Callable[[], float]) -> None:
        self.process = process
        self.clock = clock
        self.presence = Presence()
        self.reading, self.writing = Breaker(), Breaker()
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.events: list[Event] = []
        self.to_clear: dict[bytes, tuple[Breaker, list[int]]] = {}
        """Namespaces that are being forgotten: nothing of them counts until they are; the tickets that wait."""
        self.closed = False
        self._tickets = 0

    def tell(self, event: Event) -> None:
        """The next ``poll`` answers it, and it comes soon."""
        self.events.append(event)
        if not self.closed:
            self.process.wake()

    def ticket(self) -> int:
        """A number that was not used before."""
        self._tickets += 1
        return self._tickets

    def batch(self, direction: Direction, jobs: Sequence[BlockJob]) -> Batch:
        """Begin a batch."""
        return Batch(self.ticket(), direction, jobs, self.clock())

    def end(self, batch: Batch, number: int, outcome: Outcome, problem: str) -> None:
        """One block of a batch is over."""
        done = batch.end(number, outcome, problem, self.clock())
        if done is not None:
            self.tell(done)

    def judge(self, breaker: Breaker, reply: Reply) -> bool:
        """What an order says about the store; False when it says that it does not work."""
        if any(outcome in _WORKS for outcome in reply.outcomes):
            if breaker.reason:
                # It may have come back as another one.
                self.presence.clear()
            breaker.succeed()
            return True
        if reply.outcome is not Outcome.DIED:
            breaker.fail(reply.problem, self.clock())
        return False

    def unreadable(self, fingerprint: bytes) -> bool:
        """Whether nothing of a namespace can be found or read now.

        While reads fail, no request finds out whether they work again: the tier does that by itself.
        """
        return self.closed or fingerprint in self.to_clear or not self.process.alive or bool(self.reading.reason)


def for_each(reply: Reply, count: int) -> tuple[Outcome, ...]:
    """The outcome of each of so many blocks, also of an order that ended as a whole."""
    return reply.outcomes if len(reply.outcomes) == count else reply.outcomes[:1] * count
