"""The seam between the control loop and whatever keeps blocks beyond the pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from hpkv_client.types import BlockKey


class Direction(IntEnum):
    """Seen from the pool."""

    WRITE = 0
    """Pool -> tier."""
    READ = 1
    """Tier -> pool."""


class Outcome(IntEnum):
    """What became of one block of a batch. After a read, anything but OK means: treat the slot as garbage."""

    OK = 0
    """Written: it is durable. Read: its bytes are verified and in the slot."""
    MISSING = 1
    """The tier does not have it (any more)."""
    BAD = 2
    """What lies on the medium is not this block; the tier has forgotten it."""
    NO_SPACE = 3
    IO_ERROR = 4
    READ_ONLY = 5
    VOID = 6
    """Forgotten while it was on its way."""
    DIED = 7
    """The process that moved it died, or was killed because it did not answer."""


class State(IntEnum):
    """How well a tier is. Reads are tried in every state but CLOSED."""

    STARTING = 0
    """It does not know yet what it holds. Writes are taken and wait."""
    RECOVERING = 1
    """It writes, and finds more of what it holds."""
    READY = 2
    DEGRADED = 3
    """It refuses writes, for ``Usage.reason``, and tries again by itself."""
    CLOSED = 4


@dataclass(frozen=True, slots=True)
class BlockJob:
    """One block to move.

    ``fingerprint`` and ``key`` have 32 bytes, as has ``parent`` unless the block has none. ``length`` bytes of
    payload lie at byte ``offset`` of the pool. Slots begin at multiples of 4 KiB, and end at one: the bytes between
    the payload and the end of its last 4 KiB may be overwritten by a read. Reads do not look at ``parent``.
    """

    fingerprint: bytes
    key: BlockKey
    parent: BlockKey | None
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Done:
    """A batch is over: nothing of it touches the pool after this. ``outcomes`` are in the order of its jobs.

    ``problem`` tells about the first block that failed, in words. ``bytes_moved`` counts payloads. ``seconds`` are
    those from its submission.
    """

    ticket: int
    direction: Direction
    outcomes: tuple[Outcome, ...]
    problem: str
    bytes_moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What ``forget`` or ``forget_namespace`` asked for survives a restart from now on."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """Recovery went on. ``blocks`` are known so far; it is over when ``done`` equals ``total`` (segments)."""

    done: int
    total: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """A scrub went on: segments ``done`` of ``total``; blocks found ``good`` and ``bad`` so far.

    It is over when ``done`` equals ``total``. Bad blocks are forgotten.
    """

    done: int
    total: int
    good: int
    bad: int


@dataclass(frozen=True, slots=True)
class Changed:
    """The tier's state is another one. ``reason`` is not empty when it is DEGRADED."""

    state: State
    reason: str


@dataclass(frozen=True, slots=True)
class Known:
    """More is known about what is there: ask ``match`` again for what was inquired about."""


Event = Done | Forgotten | Recovered | Scrubbed | Changed | Known


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds and may hold, and how it is. Sizes in bytes."""

    state: State
    reason: str
    """Why it is DEGRADED, else empty."""
    budget_bytes: int
    used_bytes: int
    """Taken on the medium: at no moment more than ``budget_bytes``."""
    live_bytes: int
    """Payloads of the blocks that it answers for."""
    blocks: int
    queued_bytes: int
    """Payloads of writes that are not over."""
    pid: int
    """Process that moves the bytes, 0 if there is none."""
    counters: dict[str, int]
    """Since the start: see ``COUNTERS``."""


COUNTERS = (
    "written_blocks",
    "written_bytes",
    "read_blocks",
    "read_bytes",
    "failed_writes",
    "failed_reads",
    "bad_records",
    "refused_writes",
    "refused_reads",
    "evicted_blocks",
    "reinserted_blocks",
    "forgotten_blocks",
    "scrubbed_blocks",
    "restarts",
)
"""Names in ``Usage.counters``; all but those in bytes and ``restarts`` count blocks."""


class Tier(Protocol):
    """Keeps blocks beyond the pool. Used by the control loop only. No method waits, except ``close``.

    A slot belongs to the tier from ``write`` or ``read`` until the batch's ``Done``: until then a writer must not
    change it, and nobody may look at one that is read into. There is one ``Done`` for every ticket, whatever dies.
    """

    @property
    def largest_block(self) -> int:
        """Payload bytes of the largest block that it can keep; larger ones are refused."""

    def fileno(self) -> int:
        """Becomes readable when ``poll`` has something to say; the same descriptor for the life of the tier."""

    def recover(self) -> None:
        """Begin to find what is there already; answered by ``Recovered``. Once, before anything else."""

    def match(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are here. From memory: about 0.1 us a key that is."""

    def contains(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of these keys are here. From memory."""

    def inquire(self, fingerprint: bytes, keys: Sequence[BlockKey], chain: bool) -> bool:
        """Find out which of these are here: True while an answer is on its way, told by ``Known``.

        ``chain``: only how many leading ones are. False when it is known, or cannot be found out now.
        """

    def touch(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> None:
        """These blocks were of use, though not read from here: whoever evicts should know."""

    def write(self, jobs: Sequence[BlockJob]) -> int | None:
        """Begin to keep blocks; the ticket, or None when all of them are refused now (counted).

        A block that is here already, or on its way, counts as written. Raises ``ValueError`` for a malformed job.
        """

    def read(self, jobs: Sequence[BlockJob]) -> int | None:
        """Begin to bring blocks into their slots; the ticket, or None when all are refused now (counted).

        Raises ``ValueError`` for a malformed job.
        """

    def forget(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> int:
        """From now on these blocks are not here, nor on their way; the ticket of ``Forgotten``."""

    def forget_namespace(self, fingerprint: bytes) -> int:
        """The same for all blocks of the namespace."""

    def scrub(self, bytes_per_second: int) -> bool:
        """Begin to read and verify everything, so fast at most; False while one is under way."""

    def poll(self) -> Iterable[Event]:
        """What happened since the last call. Call it when ``fileno`` is readable, and twice a second: time-outs and
        second tries are its work."""

    def flush(self) -> bool:
        """Send what the process did not take yet; True when nothing is left to send."""

    def usage(self) -> Usage:
        """What it holds and how it is."""

    def check(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant."""

    def close(self, seconds: float) -> None:
        """End: wait at most so long for what is being written, then nothing touches the pool or the medium.

        Batches that are not over by then get no ``Done``. May be called again.
        """


class Inventory(Tier, Protocol):
    """A tier that can tell everything it holds."""

    def inventory(self) -> Iterator[list[tuple[bytes, BlockKey, int]]]:
        """Fingerprint, key and payload bytes of every block, some at a time: about 1 ms of the control loop each."""
