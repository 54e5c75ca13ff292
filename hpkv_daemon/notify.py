"""What the service manager hears from the daemon: the datagrams of sd_notify(3), without its library."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping
from typing import Protocol

_WATCHDOG_PART = 3
"""Signs of life come so many times as often as the service manager wants them."""

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Clock(Protocol):
    """Seconds that only grow."""

    def __call__(self) -> float:
        """Now."""
        ...


class Notifier:
    """Tells the service manager how the daemon is. Does nothing where none listens. Never blocks, never raises.

    Not thread-safe: it belongs to the thread of the control loop.
    """

    def __init__(self, address: str, watchdog_seconds: float, clock: Clock) -> None:
        self._clock = clock
        self._pause = watchdog_seconds / _WATCHDOG_PART
        self._next_sign = 0.0
        self._unsent = ""
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            self._address = f"\0{address[1:]}" if address.startswith("@") else address

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str], clock: Clock) -> Notifier:
        """The one that systemd asks for. Its variables are taken out of ``environ``: no mover speaks for the daemon."""
        address, usec, pid = (environ.pop(name, "") for name in _VARIABLES)
        watched = usec.isdecimal() and pid in ("", str(os.getpid()))
        return cls(address if address[:1] in ("/", "@") else "", int(usec) / 1e6 if watched else 0.0, clock)

    def _send(self, *lines: str) -> bool:
        if self._socket is None:
            return True
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            # Its queue is full, or it is being replaced: the next sign of life may reach it.
            return False
        return True

    def progress(self, status: str, seconds: float) -> None:
        """The start goes on: allow it ``seconds`` more from now on."""
        self._send(f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def ready(self, status: str) -> None:
        """The daemon serves. Said again by ``tick`` if nobody could hear it."""
        self._unsent = f"READY=1\nSTATUS={status}"
        self.tick()

    def stopping(self, status: str) -> None:
        """The daemon is about to end."""
        self._unsent = ""
        self._send("STOPPING=1", f"STATUS={status}")

    def tick(self) -> None:
        """Give a sign of life when it is time for one. Call it from the loop whose life it is to prove."""
        if self._unsent and self._send(self._unsent):
            self._unsent = ""
        now = self._clock()
        if self._pause and now >= self._next_sign:
            self._next_sign = now + self._pause
            self._send("WATCHDOG=1")

    def close(self) -> None:
        """Close the socket. May be called again."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None
