"""The ROUTER socket on the event loop: drained by its file descriptor, no future per message."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import zmq

from hpkv_client.errors import ConfigError
from hpkv_client.transport import endpoint
from hpkv_client.wire import MAX_FRAME
from hpkv_daemon.service.sessions import Peer

log = logging.getLogger(__name__)

_BATCH = 256
"""Requests handled before timers and movers get their turn."""
_QUEUE = 10_000
"""Messages kept for one peer that does not read its replies; further ones to it are dropped."""

Handler = Callable[[Peer, bytes], bytes | None]


class Router:
    """Owns the listening socket. ``handler`` is called for each frame and may answer at once.

    The descriptor of a ZeroMQ socket is edge-triggered: after every receive *and every send* its events must be
    looked at before waiting again, or messages stay unseen.
    """

    def __init__(self, socket_path: Path, mode: int, group: str | None, loop: asyncio.AbstractEventLoop) -> None:
        self._path = socket_path
        self._loop = loop
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 16)
        self._socket = self._context.socket(zmq.ROUTER)
        # Limits count only when set before bind.
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUE)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUE)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self._handler: Handler | None = None
        self._scheduled = False
        self._closed = False
        self._bind(mode, group)

    def _bind(self, mode: int, group: str | None) -> None:
        # A umask that only narrows: nobody connects in the moment before chmod.
        before = os.umask(0o777 & ~mode)
        try:
            self._socket.bind(endpoint(self._path))
            if group is not None:
                shutil.chown(self._path, group=group)
            os.chmod(self._path, mode)
        except (zmq.ZMQError, OSError) as problem:
            self._context.destroy(0)
            raise ConfigError(
                f"cannot listen on {self._path}: {problem}", "set HPKV_SOCKET to a writable place"
            ) from None
        finally:
            os.umask(before)

    def serve(self, handler: Handler) -> None:
        """Start to call ``handler`` from the loop."""
        self._handler = handler
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._schedule()

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send a deferred reply; dropped if the peer is gone or does not read."""
        if self._closed:
            return
        self._transmit(identity, frame)
        self._schedule()

    def _transmit(self, identity: bytes, frame: bytes) -> None:
        try:
            self._socket.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.Again:
            # ROUTER drops for a full peer; this is its own last resort, and equally a loss for that peer only.
            return

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        for _ in range(_BATCH):
            if self._closed:
                return
            try:
                head = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                if self._socket.poll(0, zmq.POLLIN):
                    continue
                return
            self._serve_one(head)
        self._schedule()

    def _serve_one(self, head: zmq.Frame) -> None:
        frames = []
        while self._socket.getsockopt(zmq.RCVMORE):
            frames.append(self._socket.recv(zmq.NOBLOCK))
        try:
            peer = _peer(head)
        except (zmq.ZMQError, ValueError):
            log.warning("dropped a message: its sender cannot be told")
            return
        assert self._handler is not None
        # A message of more frames is none of ours: it counts as an empty one.
        reply = self._handler(peer, frames[0] if len(frames) == 1 else b"")
        if reply is not None:
            self._transmit(peer.identity, reply)

    def close(self) -> None:
        """Stop listening, give pending replies a moment, remove the socket file."""
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()
        if self._path.exists() and stat.S_ISSOCK(self._path.lstat().st_mode):
            self._path.unlink()


def _peer(head: zmq.Frame) -> Peer:
    """Identity of the sender; uid and pid are the kernel's word (SO_PEERCRED), not the sender's."""
    _, uid, _, pid = str(head.get("Peer-Address")).rsplit(":", 3)
    return Peer(head.bytes, int(uid), int(pid))
