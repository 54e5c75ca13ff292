"""Something on the daemon's socket that is no daemon, or one that has lost its mind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgpack
import zmq

from hpkv_client.transport import endpoint
from hpkv_client.wire import PROTOCOL

Answer = Callable[[str, int, dict[str, Any]], bytes]


def _noise(verb: str, request: int, body: dict[str, Any]) -> bytes:  # noqa: ARG001
    return b"\xc1" + bytes(range(200))


def _empty(verb: str, request: int, body: dict[str, Any]) -> bytes:  # noqa: ARG001
    return msgpack.packb([request, 0, {}])


def _sane_but(**lookups: Any) -> Answer:
    """Like a daemon that is ready, but with these answers to look-ups."""

    def answer(verb: str, request: int, body: dict[str, Any]) -> bytes:  # noqa: ARG001
        known: dict[str, Any] = {
            "hello": {"session": 1, "epoch": "mad", "major": PROTOCOL[0], "minor": PROTOCOL[1], "pid": 1},
            "register": {"ready": True},
            "heartbeat": {"epoch": "mad", "ready": True, "problem": ""},
            "match": lookups,
        }
        return msgpack.packb([request, 0, known.get(verb, {})])

    return answer


def _other_version(verb: str, request: int, body: dict[str, Any]) -> bytes:  # noqa: ARG001
    text = f"hpkvd 99.0 speaks hpkv/99.0, the client hpkv/{PROTOCOL[0]}.{PROTOCOL[1]}"
    return msgpack.packb([request, 1, {"code": "version", "message": text, "hint": "install the same release"}])


ANSWERS: dict[str, Answer] = {
    "noise": _noise,
    "empty": _empty,
    "negative": _sane_but(hit=-5, lease=1),
    "endless": _sane_but(hit=1 << 40, lease=1),
    "text": _sane_but(hit="all", lease="mine"),
    "nothing": _sane_but(),
    "other version": _other_version,
}


class Garbage:
    """Serves a socket path from a thread until it is left."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self._answer = answer
        self._stop = threading.Event()
        path.unlink(missing_ok=True)
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint(path))
        path.chmod(0o660)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(50):
                identity, frame = self._socket.recv_multipart()
                verb, request, _, body = msgpack.unpackb(frame)
                self._socket.send_multipart([identity, self._answer(verb, request, body)])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()
