"""One DEALER socket to the daemon: requests out, replies in, nothing waits longer than it is told to."""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import zmq

from hpkv_client import wire
from hpkv_client.address import Address, NodeAddress
from hpkv_client.errors import ConfigError, NotPermitted, NotRunning, ProtocolError, Unreachable
from hpkv_client.wire import Body, Reply

MAX_SOCKET_PATH = 107
"""Longest path of a Unix socket (sun_path without its terminating zero)."""

_QUEUE = 10_000
"""Messages kept for a daemon that does not read; more are refused, not queued."""


def endpoint(socket_path: Path) -> str:
    """The ZeroMQ address of a socket path. Raises ``ConfigError`` for one the kernel cannot hold."""
    length = len(os.fsencode(socket_path))
    if length > MAX_SOCKET_PATH:
        raise ConfigError(
            f"socket path {socket_path} has {length} bytes, the kernel allows {MAX_SOCKET_PATH}",
            "set HPKV_SOCKET to a shorter path",
        )
    return f"ipc://{socket_path}"


def require_socket(address: Address) -> None:
    """Raise ``NotRunning`` or ``NotPermitted`` early, instead of a time-out later. Of other nodes nothing is known."""
    if isinstance(address, NodeAddress):
        return
    try:
        mode = address.stat().st_mode
    except FileNotFoundError:
        raise NotRunning(f"no hpkvd on {address}", "run 'hpkvd start'") from None
    except PermissionError:
        raise _denied(address) from None
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{address} is not a socket", "set HPKV_SOCKET to another path")
    if not os.access(address, os.W_OK):
        raise _denied(address)


def _denied(socket_path: Path) -> NotPermitted:
    return NotPermitted(f"no access to {socket_path}", "join the group of the socket, or run as its owner")


_HEARTBEAT_MS = 2000
"""A node that vanished without a word is noticed within two of these, and connected to anew when it is back."""


class Channel:
    """Requests and replies over one socket. Not thread-safe; owns its socket, ``close`` it.

    Request ids start at random, so a late reply to an earlier process never fits one of ours.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.session = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._next_id = secrets.randbits(40) << 20
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        place = str(self.address) if isinstance(self.address, NodeAddress) else endpoint(self.address)
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _QUEUE)
        socket.setsockopt(zmq.RCVHWM, _QUEUE)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME)
        if isinstance(self.address, NodeAddress):
            key = self.address.key
            socket.setsockopt(zmq.CURVE_SERVERKEY, key.public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
            socket.setsockopt(zmq.IPV6, int(":" in self.address.place.rpartition(":")[0]))
            socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_MS)
        socket.connect(place)
        return socket

    def reset(self) -> None:
        """Drop everything queued in either direction and connect anew."""
        self._socket.close(0)
        self._socket = self._connect()

    def close(self) -> None:
        """Close the socket; queued messages are dropped."""
        self._socket.close(0)

    def send(self, verb: str, body: Body, session: int | None = None) -> int:
        """Queue a request without waiting; its id. Raises ``Unreachable`` when the queue is full.

        ``session`` is the channel's own unless another one of this process is named.
        """
        self._next_id += 1
        frame = wire.encode_request(verb, self._next_id, self.session if session is None else session, body)
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise Unreachable(f"hpkvd on {self.address} does not read", "see 'hpkvd status'") from None
        return self._next_id

    def replies(self, timeout: float = 0.0) -> Iterator[Reply]:
        """The replies that are here, waiting up to ``timeout`` seconds for the first. Foreign frames are skipped."""
        if timeout > 0 and not self._socket.poll(max(1, round(timeout * 1000))):
            return
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                yield wire.decode_reply(frame)
            except ProtocolError:
                continue

    def call(self, verb: str, body: Body, timeout: float) -> Body:
        """One request and its reply. Raises what the daemon answers, or ``Unreachable`` after ``timeout`` seconds.

        Replies to earlier requests are dropped: do not mix with ``send`` on one channel.
        """
        request = self.send(verb, body)
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            for reply in self.replies(left):
                if reply.id == request:
                    return reply.result()
        raise Unreachable(
            f"hpkvd on {self.address} did not answer {verb} within {timeout:g} s",
            "see 'hpkvd status' and the daemon's log",
        )


def await_any(channels: Iterable[Channel], timeout: float) -> None:
    """Wait up to ``timeout`` seconds until one of several channels has a reply."""
    poller = zmq.Poller()
    for channel in channels:
        poller.register(channel._socket, zmq.POLLIN)
    poller.poll(max(1, round(timeout * 1000)))
