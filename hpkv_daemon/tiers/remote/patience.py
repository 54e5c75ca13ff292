"""How a daemon treats a store that fails, and one that must not be flooded. Pure: the clock is passed in."""

from __future__ import annotations

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0
BURST_SECONDS = 0.5
"""What a bandwidth allows in this time may go at once."""


class Breaker:
    """Open after a failure: then one try is allowed after 1 s, the next 2 s later, and so on up to 60 s."""

    def __init__(self) -> None:
        self.reason = ""
        """Why it is open, or empty."""
        self._retry_at = 0.0
        self._delay = FIRST_RETRY_SECONDS

    def fail(self, reason: str, now: float) -> None:
        """What was tried has failed."""
        self.reason = reason or "it does not work"
        self._retry_at = now + self._delay
        self._delay = min(LAST_RETRY_SECONDS, self._delay * 2)

    def succeed(self) -> None:
        """What was tried has worked."""
        self.reason = ""
        self._delay = FIRST_RETRY_SECONDS

    def is_open(self, now: float) -> bool:
        """Whether nothing should be tried now. Asking does not use up the try."""
        return bool(self.reason) and now < self._retry_at

    def due(self, now: float) -> bool:
        """Whether it is open and a try is due; true once for each delay."""
        if not self.reason or now < self._retry_at:
            return False
        self._retry_at = now + self._delay
        return True


class Throttle:
    """Lets so many bytes per second through; all of them with a rate of 0."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._paid_until = float("-inf")

    def is_open(self, now: float) -> bool:
        """Whether something may go now."""
        return not self._rate or self._paid_until <= now

    def take(self, size: int, now: float) -> None:
        """It goes; what comes next waits for it."""
        if self._rate:
            self._paid_until = max(self._paid_until, now - BURST_SECONDS) + size / self._rate
