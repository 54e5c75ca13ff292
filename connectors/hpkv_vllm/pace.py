"""Load or recompute: which of the two is faster, from what both took lately. Pure."""

from __future__ import annotations

import statistics
from collections import deque

MARGIN = 2.0
"""Computing must look so many times faster before a hit is left alone: loads spare the engine work for others."""
LEAST_TOKENS = 256
"""Shorter steps and loads say little about speed: what they take is mostly what any step or message takes."""
SAMPLES = 5
"""The latest ones count. Their median: one odd step or load changes nothing."""
LEAST_SAMPLES = 3
MEMORY_SECONDS = 60.0
"""What was measured before that says nothing about now: with no newer measure, hits are loaded."""
PROBE_EVERY = 8
"""One in so many hits is loaded all the same: a slow tier would never be seen to have become fast again."""


class Speed:
    """Tokens per second, as the latest samples tell."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._measured = float("-inf")

    def sample(self, tokens: int, seconds: float, now: float) -> None:
        """``tokens`` took ``seconds``. Short ones are ignored."""
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        if now - self._measured > MEMORY_SECONDS:
            self._samples.clear()
        self._samples.append(tokens / seconds)
        self._measured = now

    def now(self, now: float) -> float | None:
        """Tokens per second; None without enough samples, and new ones."""
        if len(self._samples) < LEAST_SAMPLES or now - self._measured > MEMORY_SECONDS:
            return None
        return statistics.median(self._samples)

    def latest(self) -> float | None:
        """The same, however old; None when nothing was ever measured."""
        return statistics.median(self._samples) if self._samples else None


class Pace:
    """Decides for each hit. ``now`` is monotonic seconds; one thread."""

    def __init__(self) -> None:
        self.computing = Speed()
        self.loading = Speed()
        self._refused = 0

    def worth_loading(self, now: float) -> bool:
        """Whether to load a hit. True unless both speeds are known and computing is faster by ``MARGIN``."""
        computing, loading = self.computing.now(now), self.loading.now(now)
        if computing is None or loading is None or computing < MARGIN * loading:
            return True
        self._refused += 1
        return self._refused % PROBE_EVERY == 0
