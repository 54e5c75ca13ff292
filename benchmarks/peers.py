"""Other places where a program could keep blocks: 8 MiB values, one a request, against a local memcpy.

The bytes start and end in the client's memory in all cases. Redis is asked over its Unix socket in plain RESP, sent
from and received into that memory, without any client library; it is left out where there is no ``redis-server``.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.daemon import daemon
from benchmarks.floor import MemcpyFloor
from benchmarks.memory import affordable, await_mapped, shared
from benchmarks.paired import Spread, Timed, alternate
from benchmarks.report import Found, main, ratio, say
from hpkv_client.client import BlockCache

BLOCK_BYTES = 8 << 20
SIDE_BYTES = 1 << 30
SMALLEST_SIDE_BYTES = 256 << 20
READY_SECONDS = 10.0

Action = Callable[[int, memoryview], None]
"""Stores a value under a number, or fills memory with it."""


class Redis:
    """One connection."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))

    def _line(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\r\n"):
            line += self._socket.recv(1)
        return bytes(line)

    def store(self, number: int, value: memoryview) -> None:
        """SET"""
        self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$8\r\n%08d\r\n$%d\r\n" % (number, len(value)))
        self._socket.sendall(value)
        self._socket.sendall(b"\r\n")
        if self._line() != b"+OK\r\n":
            raise RuntimeError("redis refused a value")

    def load(self, number: int, into: memoryview) -> None:
        """GET"""
        self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$8\r\n%08d\r\n" % number)
        if self._line() != b"$%d\r\n" % len(into):
            raise RuntimeError("redis lost a value")
        view = into
        while view:
            view = view[self._socket.recv_into(view) :]
        self._line()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


@contextmanager
def redis() -> Iterator[Redis | None]:
    """A server without persistence; None where it is not installed."""
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="hpkv-bench-") as directory:
        path = Path(directory, "redis.sock")
        command = [server, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", directory]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not path.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("redis-server did not start")
                time.sleep(0.01)
            connection = Redis(path)
            yield connection
            connection.close()
        finally:
            process.terminate()
            process.wait()


class Files:
    """A file a block, on tmpfs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def store(self, number: int, value: memoryview) -> None:
        """Write a file."""
        target = os.open(self._directory / str(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        if os.write(target, value) != len(value):
            raise RuntimeError("a short write")
        os.close(target)

    def load(self, number: int, into: memoryview) -> None:
        """Read it."""
        source = os.open(self._directory / str(number), os.O_RDONLY)
        if os.readv(source, [into]) != len(into):
            raise RuntimeError("a short read")
        os.close(source)


def _timed(action: Action, cache: BlockCache, start: int) -> Timed:
    numbers = itertools.cycle(range(cache.arena_blocks))
    places = itertools.islice(itertools.cycle(range(cache.arena_blocks)), start, None)

    def sample() -> float:
        number, place = next(numbers), cache.block(next(places))
        started = time.perf_counter()
        action(number, place)
        return time.perf_counter() - started

    return sample


def _hpkv(cache: BlockCache) -> tuple[Timed, Timed]:
    """Puts of keys that are always new, and gets of the latest of them."""
    written = itertools.count()
    stored: list[bytes] = []
    places = itertools.cycle(range(cache.arena_blocks))
    wanted = itertools.count()

    def put() -> float:
        stored.append(b"%d" % next(written))
        place = next(places)
        started = time.perf_counter()
        kept = cache.put_arena(stored[-1:], [place])
        taken = time.perf_counter() - started
        if not kept:
            raise RuntimeError("hpkvd refused a block")
        return taken

    def get() -> float:
        recent = stored[-cache.arena_blocks * 3 // 4 :]
        key, place = recent[next(wanted) % len(recent)], next(places)
        started = time.perf_counter()
        found = cache.get_arena([key], [place])
        taken = time.perf_counter() - started
        if not found[0]:
            raise RuntimeError("hpkvd lost a block")
        return taken

    return put, get


def run(quick: bool) -> Found:
    """All that there are, in turn."""
    side_bytes = affordable(SIDE_BYTES, 5, SMALLEST_SIDE_BYTES)
    blocks = side_bytes // BLOCK_BYTES
    rounds = 10 if quick else 200
    measures = []
    with ExitStack() as stack:
        served = stack.enter_context(daemon(side_bytes))
        cache = stack.enter_context(BlockCache("peers", BLOCK_BYTES, arena_blocks=blocks, socket=served.socket))
        for index in range(blocks):
            cache.block(index)[:] = bytes(BLOCK_BYTES)
        await_mapped(served.movers()[0])
        stand_in = stack.enter_context(shared(side_bytes))
        arena = cache._memory.handle
        floor = stack.enter_context(MemcpyFloor(arena.fd, side_bytes, stand_in.handle.fd, side_bytes))
        files = Files(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hpkv-bench-", dir="/dev/shm"))))
        server = stack.enter_context(redis())
        put, get = _hpkv(cache)
        puts, gets = {"HPKV": put}, {"HPKV": get}
        for name, peer in (("Redis", server), ("files on tmpfs", files)):
            if peer is not None:
                puts[name] = _timed(peer.store, cache, blocks // 3)
                gets[name] = _timed(peer.load, cache, blocks // 2)
        numbers = itertools.cycle(range(blocks))

        def copy(store: bool) -> float:
            block = next(numbers)
            return floor.copy(store, [block], [(blocks - 1 - block) * BLOCK_BYTES], BLOCK_BYTES, 1, 0)

        for verb, samples, store in (("put", puts, True), ("get", gets, False)):
            alternate(partial(copy, store), samples, blocks)
            for name, pairs in alternate(partial(copy, store), samples, rounds).items():
                milliseconds = {"ms": Spread.of(pairs.samples).median * 1e3}
                measures.append(ratio(f"{name}: {verb} of {BLOCK_BYTES >> 20} MiB", pairs.speed, context=milliseconds))
                say(f"{measures[-1].name}: {measures[-1].value:.3f}")
    return measures, {"side_bytes": side_bytes, "rounds": rounds, "redis": server is not None}


if __name__ == "__main__":
    sys.exit(main("peers", __doc__, run))
