"""The seam between the control loop and whatever copies bytes for one device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from hpkv_client.types import MemoryHandle, Run


class Direction(IntEnum):
    """Seen from the engine."""

    STORE = 0
    """Engine memory -> pool."""
    LOAD = 1
    """Pool -> engine memory."""


class Outcome(IntEnum):
    """How a copy ended. Anything but OK means: treat the destination as garbage."""

    OK = 0
    FAILED = 1
    VOID = 2
    """The engine or the daemon withdrew the job before it was done."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """One rank's memory: what to map and how its blocks correspond to canonical ones.

    ``control`` is the page in which engine and mover agree on withdrawn jobs (see ``hpkv_client.control``).
    """

    regions: tuple[MemoryHandle, ...]
    control: MemoryHandle | None
    runs: tuple[Run, ...]
    blocks: int


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Blocks of one attached rank to copy: pool byte offset and engine block id, pairwise.

    ``job`` is the engine's number for it, the one it may withdraw through the control page.
    """

    attachment: int
    direction: Direction
    job: int
    offsets: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Attached:
    """The answer to ``attach``; ``problem`` is empty when the memory is mapped."""

    attachment: int
    problem: str


@dataclass(frozen=True, slots=True)
class Done:
    """A job is over: nothing of it is copied after this."""

    ticket: int
    outcome: Outcome
    problem: str
    bytes_moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Alive:
    """The answer to ``ping``."""


@dataclass(frozen=True, slots=True)
class Locked:
    """So many bytes of the pool are page-locked for the device by now."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that an operator should know; a mover says it once."""

    text: str


@dataclass(frozen=True, slots=True)
class Died:
    """The mover's process is gone, and every mapping and copy of it."""

    reason: str


Event = Attached | Done | Alive | Locked | Notice | Died


class Mover(Protocol):
    """Copies for one device. No method waits; results come from ``poll``."""

    device: str
    descriptor_socket: str
    """Name of the socket, beside the daemon's, at which it takes descriptors of memory; empty if it takes none."""

    @property
    def pid(self) -> int:
        """Process id of the mover, 0 if it has none."""

    def fileno(self) -> int:
        """Becomes readable when ``poll`` has something to say."""

    def attach(self, attachment: int, what: Attachment) -> None:
        """Map a rank's memory under a number chosen by the caller; answered by ``Attached``."""

    def detach(self, attachment: int) -> None:
        """Unmap it. Jobs of it that still run end first, as VOID."""

    def submit(self, job: CopyJob) -> int:
        """Queue a copy; its ticket. Answered by ``Done``."""

    def cancel(self, ticket: int) -> None:
        """Ask for an early end; the confirmation is the job's ``Done``."""

    def ping(self) -> None:
        """Ask for a sign of life; answered by ``Alive``, also while copies run."""

    def poll(self) -> Iterable[Event]:
        """What happened since the last call."""

    def flush(self) -> bool:
        """Send what the process did not take yet; True when nothing is left to send."""

    def kill(self) -> None:
        """Begin to end the process; ``Died`` tells when no copy of it can run any more."""

    def close(self) -> None:
        """Let go of the mover, which holds no job, and end its process; ``ended`` tells when it is gone."""

    def ended(self, timeout: float = 0.0) -> bool:
        """Whether the process is gone, and every mapping it held; waits up to ``timeout`` seconds for it."""
