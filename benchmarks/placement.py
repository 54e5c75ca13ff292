"""Priority and cores of what is measured: the same for floor and sample."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NICE = -10
"""What the daemon and its movers claim for themselves."""


def go_first() -> None:
    """Raise this process, and what it starts, where that is allowed: other load then hits floor and sample alike."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def cores() -> list[int]:
    """The cores that this process was given."""
    return _CORES


_CORES = sorted(os.sched_getaffinity(0))


def pin(pid: int, core: int) -> None:
    """Move every thread of a process, and what they start from now on, to one core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
