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
        self.fetching = Speed()
        """How fast blocks come from disk or from another node, before they can be loaded."""
        self._refused = {"loading": 0, "fetching": 0}

    def worth_loading(self, now: float) -> bool:
        """Whether to load a hit. True unless both speeds are known and computing is faster by ``MARGIN``."""
        return self._worth("loading", self.loading, now)

    def worth_waiting(self, now: float) -> bool:
        """Whether to wait for blocks that come from disk or from another node. True in the same way."""
        return self._worth("fetching", self.fetching, now)

    def _worth(self, what: str, other: Speed, now: float) -> bool:
        computing, speed = self.computing.now(now), other.now(now)
        if computing is None or speed is None or computing < MARGIN * speed:
            return True
        self._refused[what] += 1
        return self._refused[what] % PROBE_EVERY == 0
