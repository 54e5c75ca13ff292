"""``FakeDaemon``: a daemon in a thread of your test, for tests of programs that use HPKV.

It speaks the whole protocol over a real socket and really moves the bytes, but has no pool, no mover and no
limit: blocks lie in a dict and stay there. ``BlockCache`` and connectors work with it as with the real one::

    with FakeDaemon() as daemon, BlockCache("mine", 4096, socket=daemon.socket) as cache:
        cache.put({b"key": bytes(4096)})
        daemon.down()

What it does not do: notice the death of a process, expire leases, tell users apart.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

import zmq

from hpkv_client import wire
from hpkv_client.errors import CopyFailed, HpkvError, ProtocolError
from hpkv_client.fake import FakeService
from hpkv_client.transport import endpoint
from hpkv_client.types import BlockKey
from hpkv_client.wire import Request

_POLL_MS = 20


class FakeDaemon:
    """The daemon. A context manager: it is up inside, and its directory is gone afterwards.

    ``socket`` is where it listens; ``requests`` holds every request it understood, oldest first; ``blocks``
    maps (namespace, key) to the bytes of a canonical block; ``delay`` seconds pass before each reply.
    """

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="hpkv-fake-"))
        self.socket = self._directory / "hpkvd.sock"
        self.blocks: dict[tuple[bytes, BlockKey], bytes] = {}
        self.requests: list[Request] = []
        self.delay = 0.0
        self._service = FakeService(self.blocks)
        self._failures: dict[str, list[HpkvError]] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def epoch(self) -> str:
        """Changes whenever the daemon comes up."""
        return self._service.epoch

    def up(self) -> None:
        """Serve, under a new epoch; nothing changes if it does already."""
        if self._thread is not None:
            return
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME)
        router.bind(endpoint(self.socket))
        self._service = FakeService(self.blocks)
        self._stopping.clear()
        self._thread = threading.Thread(target=self._serve, args=(context, router), daemon=True)
        self._thread.start()

    def down(self, keep_blocks: bool = False) -> None:
        """Be gone, as after a crash: no socket, no sessions, and no blocks either unless they are kept."""
        if self._thread is None:
            return
        self._stopping.set()
        self._thread.join()
        self._thread = None
        self.socket.unlink(missing_ok=True)
        self._service.forget_sessions()
        if not keep_blocks:
            self.blocks.clear()

    def forget_sessions(self) -> None:
        """Every client is a stranger from now on and has to say hello again."""
        with self._lock:
            self._service.forget_sessions()

    def fail_next(self, verb: str, error: HpkvError | None = None) -> None:
        """Refuse the next request of this verb (with ``CopyFailed`` unless told otherwise). Adds up."""
        with self._lock:
            self._failures.setdefault(verb, []).append(error or CopyFailed("failed on request of a test"))

    def asked(self, verb: str) -> list[Request]:
        """The requests of one verb so far."""
        return [request for request in list(self.requests) if request.verb == verb]

    def wait_for(self, verb: str, count: int = 1, timeout: float = 5.0) -> list[Request]:
        """The requests of a verb, once there are ``count``; ``AssertionError`` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while len(found := self.asked(verb)) < count:
            if time.monotonic() > deadline:
                raise AssertionError(f"{len(found)} requests of verb {verb} after {timeout:g} s, not {count}")
            time.sleep(0.005)
        return found

    def close(self) -> None:
        """Be gone for good."""
        self.down()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes]) -> None:
        try:
            while not self._stopping.is_set():
                if not router.poll(_POLL_MS):
                    continue
                identity, *frames = router.recv_multipart()
                reply = self._reply(frames[0] if len(frames) == 1 else b"")
                if reply is None or self._stopping.wait(self.delay):
                    continue
                router.send_multipart([identity, reply])
        finally:
            router.close(0)
            context.term()

    def _reply(self, frame: bytes) -> bytes | None:
        try:
            request = wire.decode_request(frame)
        except ProtocolError as problem:
            request_id = wire.request_id_of(frame)
            return None if request_id is None else wire.encode_error(request_id, problem)
        with self._lock:
            self.requests.append(request)
            try:
                if self._failures.get(request.verb):
                    raise self._failures[request.verb].pop(0)
                return wire.encode_reply(request.id, self._service.answer(request))
            except HpkvError as problem:
                return wire.encode_error(request.id, problem)
            except Exception as bug:  # noqa: BLE001  (it must be told to who asked, not end the thread)
                return wire.encode_error(request.id, HpkvError(f"the fake failed: {bug!r}", "report this"))
