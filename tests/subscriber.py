"""A router's view of a daemon: it follows the KV events and asks for what it missed."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import msgpack
import zmq

from hpkv_client.address import ClusterKey
from hpkv_daemon.server.events import END, TOPIC, snapshot_endpoint

SECONDS = 10.0


@dataclass
class Batch:
    """One message as it came."""

    sequence: int
    payload: bytes
    events: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        _, self.events = msgpack.unpackb(self.payload)


class Subscriber:
    """Knows which blocks the daemon has, and from which batches it knows it. A context manager.

    ``key``: the cluster's; ``own``: with which it comes, by default the same.
    """

    def __init__(self, endpoint: str, key: ClusterKey | None = None, own: ClusterKey | None = None) -> None:
        self._context = zmq.Context()
        self._key, self._own = key, own or key
        self._events = self._socket(zmq.SUB)
        self._events.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self._events.connect(endpoint)
        self._endpoint = endpoint
        self.held: set[bytes] = set()
        self.parents: dict[bytes, bytes | None] = {}
        self.seen: list[Batch] = []
        self.last = 0
        self.patience = SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._events.close(0)
        self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        if self._key is not None and self._own is not None:
            made.setsockopt(zmq.CURVE_SERVERKEY, self._key.public)
            made.setsockopt(zmq.CURVE_PUBLICKEY, self._own.public)
            made.setsockopt(zmq.CURVE_SECRETKEY, self._own.secret)
        return made

    def ask(self, first: int) -> list[Batch]:
        """The daemon's answer to a request for batches from ``first`` on."""
        with self._socket(zmq.DEALER) as request:
            request.connect(snapshot_endpoint(self._endpoint))
            request.send_multipart((b"", struct.pack(">Q", first)))
            found = []
            while True:
                assert request.poll(int(self.patience * 1000)), "no answer to a request for events"
                empty, topic, sequence, payload = request.recv_multipart()
                assert empty == b""
                if sequence == END:
                    return found
                assert topic == TOPIC
                found.append(Batch(int.from_bytes(sequence, "big"), payload))

    def join(self) -> None:
        """Begin with all that is there."""
        for batch in self.ask(0):
            self._apply(batch)

    def follow(self, seconds: float = 0.0) -> bool:
        """Take what has come; whether nothing was missed. Waits so long for the first message."""
        whole = True
        while self._events.poll(int(seconds * 1000)):
            seconds = 0.0
            topic, sequence, payload = self._events.recv_multipart()
            assert topic == TOPIC
            batch = Batch(int.from_bytes(sequence, "big"), payload)
            if batch.sequence <= self.last:
                continue
            whole = whole and batch.sequence == self.last + 1
            self._apply(batch)
        return whole

    def until(self, held: set[bytes], seconds: float = SECONDS) -> None:
        """Follow until exactly these blocks are there."""
        deadline = time.monotonic() + seconds
        while self.held != held:
            left = deadline - time.monotonic()
            assert left > 0, f"{len(self.held)} blocks are there, not {len(held)}"
            assert self.follow(min(left, 0.2)), "events were lost"

    def _apply(self, batch: Batch) -> None:
        self.seen.append(batch)
        self.last = batch.sequence
        for event in batch.events:
            if event["type"] == "AllBlocksCleared":
                self.held.clear()
            elif event["type"] == "BlockRemoved":
                self.held.difference_update(event["block_hashes"])
            else:
                parent = event["parent_block_hash"]
                for key in event["block_hashes"]:
                    self.parents[key], parent = parent, key
                self.held.update(event["block_hashes"])
