"""``/metrics``, ``/healthz`` and ``/readyz``: threads that ask the control loop for a snapshot, never the other way.

The loop copies its counters, some 100 us; a thread makes text of them, and talks to whoever scrapes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any, Protocol

from hpkv_client.errors import ConfigError, Unreachable
from hpkv_daemon.service.snapshot import Snapshot

log = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""The control loop hangs if it does not hand a snapshot over within this time."""
IDLE_SECONDS = 5.0
"""A connection that says nothing for so long is closed."""
MOST_CONNECTIONS = 16
"""More at a time are closed at once: scrapers are few."""
_PAUSE_SECONDS = 1.0
_TURN_SECONDS = 0.0005
_ENDPOINTS = "/metrics, /healthz or /readyz"


class Loop(Protocol):
    """The part of an event loop that another thread may use."""

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> object:
        """Run it in the loop."""


@contextlib.contextmanager
def http_server(place: str, chosen: bool) -> Iterator[HttpServer | None]:
    """A server that answers that the daemon starts; None for an empty ``place``, or one that nobody chose and is taken.

    Raises ``ConfigError`` when a place that was ``chosen`` cannot be had.
    """
    server = None
    try:
        server = HttpServer(place) if place else None
    except ConfigError as problem:
        if chosen:
            raise
        # Another daemon of this node has the default: blocks are worth serving all the same.
        log.warning("metrics are off: %s", problem)
    if server is None:
        yield None
        return
    # A scrape must not keep the control loop from its processor for 5 ms, as threads usually may.
    sys.setswitchinterval(_TURN_SECONDS)
    server.start()
    try:
        yield server
    finally:
        server.close()


class HttpServer(ThreadingMixIn, HTTPServer):
    """Listens from the constructor on, answers from ``start`` on, and knows of a loop from ``serve`` on. ``close`` it.

    Raises ``ConfigError`` when ``place`` (``HOST:PORT``, port 0 for any) cannot be had.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, place: str) -> None:
        host, _, port = place.rpartition(":")
        host = host.strip("[]")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._loop: Loop | None = None
        self._take: Callable[[], Snapshot] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="hpkvd-http", daemon=True)
        try:
            super().__init__(("" if host == "*" else host, int(port)), _Request)
        except OSError as problem:
            raise ConfigError(
                f"cannot serve metrics on {place}: {problem.strerror}",
                "set HPKV_METRICS to another HOST:PORT of this machine, or to off",
            ) from None
        self.place = f"{place.rpartition(':')[0]}:{self.socket.getsockname()[1]}"
        """``HOST:PORT`` with the port that it got."""

    def server_bind(self) -> None:
        """Without asking any name service who we are."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)

    def start(self) -> None:
        """Begin to answer: that the daemon starts."""
        self._thread.start()

    def serve(self, loop: Loop, take: Callable[[], Snapshot]) -> None:
        """The daemon serves. ``take`` is called in the loop."""
        self._loop, self._take = loop, take

    def withdraw(self) -> None:
        """The daemon is about to end: nobody is ready any more."""
        self._loop = self._take = None

    def snapshot(self) -> Snapshot | None:
        """From the loop; None while there is none. Raises ``Unreachable`` when the loop does not answer in time."""
        loop, take = self._loop, self._take
        if loop is None or take is None:
            return None
        answer: Future[Snapshot] = Future()

        def hand_over() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(take())
                except Exception as bug:  # noqa: BLE001  (it is the asking thread's to tell)
                    answer.set_exception(bug)

        try:
            loop.call_soon_threadsafe(hand_over)
            return answer.result(ANSWER_SECONDS)
        except RuntimeError:
            # The loop has ended meanwhile.
            return None
        except TimeoutError:
            answer.cancel()
            raise Unreachable(f"the control loop did not answer within {ANSWER_SECONDS:g} s", "see its log") from None

    def _accept(self) -> None:
        """In place of ``serve_forever``, which would look twice a second whether it is to end."""
        while not self._ended.is_set():
            try:
                request = self.get_request()
            except OSError:
                # Shut down; or no descriptor is left, which may change.
                self._ended.wait(_PAUSE_SECONDS)
            else:
                self.process_request(*request)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, if there is one left."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Whoever scrapes may leave at any moment."""
        log.debug("a request over HTTP failed", exc_info=True)

    def close(self) -> None:
        """Stop listening."""
        self._ended.set()
        if self._thread.is_alive():
            self.socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()
        self.server_close()


class _Request(BaseHTTPRequestHandler):
    server: HttpServer
    timeout = IDLE_SECONDS
    server_version, sys_version = "hpkvd", ""

    def log_message(self, format: str, *arguments: Any) -> None:
        """Scrapes are not worth a line."""

    def do_GET(self) -> None:
        """The name is that of ``BaseHTTPRequestHandler``."""
        answer = {"/metrics": self._metrics, "/healthz": self._health, "/readyz": self._readiness}
        path = self.path.partition("?")[0]
        if path not in answer:
            self._send(404, "text/plain; charset=utf-8", f"there is {_ENDPOINTS}\n".encode())
            return
        try:
            answer[path]()
        except Unreachable as problem:
            self._tell(503, {"alive": False, "ready": False, "problem": problem.message})

    def _metrics(self) -> None:
        # Not before somebody asks: it takes 40 ms of a start that others wait for.
        from prometheus_client.exposition import choose_encoder

        from hpkv_daemon.server.exposition import registry_of

        snapshot = self.server.snapshot()
        if snapshot is None:
            self._tell(503, {"ready": False, "problem": "the daemon does not serve yet, or not any more"})
            return
        encode, kind = choose_encoder(self.headers.get("Accept", ""))
        self._send(200, kind, encode(registry_of(snapshot)))

    def _health(self) -> None:
        self._tell(200, {"alive": True, "serving": self.server.snapshot() is not None})

    def _readiness(self) -> None:
        snapshot = self.server.snapshot()
        if snapshot is None:
            self._tell(503, {"ready": False, "problem": "the daemon does not serve yet, or not any more"})
            return
        storage = {name: snapshot.storage[name] for name in ("state", "reason")}
        self._tell(200, {"ready": True, "epoch": snapshot.identity.epoch, "storage": storage})

    def _tell(self, status: int, body: dict[str, object]) -> None:
        self._send(status, "application/json", json.dumps(body).encode() + b"\n")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
