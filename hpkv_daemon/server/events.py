"""Publishes KV events on a PUB socket, and gives late joiners what they missed, or all that is there, on a ROUTER.

Frames are those of vLLM's own publisher: topic, sequence number (8 bytes, big-endian), batch. A subscriber that does
not keep up loses batches, sees the gap, and asks for them; nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from hpkv_client.address import ClusterKey
from hpkv_client.errors import ConfigError
from hpkv_client.values import SNAPSHOT_SUFFIX
from hpkv_daemon.server.network import OnlyTheKey

TOPIC = b"hpkv"
END = (-1).to_bytes(8, "big", signed=True)
"""In place of a sequence number: nothing more follows."""
_UNREAD = 1000
"""Batches kept for one subscriber that does not read them; more are dropped, for that one."""
_REMEMBERED, _REMEMBERED_BYTES = 10_000, 8 << 20
"""Batches that can be asked for again, and their bytes."""
_MOST_ASKERS = 16
"""Requests that wait for their turn; further ones get an empty answer."""
_PATIENCE = 200
"""Tries to give a full asker its next batch, ``_PAUSE_SECONDS`` apart, before it is given up."""
_PAUSE_SECONDS = 0.05


Frames = tuple[bytes, bytes, bytes]
"""Topic, sequence number, batch."""
_END: Frames = (b"", END, b"")


@dataclass(slots=True)
class _Asker:
    identity: bytes
    answer: Iterator[Frames]
    waits: Frames | None = None
    """What it could not take yet."""
    failures: int = 0


def snapshot_endpoint(endpoint: str) -> str:
    """Where late joiners ask: one port further, or a socket beside it."""
    if endpoint.startswith("ipc://"):
        return endpoint + SNAPSHOT_SUFFIX
    place, _, port = endpoint.rpartition(":")
    return f"{place}:{int(port) + 1}"


class EventPublisher:
    """Owns both sockets. Control loop only. ``close`` it. Raises ``ConfigError`` when they cannot be had.

    ``key``: who wants to connect over TCP must have it; None only for addresses that other machines do not reach.
    """

    def __init__(
        self, endpoint: str, mode: int, group: str | None, key: ClusterKey | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.endpoint = endpoint
        self._loop = loop
        self._snapshot: Callable[[], Iterator[tuple[int, bytes]]] | None = None
        self._remembered: deque[tuple[int, bytes]] = deque()
        self._remembered_bytes = 0
        self._last = 0
        self._askers: deque[_Asker] = deque()
        self._context = zmq.Context()
        self._authenticator: AsyncioAuthenticator | None = None
        if key is not None:
            self._authenticator = AsyncioAuthenticator(zmq.asyncio.Context(self._context))
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", OnlyTheKey(key))
        self._events = self._context.socket(zmq.PUB)
        self._requests = self._context.socket(zmq.ROUTER)
        # Else what a full asker cannot take would be dropped without a word.
        self._requests.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._requests.setsockopt(zmq.MAXMSGSIZE, 1024)
        self._paths: list[Path] = []
        try:
            self._bind(self._events, endpoint, mode, group, key)
            self._bind(self._requests, snapshot_endpoint(endpoint), mode, group, key)
        except (zmq.ZMQError, OSError) as problem:
            self.close()
            raise ConfigError(
                f"cannot publish events on {endpoint}: {problem}",
                "set HPKV_EVENTS to a free port, with another free one behind it, or to a writable place",
            ) from None

    def _bind(
        self, socket: zmq.Socket[bytes], endpoint: str, mode: int, group: str | None, key: ClusterKey | None
    ) -> None:
        socket.setsockopt(zmq.SNDHWM, _UNREAD)
        socket.setsockopt(zmq.LINGER, 200)
        if endpoint.startswith("tcp://"):
            socket.setsockopt(zmq.IPV6, int(endpoint.startswith("tcp://[")))
            if key is not None:
                socket.setsockopt(zmq.CURVE_SERVER, 1)
                socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
            socket.bind(endpoint)
            return
        path = Path(endpoint.removeprefix("ipc://"))
        # A umask that only narrows: nobody connects in the moment before chmod.
        before = os.umask(0o777 & ~mode)
        try:
            socket.bind(endpoint)
        finally:
            os.umask(before)
        self._paths.append(path)
        if group is not None:
            shutil.chown(path, group=group)
        os.chmod(path, mode)

    def publish(self, sequence: int, batch: bytes) -> None:
        """Send a batch to whoever listens; nobody does at the very end."""
        if self._events.closed:
            return
        with contextlib.suppress(zmq.Again):
            self._events.send_multipart((TOPIC, _eight(sequence), batch), zmq.NOBLOCK)
        self._remembered.append((sequence, batch))
        self._remembered_bytes += len(batch)
        self._last = sequence
        while self._remembered_bytes > _REMEMBERED_BYTES or len(self._remembered) > _REMEMBERED:
            self._remembered_bytes -= len(self._remembered.popleft()[1])

    def serve(self, snapshot: Callable[[], Iterator[tuple[int, bytes]]]) -> None:
        """Begin to answer late joiners. ``snapshot`` gives all that is there, part by part."""
        self._snapshot = snapshot
        self._loop.add_reader(self._requests.fileno(), self._go_on)
        self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Take what is asked, give one batch. The descriptor is edge-triggered: after a send all is looked at again."""
        if self._requests.closed:
            return
        try:
            while True:
                self._take(self._requests.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            pass
        if self._askers:
            self._give(self._askers[0])

    def _take(self, frames: list[bytes]) -> None:
        """``[identity, empty, first sequence number]``, as vLLM's replay takes it."""
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        first = int.from_bytes(frames[2], "big")
        batches = self._since(first) if len(self._askers) < _MOST_ASKERS else iter(())
        answer = ((TOPIC, _eight(sequence), batch) for sequence, batch in batches)
        self._askers.append(_Asker(frames[0], chain(answer, (_END,))))

    def _since(self, first: int) -> Iterator[tuple[int, bytes]]:
        """From the batch ``first`` on, if all of them are remembered, else everything anew."""
        known = [entry for entry in self._remembered if entry[0] >= first]
        complete = bool(known) and [number for number, _ in known] == list(range(first, first + len(known)))
        if complete or first == self._last + 1 or self._snapshot is None:
            return iter(known)
        return self._snapshot()

    def _give(self, asker: _Asker) -> None:
        frames = asker.waits or next(asker.answer)
        over, pause = frames is _END, 0.0
        try:
            self._requests.send_multipart((asker.identity, b"", *frames), zmq.NOBLOCK)
            asker.waits, asker.failures = None, 0
        except zmq.Again:
            asker.waits, asker.failures, pause = frames, asker.failures + 1, _PAUSE_SECONDS
            over = asker.failures > _PATIENCE
        except zmq.ZMQError:
            # It has left.
            over = True
        if over:
            self._askers.popleft()
        self._loop.call_later(pause, self._go_on)

    def close(self) -> None:
        """Stop publishing; what was sent has a moment to leave."""
        if not self._requests.closed and self._snapshot is not None:
            self._loop.remove_reader(self._requests.fileno())
        self._events.close()
        self._requests.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        for path in self._paths:
            path.unlink(missing_ok=True)


def _eight(number: int) -> bytes:
    return number.to_bytes(8, "big")
