"""Who is at the other end of a Unix socket, by the kernel's word."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_UCRED = struct.Struct("3i")


class PeerProcess(NamedTuple):
    """The process that connected, or listens. ``pid`` is 0 for one in another PID namespace."""

    pid: int
    uid: int


def peer_of(connected: socket.socket) -> PeerProcess:
    """The other end of a connected Unix socket (SO_PEERCRED of unix(7)). Raises ``OSError``."""
    pid, uid, _ = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return PeerProcess(pid, uid)
