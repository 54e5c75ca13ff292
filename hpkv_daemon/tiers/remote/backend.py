"""The seam between the remote tier's process and a store that others run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

REQUEST_SECONDS = 5.0
"""No request takes longer; what has not come by then has failed."""
CONNECT_SECONDS = 2.0


class Fate(IntEnum):
    """What became of one object of a request."""

    OK = 0
    """Got, or put, or there, or deleted."""
    MISSING = 1
    EXISTS = 2
    """Not put: somebody else has put it before."""
    BAD = 3
    """There, but not of the size that was asked for."""
    FULL = 4
    DENIED = 5
    FAILED = 6
    """Not reached, not in time, throttled, or anything else that may pass."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The fate of one object; ``problem`` says in words what went wrong, without secrets."""

    fate: Fate
    problem: str = ""


OK = Answer(Fate.OK)
MISSING = Answer(Fate.MISSING, "the block is not there")


@dataclass(slots=True)
class Piece:
    """One object: its name, and its bytes in two pieces. Both are filled by a get, and read by a put."""

    name: str
    header: memoryview
    payload: memoryview


class Backend(Protocol):
    """Objects by name. Names are relative to where the URL points, with ``/`` between folders.

    Several threads use it at once. Nothing raises for what a store does: there is an answer for every object, in the
    order of the request, and within ``REQUEST_SECONDS`` for each or so. An object is seen by others in full or not
    at all, as far as the store can promise that; whoever reads verifies.
    """

    def get(self, pieces: Sequence[Piece]) -> list[Answer]:
        """Fill the pieces. One whose object has another size is not filled."""

    def put(self, pieces: Sequence[Piece]) -> list[Answer]:
        """Create objects. One that exists is left as it is."""

    def exists(self, names: Sequence[str]) -> list[Answer]:
        """Which of these are there: OK or MISSING."""

    def delete(self, names: Sequence[str]) -> list[Answer]:
        """Delete objects; one that is not there counts as deleted."""

    def clear(self, folder: str) -> int:
        """Delete everything under a folder; how many objects, if the store says so. Raises ``BackendError``."""

    def listing(self, folder: str) -> Iterator[tuple[str, int]]:
        """Names under a folder (empty: all), and sizes in bytes. Raises ``BackendError``."""

    def close(self) -> None:
        """Drop the connections."""


class BackendError(Exception):
    """A store could not be opened, listed or cleared; the text says why, without secrets."""
