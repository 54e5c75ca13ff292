"""``BlockCache`` end to end, 8 blocks of 8 MiB a request, against the same copies made locally by memcpy.

A request goes through the socket, the control process and the mover. The floor is a process that maps the client's
arena and the daemon's pool itself and copies between them in a C loop: once as any program's memcpy does, once with
the mover's tunables of glibc (non-temporal stores).
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from contextlib import ExitStack
from functools import partial

from benchmarks.daemon import daemon
from benchmarks.floor import MemcpyFloor
from benchmarks.memory import affordable, await_mapped
from benchmarks.paired import Pairs, Spread, alternate
from benchmarks.report import Aim, Found, Measure, main, ratio, say, speeds
from hpkv_client.client import BlockCache
from hpkv_daemon.movers.parent import _TUNABLES
from hpkv_daemon.pool.file import FILE_NAME

BLOCK_BYTES = 8 << 20
BLOCKS = 8
"""Blocks of one request."""
SIDE_BYTES = 1 << 30
"""Arena of the client, and as much pool."""
SMALLEST_SIDE_BYTES = 512 << 20
REQUEST_BYTES = BLOCKS * BLOCK_BYTES
AIM = Aim(0.9)


class Requests:
    """Puts and gets of ``BLOCKS`` blocks that walk through the arena and through keys."""

    def __init__(self, cache: BlockCache, keys: int) -> None:
        self._cache = cache
        self._batches = cache.arena_blocks // BLOCKS
        self._numbers = itertools.count()
        self._stored: list[list[bytes]] = []
        self._keep = keys // BLOCKS
        self._next = 0
        self._places = itertools.cycle(random.Random(1).sample(range(self._batches), self._batches))

    def _place(self) -> range:
        first = next(self._places) * BLOCKS
        return range(first, first + BLOCKS)

    def put(self) -> float:
        """Seconds to store new keys; the oldest ones are forgotten here, and evicted there."""
        keys = [b"key-%d" % next(self._numbers) for _ in range(BLOCKS)]
        place = self._place()
        started = time.perf_counter()
        kept = self._cache.put_arena(keys, place)
        taken = time.perf_counter() - started
        if kept != BLOCKS:
            raise RuntimeError(f"{kept} of {BLOCKS} blocks were kept")
        self._stored.append(keys)
        del self._stored[: -self._keep]
        return taken

    def get(self) -> float:
        """Seconds to load keys that were not used for longest."""
        self._next = (self._next + 1) % len(self._stored)
        keys, place = self._stored[self._next], self._place()
        started = time.perf_counter()
        found = self._cache.get_arena(keys, place)
        taken = time.perf_counter() - started
        if not all(found):
            raise RuntimeError(f"{sum(found)} of {BLOCKS} blocks were found")
        return taken


class LocalCopies:
    """The same amount between two shared memories, in a walk of its own."""

    def __init__(self, floor: MemcpyFloor, blocks: int) -> None:
        self._floor = floor
        starts = range(0, blocks - BLOCKS + 1, BLOCKS)
        self._from = itertools.cycle(random.Random(2).sample(starts, len(starts)))
        self._to = itertools.cycle(random.Random(3).sample(starts, len(starts)))

    def __call__(self, store: bool) -> float:
        """Seconds for one request's worth of bytes."""
        first, target = next(self._from), next(self._to)
        blocks = range(first, first + BLOCKS)
        slots = [(target + i) * BLOCK_BYTES for i in range(BLOCKS)]
        return self._floor.copy(store, blocks, slots, BLOCK_BYTES, 1, 0)


def prove_right(cache: BlockCache) -> None:
    """Raise unless bytes come back as they went in."""
    for index in range(BLOCKS):
        cache.block(index)[:64] = bytes([index + 1]) * 64
    keys = [b"proof-%d" % index for index in range(BLOCKS)]
    cache.put_arena(keys, range(BLOCKS))
    cache.get_arena(keys, range(BLOCKS, 2 * BLOCKS))
    for index in range(BLOCKS):
        if cache.block(BLOCKS + index)[:64] != bytes([index + 1]) * 64:
            raise RuntimeError("a block came back different")


def touch(cache: BlockCache) -> None:
    """Take every page of the arena."""
    zeros = bytes(BLOCK_BYTES)
    for index in range(cache.arena_blocks):
        cache.block(index)[:] = zeros


def run(quick: bool) -> Found:
    """Puts, then gets."""
    side_bytes = affordable(SIDE_BYTES, 2, SMALLEST_SIDE_BYTES)
    rounds = 8 if quick else 150
    blocks = side_bytes // BLOCK_BYTES
    measures = []
    with ExitStack() as stack:
        served = stack.enter_context(daemon(side_bytes))
        cache = stack.enter_context(BlockCache("benchmark", BLOCK_BYTES, arena_blocks=blocks, socket=served.socket))
        touch(cache)
        prove_right(cache)
        await_mapped(served.movers()[0])
        pool = stack.enter_context((served.pool_directory / FILE_NAME).open("r+b"))
        memories = (cache._memory.handle.fd, side_bytes, pool.fileno(), side_bytes)
        floors = {
            "": stack.enter_context(MemcpyFloor(*memories)),
            ", streaming local memcpy": stack.enter_context(MemcpyFloor(*memories, tunables=_TUNABLES)),
        }
        requests = Requests(cache, blocks // 2)
        for verb, sample, store in (("put", requests.put, True), ("get", requests.get, False)):
            for name, floor in floors.items():
                local = partial(LocalCopies(floor, blocks), store)
                alternate(local, {verb: sample}, 2 * blocks // BLOCKS)
                pairs = alternate(local, {verb: sample}, rounds)[verb]
                measures.append(_measure(verb + name, pairs, Aim() if name else AIM))
                say(f"{measures[-1].name}: {measures[-1].value:.3f}")
    return measures, {"arena_bytes": side_bytes, "pool_bytes": side_bytes, "rounds": rounds}


def _measure(name: str, pairs: Pairs, aim: Aim) -> Measure:
    overhead = Spread.of([sample - floor for floor, sample in zip(pairs.floors, pairs.samples, strict=True)])
    return ratio(
        f"{BLOCKS} x {BLOCK_BYTES >> 20} MiB through the socket, {name}",
        pairs.speed,
        aim,
        speeds(pairs, REQUEST_BYTES) | {"overhead_us": overhead.median * 1e6},
    )


if __name__ == "__main__":
    sys.exit(main("transfer", __doc__, run))
