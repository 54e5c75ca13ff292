"""The control page: one shared page per rank in which an engine withdraws jobs from a mover.

A mover that a frozen daemon cannot stop may still hold a copy into blocks that the engine wants back. The page
settles it without any message, by Dekker's rule: each side writes its own word, then reads the other's.

- The mover writes ``active = job + 1`` before each slice of a copy, then reads ``fence``; a job below the fence is
  not copied. After the slice it writes ``active = 0``. After the last slice it reads the fence once more, so a
  store that was withdrawn while it ran is never kept.
- The engine raises ``fence``, then reads ``active``. Once that is 0 no withdrawn job touches its blocks any more.

Words are naturally aligned 64-bit integers; a lock operation between write and read is the memory barrier.
"""

from __future__ import annotations

import mmap
import threading

PAGE_BYTES = 4096
_FENCE, _ACTIVE, _MOVER_PID = 0, 1, 2


class ControlPage:
    """A view of the page. ``memory`` stays the caller's; close the view before the mapping."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._view = memoryview(memory)
        self._words = self._view[: 8 * 3].cast("Q")
        self._barrier = threading.Lock()

    def close(self) -> None:
        """Let go of the mapping."""
        self._words.release()
        self._view.release()

    def _fenced(self) -> None:
        with self._barrier:
            pass

    # -- engine -------------------------------------------------------------------------------------------

    def withdraw_through(self, job: int) -> None:
        """Withdraw every job up to and including ``job``."""
        self._words[_FENCE] = max(self._words[_FENCE], job + 1)
        self._fenced()

    def quiet(self) -> bool:
        """Whether no slice runs right now. After ``withdraw_through``: no withdrawn job will touch memory again."""
        self._fenced()
        return self._words[_ACTIVE] == 0

    @property
    def mover_pid(self) -> int:
        """Process id of the mover that mapped the memory, 0 before that."""
        return int(self._words[_MOVER_PID])

    # -- mover --------------------------------------------------------------------------------------------

    def sign(self, pid: int) -> None:
        """A new mover takes over: it holds no slice."""
        self._words[_ACTIVE] = 0
        self._words[_MOVER_PID] = pid

    def enter(self, job: int) -> bool:
        """Announce a slice of ``job``; False (and nothing announced) when the job is withdrawn."""
        self._words[_ACTIVE] = job + 1
        self._fenced()
        if self.withdrawn(job):
            self._words[_ACTIVE] = 0
            return False
        return True

    def leave(self) -> None:
        """The slice is over."""
        self._fenced()
        self._words[_ACTIVE] = 0

    def withdrawn(self, job: int) -> bool:
        """Whether the engine has withdrawn the job."""
        return job < self._words[_FENCE]
