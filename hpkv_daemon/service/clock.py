"""Time for patience: what a peer may take to show a sign of life."""

from __future__ import annotations

from collections.abc import Callable

_LONGEST_STEP = 1.0


class AwakeClock:
    """Seconds during which the control loop ran. Call ``tick`` a few times a second.

    While the daemon itself is stopped (SIGSTOP, a suspended machine) nobody's time to answer runs: the answers
    wait in its sockets, unread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._asleep = 0.0

    def __call__(self) -> float:
        """Now, in awake seconds; never goes back."""
        return min(self._clock() - self._asleep, self._last + _LONGEST_STEP)

    def tick(self) -> float:
        """Now; the time since the last tick counts in full only if it was short."""
        self._last = self()
        self._asleep = self._clock() - self._last
        return self._last
