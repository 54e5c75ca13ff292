"""Paired samples: every sample has a floor right before and right after it, so that noise hits both alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Timed = Callable[[], float]
"""Does one unit of work and returns the seconds it took."""


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of some values; of one value, that value three times."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass
class Pairs:
    """Seconds of each sample, and of its floor: the mean of the one before and the one after."""

    floors: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)

    def add(self, before: float, sample: float, after: float) -> None:
        """One more pair."""
        self.floors.append((before + after) / 2)
        self.samples.append(sample)

    @property
    def speed(self) -> Spread:
        """How fast the samples are, as a multiple of their floors (more is better)."""
        return Spread.of([floor / sample for floor, sample in zip(self.floors, self.samples, strict=True)])

    @property
    def cost(self) -> Spread:
        """How long the samples take, as a multiple of their floors (less is better)."""
        return Spread.of([sample / floor for floor, sample in zip(self.floors, self.samples, strict=True)])


def alternate(floor: Timed, samples: Mapping[str, Timed], rounds: int) -> dict[str, Pairs]:
    """``rounds`` times each sample in turn, with a floor between any two."""
    found = {name: Pairs() for name in samples}
    before = floor()
    for _ in range(rounds):
        for name, sample in samples.items():
            seconds, after = sample(), floor()
            found[name].add(before, seconds, after)
            before = after
    return found
