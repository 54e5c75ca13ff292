"""The control plane: pings, pipelined requests and look-ups, against a bare ROUTER socket that echoes.

hpkvd runs with movers that copy nothing (``benchmarks.noop_daemon``); requests, replies, sessions, index and
leases are the real ones. Client and floor use the same plain DEALER socket and frames that were packed before.
Where the kernel puts the threads changes a ping twofold, so both servers are pinned alike: once to the client's
core, once to another.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import zmq

from benchmarks.daemon import Daemon, daemon
from benchmarks.echo import Server, echo
from benchmarks.paired import Pairs, Spread
from benchmarks.placement import cores, pin
from benchmarks.report import Aim, Found, Measure, main, ratio, say
from hpkv_client.memory import SharedMemory
from hpkv_client.transport import Channel
from hpkv_client.types import KEY_BYTES, Layer, RankShard, Run
from hpkv_client.wire import PROTOCOL, decode_reply, encode_request, handle_to_wire, pack_blocks, shard_to_wire

CHAIN_KEYS = 2000
BLOCK_BYTES = 4096
FEW_BLOCKS, MANY_BLOCKS = 2000, 1_000_000
PING_ECHO = bytes(64)
"""Makes a ping about 100 bytes."""
WINDOW = 256
"""Requests under way when they are pipelined."""
TOGETHER, APART = "one core", "two cores"
"""Placements of client and server."""
PINGS, MATCHES = 125, 25
"""Samples of one batch."""
AIMS = (Aim(at_most=1.2), Aim(50_000), Aim(at_most=1.5))
"""Of a ping, of pipelined requests, of a look-up."""
PAUSE_AIM = Aim(at_most=5.0)


class Dealer:
    """A plain socket: what any client pays, and no more."""

    def __init__(self, path: Path) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(10_000)
        self._socket.connect(f"ipc://{path}")

    def ask(self, frame: bytes) -> bytes:
        """One request and its reply."""
        self._socket.send(frame)
        return self._socket.recv()

    def time(self, frame: bytes) -> float:
        """Seconds of ``ask``."""
        started = time.perf_counter()
        self._socket.send(frame)
        self._socket.recv()
        return time.perf_counter() - started

    def pipeline(self, frame: bytes, count: int) -> float:
        """Seconds for ``count`` requests, ``WINDOW`` of them under way at any time."""
        send, receive = self._socket.send, self._socket.recv
        started = time.perf_counter()
        for _ in range(WINDOW):
            send(frame)
        for _ in range(count - WINDOW):
            receive()
            send(frame)
        for _ in range(WINDOW):
            receive()
        return time.perf_counter() - started

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(0)


@contextmanager
def dealers(ours: Path, theirs: Path) -> Iterator[tuple[Dealer, Dealer]]:
    """One socket to hpkvd, one to the floor."""
    pair = Dealer(ours), Dealer(theirs)
    try:
        yield pair
    finally:
        for dealer in pair:
            dealer.close()


@dataclass
class Chains:
    """Prefixes of ``CHAIN_KEYS`` blocks that are resident, and how long it took to store each."""

    session: int
    keys: list[bytes]
    store_seconds: list[float]


@contextmanager
def noop_daemon(blocks: int) -> Iterator[tuple[Daemon, Path]]:
    """hpkvd without copies and with room for the blocks; the file with its collections appears at its end."""
    with tempfile.TemporaryDirectory(prefix="hpkv-bench-") as directory:
        pauses = Path(directory, "pauses.json")
        command = [sys.executable, "-m", "benchmarks.noop_daemon", str(pauses)]
        with daemon(blocks * BLOCK_BYTES * 5 // 4 + (64 << 20), command) as served:
            yield served, pauses


@contextmanager
def filled(served: Daemon, blocks: int) -> Iterator[Chains]:
    """An engine that has stored so many blocks, in prefixes."""
    channel = served.channel()
    memory = SharedMemory(CHAIN_KEYS * BLOCK_BYTES)
    try:
        hello = {"major": PROTOCOL[0], "minor": PROTOCOL[1], "name": "benchmark", "engine": "benchmark"}
        channel.session = channel.call("hello", hello, 10.0)["session"]
        run = Run(0, 0, BLOCK_BYTES, 0, BLOCK_BYTES)
        registration = {
            "rank": 0,
            "world": 1,
            "namespace": secrets.token_bytes(KEY_BYTES),
            "model": "benchmark",
            "device": "cpu",
            "regions": [handle_to_wire(memory.handle)],
            **shard_to_wire(RankShard((Layer("block", BLOCK_BYTES, (run,)),), CHAIN_KEYS)),
        }
        channel.call("register", registration, 10.0)
        while not channel.call("heartbeat", {}, 10.0)["ready"]:
            time.sleep(0.01)
        yield _store(channel, blocks)
    finally:
        channel.close()
        memory.close()


def _store(channel: Channel, blocks: int) -> Chains:
    chains = Chains(channel.session, [], [])
    places = pack_blocks(range(CHAIN_KEYS))
    for job in range(blocks // CHAIN_KEYS):
        keys = secrets.token_bytes(KEY_BYTES * CHAIN_KEYS)
        started = time.perf_counter()
        answer = channel.call("store", {"job": job, "parent": None, "keys": keys, "blocks": places}, 30.0)
        chains.store_seconds.append(time.perf_counter() - started)
        if answer["kept"] != CHAIN_KEYS:
            raise RuntimeError(f"hpkvd kept {answer['kept']} of {CHAIN_KEYS} blocks")
        chains.keys.append(keys)
    return chains


@dataclass
class Batches:
    """Pairs of the batches' medians, and all single times."""

    pairs: Pairs
    samples: list[float]
    floors: list[float]

    @property
    def microseconds(self) -> dict[str, float]:
        """Percentiles of both sides."""
        figures = {}
        for prefix, values in (("", self.samples), ("floor_", self.floors)):
            ordered = sorted(values)
            for percent in (50, 99):
                figures[f"{prefix}p{percent}_us"] = ordered[len(ordered) * percent // 100] * 1e6
        return figures


def _median(values: Sequence[float]) -> float:
    return Spread.of(values).median


def batches(floor: Callable[[], list[float]], sample: Callable[[], list[float]], rounds: int) -> Batches:
    """Batches of the two sides in turn."""
    found = Batches(Pairs(), [], before := floor())
    for _ in range(rounds):
        taken, after = sample(), floor()
        found.pairs.add(_median(before), _median(taken), _median(after))
        found.samples.extend(taken)
        found.floors = found.floors + after
        before = after
    return found


def pings(served: Daemon, floor: Server, rounds: int, where: str, aim: Aim) -> list[Measure]:
    """One ping at a time, and the longest of them."""
    frame = encode_request("ping", 1 << 40, 0, {"echo": PING_ECHO})
    with dealers(served.socket, floor.socket) as (ours, theirs):
        if not decode_reply(ours.ask(frame)).ok:
            raise RuntimeError("hpkvd refused a ping")
        taken = batches(
            lambda: [theirs.time(frame) for _ in range(PINGS)],
            lambda: [ours.time(frame) for _ in range(PINGS)],
            rounds,
        )
    count = len(taken.samples)
    return [
        ratio(f"ping p50, {where}", taken.pairs.cost, aim, taken.microseconds),
        Measure(
            f"longest of {count:,} pings, {where}",
            max(taken.samples) * 1e3,
            "ms",
            note="with all that the machine's scheduler does to any process: compare the echo's own longest",
            context={"floor_longest_ms": max(taken.floors) * 1e3},
        ),
    ]


def rate(served: Daemon, floor: Server, count: int, rounds: int, where: str, aim: Aim) -> Measure:
    """Pipelined pings."""
    frame = encode_request("ping", 1 << 40, 0, {"echo": PING_ECHO})
    pairs = Pairs()
    with dealers(served.socket, floor.socket) as (ours, theirs):
        ours.ask(frame)
        before = theirs.pipeline(frame, count)
        for _ in range(rounds):
            taken, after = ours.pipeline(frame, count), theirs.pipeline(frame, count)
            pairs.add(before, taken, after)
            before = after
    rates = Spread.of([count / taken for taken in pairs.samples])
    floor_rate = _median([count / taken for taken in pairs.floors])
    return Measure(
        f"pipelined requests, {where}",
        rates.median,
        "/s",
        aim,
        rates.low,
        rates.high,
        context={"ratio": pairs.speed.median, "floor_per_s": floor_rate},
    )


def matches(served: Daemon, chains: Chains, floor: Server, rounds: int, name: str, aim: Aim) -> Measure:
    """Look-ups of whole resident prefixes; their leases are given back outside of the measured time."""
    order = random.Random(5).sample(chains.keys, min(len(chains.keys), 100))
    frames = cycle([encode_request("match", 1 << 40, chains.session, {"keys": keys}) for keys in order])
    with dealers(served.socket, floor.socket) as (ours, theirs):

        def sample() -> list[float]:
            taken, leases = [], []
            for _ in range(MATCHES):
                frame = next(frames)
                started = time.perf_counter()
                reply = ours.ask(frame)
                taken.append(time.perf_counter() - started)
                body = decode_reply(reply).result()
                if body["hit"] != CHAIN_KEYS:
                    raise RuntimeError(f"a match found {body['hit']} of {CHAIN_KEYS} blocks")
                leases.append(body["lease"])
            for lease in leases:
                ours.ask(encode_request("release", 1 << 40, chains.session, {"lease": lease}))
            return taken

        found = batches(lambda: [theirs.time(next(frames)) for _ in range(MATCHES)], sample, rounds)
    return ratio(name, found.pairs.cost, aim, found.microseconds)


@contextmanager
def placed(served: Daemon, floors: Sequence[Server]) -> Iterator[Iterator[str]]:
    """One placement after another: the client stays on the first core, the servers move."""
    first, *others = cores()

    def placements() -> Iterator[str]:
        for core, name in [(first, TOGETHER), *((other, APART) for other in others[-1:])]:
            for server in (served.pid, *(floor.pid for floor in floors)):
                pin(server, core)
            yield name

    pin(os.getpid(), first)
    try:
        yield placements()
    finally:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores())


def at_size(blocks: int, rounds: int) -> list[Measure]:
    """Everything with so many blocks resident."""
    found: list[Measure] = []
    held = f"{blocks:,} blocks"
    with noop_daemon(blocks) as (served, pauses):
        ready = time.monotonic()
        with filled(served, blocks) as chains, echo() as same_size, echo(answer_bytes=64) as short:
            with placed(served, [same_size, short]) as placements:
                for placement in placements:
                    where = f"{held}, {placement}"
                    # On one core client and server take turns: their own work is all there is, and no wait hides it.
                    aims = AIMS if placement == APART else (Aim(), Aim(), Aim())
                    found += pings(served, same_size, rounds, where, aims[0])
                    found.append(rate(served, same_size, 20_000, max(2, rounds // 4), where, aims[1]))
                    name = f"match of {CHAIN_KEYS:,} keys, {where}"
                    found.append(matches(served, chains, same_size, rounds, name, aims[2]))
                    name += ", echo with a short answer"
                    found.append(matches(served, chains, short, rounds, name, Aim()))
            found.append(
                Measure(
                    f"store of {CHAIN_KEYS:,} keys, {held}",
                    _median(chains.store_seconds) * 1e3,
                    "ms",
                    note="the control loop serves nobody else meanwhile",
                    context={"longest_ms": max(chains.store_seconds) * 1e3},
                )
            )
        served.stop()
        collections = [seconds for begun, seconds in json.loads(pauses.read_text()) if begun > ready]
    found.append(
        Measure(
            f"longest garbage collection, {held}",
            max(collections, default=0.0) * 1e3,
            "ms",
            PAUSE_AIM,
            context={"collections": len(collections)},
        )
    )
    for measure in found:
        say(f"{measure.name}: {measure.value:.4g} {measure.unit}")
    return found


def run(quick: bool) -> Found:
    """Few blocks, then many."""
    rounds, many = (4, 20_000) if quick else (80, MANY_BLOCKS)
    measures = at_size(FEW_BLOCKS, rounds) + at_size(many, rounds)
    return measures, {"rounds": rounds, "chain_keys": CHAIN_KEYS, "window": WINDOW}


if __name__ == "__main__":
    sys.exit(main("control", __doc__, run))
