"""Priority and cores of what is measured: the same for floor and sample."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NICE = -10
"""What the daemon and its movers claim for themselves."""


def go_first() -> None:
    """Raise this process, and what it starts, where that is allowed: other load then hits floor and sample alike."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)


@contextmanager
def awake() -> Iterator[None]:
    """Keep all cores from sleeping, by loops that run only where nothing else does.

    A virtual core that went to sleep takes tens of microseconds to come back, and whether it does depends on the
    host; beside an engine that spins while it waits, no core sleeps.
    """
    loops = [subprocess.Popen([sys.executable, "-S", "-c", _LOOP, str(core)]) for core in cores()]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def cores() -> list[int]:
    """The cores that this process was given."""
    return _CORES


_LOOP = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
while os.getppid() != 1:
    pass
"""

_CORES = sorted(os.sched_getaffinity(0))


def pin(pid: int, core: int) -> None:
    """Move every thread of a process, and what they start from now on, to one core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
