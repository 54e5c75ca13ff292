"""What became of blocks, by namespace, and how long things took. Pure; for operators."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

MOST_APART = 64
"""Namespaces that are counted apart; what further ones do is counted together, so that reports stay small."""


@dataclass(slots=True)
class Moved:
    """Blocks that were copied in one direction."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, blocks: int, size: int, seconds: float) -> None:
        """So many more, of ``size`` bytes in all."""
        self.blocks += blocks
        self.bytes += size
        self.seconds += seconds


@dataclass(slots=True)
class BlockCounts:
    """Blocks of a namespace (``name``: its digest, empty for all that are not counted apart) since the daemon started.

    Look-ups: ``hit`` and ``missed``; those that were told to ask again, because storage gives blocks back, count in
    ``deferred_lookups`` only. Of blocks that came: ``offered`` = ``kept`` + ``full`` + ``orphan`` + ``reserved``. Of
    those that got a slot, once nothing is being written: ``reserved`` = ``stored`` + ``promoted`` + ``aborted`` +
    ``withdrawn``. At any time: ``resident`` = ``restored`` + ``stored`` + ``promoted`` - ``evicted`` - ``cleared``.
    """

    name: str
    model: str
    block_bytes: int = 0
    """0 for those that are not counted apart: theirs differ."""
    lookups: int = 0
    deferred_lookups: int = 0
    hit: int = 0
    missed: int = 0
    offered: int = 0
    kept: int = 0
    full: int = 0
    orphan: int = 0
    reserved: int = 0
    stored: int = 0
    promoted: int = 0
    aborted: int = 0
    withdrawn: int = 0
    restored: int = 0
    evicted: int = 0
    cleared: int = 0
    resident: int = 0
    loads: Moved = field(default_factory=Moved)
    """Pool -> engine; each rank's part of a block counts as one."""
    stores: Moved = field(default_factory=Moved)
    reads: Moved = field(default_factory=Moved)
    """Storage -> pool."""
    writes: Moved = field(default_factory=Moved)
    remote_reads: Moved = field(default_factory=Moved)
    """Store that nodes share -> pool."""
    remote_writes: Moved = field(default_factory=Moved)

    def moved(self, tier: str) -> tuple[Moved, Moved]:
        """Reads and writes of a tier beyond memory."""
        return (self.remote_reads, self.remote_writes) if tier == "remote" else (self.reads, self.writes)

    def looked_up(self, asked: int, hit: int, coming: int) -> None:
        """A look-up of so many blocks was answered."""
        if coming:
            self.deferred_lookups += 1
            return
        self.lookups += 1
        self.hit += hit
        self.missed += asked - hit

    def copy(self) -> BlockCounts:
        """As it is now."""
        return replace(
            self,
            loads=replace(self.loads),
            stores=replace(self.stores),
            reads=replace(self.reads),
            writes=replace(self.writes),
            remote_reads=replace(self.remote_reads),
            remote_writes=replace(self.remote_writes),
        )

    def check(self, writing: bool) -> None:
        """Raise ``AssertionError`` for the first sum that is not right. ``writing``: some slot waits for its end."""
        came = self.restored + self.stored + self.promoted
        assert self.resident == came - self.evicted - self.cleared, f"namespace {self.name}: residents miscounted"
        decided = self.kept + self.full + self.orphan + self.reserved
        assert self.offered == decided, f"namespace {self.name}: {self.offered} blocks offered, {decided} decided"
        ended = self.stored + self.promoted + self.aborted + self.withdrawn
        assert ended == self.reserved or (writing and ended < self.reserved), f"namespace {self.name}: {ended} ended"


class Histogram:
    """How often something took how long. ``bounds`` are the upper limits of its buckets, in seconds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Observations in each bucket, the last without a limit."""
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def copy(self) -> Histogram:
        """As it is now."""
        other = Histogram(self.bounds)
        other.counts, other.sum = list(self.counts), self.sum
        return other
