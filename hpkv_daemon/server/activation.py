"""Socket activation (sd_listen_fds(3)): the listener that systemd made, keeps over restarts, and passes to us."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from pathlib import Path

from hpkv_client.errors import ConfigError

FIRST_FD = 3
_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
_HINT = "set ListenStream= of hpkvd.socket and HPKV_SOCKET to the same path"


def passed_listener(environ: MutableMapping[str, str], socket_path: Path) -> int | None:
    """The descriptor to serve instead of a socket of our own; None if this process got none.

    Takes the variables out of ``environ``. Raises ``ConfigError`` for anything but one Unix stream listener on
    ``socket_path``.
    """
    count, pid, _ = (environ.pop(name, "") for name in _VARIABLES)
    if pid != str(os.getpid()) or count in ("", "0"):
        return None
    if count != "1":
        raise ConfigError(
            f"{count} sockets were passed to hpkvd, which serves one", "leave one ListenStream= in hpkvd.socket"
        )
    os.set_inheritable(FIRST_FD, False)
    os.set_blocking(FIRST_FD, False)
    try:
        listener = socket.socket(fileno=os.dup(FIRST_FD))
    except OSError as problem:
        raise ConfigError(f"the passed descriptor is no socket: {problem.strerror}", _HINT) from None
    with listener:
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listener.family != socket.AF_UNIX or listener.type != socket.SOCK_STREAM or not listens:
            raise ConfigError("the passed socket is not a listening Unix stream socket", _HINT)
        if listener.getsockname() != os.fspath(socket_path):
            raise ConfigError(f"the passed socket is {listener.getsockname()!r}, HPKV_SOCKET is {socket_path}", _HINT)
    return FIRST_FD
