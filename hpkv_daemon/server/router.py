"""A ROUTER socket on the event loop: drained by its file descriptor, no future per message."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

import zmq

from hpkv_client.wire import MAX_FRAME
from hpkv_daemon.service.sessions import Peer

log = logging.getLogger(__name__)

_BATCH = 256
"""Requests handled before timers and movers get their turn."""
_UNREAD = 10_000
"""Replies kept for one peer that does not read them (half as many in the worst case); more are dropped."""
_UNSERVED = 1024
"""Requests taken from one peer that asks faster than it can be served; further ones wait on its side."""

_REMEMBERED_PEERS = 1024
"""Senders whose address is not parsed anew with each message."""

_READABLE = int(zmq.POLLIN)
_NOW = int(zmq.NOBLOCK)
_NOW_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

Handler = Callable[[Peer, bytes], bytes | None]


class Router(ABC):
    """Owns a listening socket. ``handler`` is called for each frame and may answer at once.

    The descriptor of a ZeroMQ socket is edge-triggered: after every receive *and every send* its events must be
    looked at before waiting again, or messages stay unseen.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 16)
        self._socket = self._context.socket(zmq.ROUTER)
        # Limits count only when set before bind.
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        self._socket.setsockopt(zmq.SNDHWM, _UNREAD)
        self._socket.setsockopt(zmq.RCVHWM, _UNSERVED)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self._handler: Handler | None = None
        self._peers: dict[tuple[bytes, str], Peer] = {}
        self._scheduled = False
        self._closed = False

    @abstractmethod
    def _parse(self, identity: bytes, address: str) -> Peer:
        """The sender with this ``Peer-Address``. Raises ``ValueError`` for one that is none."""

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
            # Two sends: half the time of send_multipart.
            self._socket.send(identity, _NOW_MORE)
            self._socket.send(frame, _NOW)
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
            # Asking first is cheaper than a receive in vain.
            if self._closed or not int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return
            self._serve_one()
        self._schedule()

    def _serve_one(self) -> None:
        identity = self._socket.recv(_NOW)
        # Only a frame that is not copied tells who sent it.
        frame = self._socket.recv(_NOW, copy=False)
        whole = not frame.more
        last = frame
        while last.more:
            last = self._socket.recv(_NOW, copy=False)
        try:
            peer = self._peer(identity, str(frame.get("Peer-Address")))
        except (zmq.ZMQError, ValueError):
            log.warning("dropped a message: its sender cannot be told")
            return
        assert self._handler is not None
        # A message of more frames is none of ours: it counts as an empty one.
        reply = self._handler(peer, frame.bytes if whole else b"")
        if reply is not None:
            self._transmit(identity, reply)

    def _peer(self, identity: bytes, address: str) -> Peer:
        """The sender of a frame; ``address`` comes anew with every frame."""
        peer = self._peers.get((identity, address))
        if peer is None:
            if len(self._peers) >= _REMEMBERED_PEERS:
                self._peers.clear()
            peer = self._peers[identity, address] = self._parse(identity, address)
        return peer

    def close(self) -> None:
        """Stop listening, give pending replies a moment."""
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()
