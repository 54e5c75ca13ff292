"""What a process that the daemon starts does first: its end is the daemon's to decide."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""

_NICE = -10


def belong_to_daemon() -> None:
    """End with the daemon, and leave signals that are meant for its group to it.

    The kernel kills this process when the daemon dies, also when it is frozen then and sees no closed link.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def claim_priority() -> None:
    """Go before engine processes that spin while they wait for us; allowed for root and by RLIMIT_NICE."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    except PermissionError:
        return
