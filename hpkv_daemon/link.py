"""The stream between the daemon and a process of its own: msgpack values over a socket pair."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgpack

_CHUNK = 1 << 18


class Link:
    """One end. Never waits: what the socket does not take is kept and sent by later calls of ``flush``."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=1 << 28)
        self._backlog = bytearray()
        self._unheard = False
        """The other end takes nothing any more."""
        self.closed = False

    def fileno(self) -> int:
        """Descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: list[Any]) -> None:
        """Queue one message and send what fits."""
        if not self._unheard:
            self._backlog += msgpack.packb(message)
            self.flush()

    def flush(self) -> bool:
        """Send more of the backlog; True when nothing is left."""
        while self._backlog and not self.closed:
            try:
                sent = self._socket.send(self._backlog)
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                # It ended; what it said before may lie here unread, and why it ended is the last of that.
                self._unheard = True
                self._backlog.clear()
                return True
            del self._backlog[:sent]
        return True

    def receive(self) -> Iterator[list[Any]]:
        """Messages that are here. Sets ``closed`` when the other end is gone."""
        self.flush()
        while not self.closed:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self.closed = True
                break
            self._unpacker.feed(data)
        yield from self._unpacker

    def close(self) -> None:
        """Close the socket."""
        self.closed = True
        self._socket.close()
