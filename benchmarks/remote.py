"""How fast the remote process puts, gets and looks up blocks, against the store's own Python client in the same run.

Stores are real servers on this machine: a directory on tmpfs, moto's S3 server (which answers a few hundred requests a
second: figures for S3 tell about the ratio, nothing about S3), and Mooncake Store over TCP. The floor moves objects of
the same size, with as many of them at once, and neither verifies nor looks before it puts. "Presence" asks for 512
blocks that form no chain.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import select
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore

from benchmarks.memory import affordable, shared
from benchmarks.paired import Pairs, alternate
from benchmarks.report import Aim, Found, Measure, main, ratio, say, speeds
from hpkv_client.memory import SharedMemory
from hpkv_client.types import typed_digest
from hpkv_daemon.tiers.base import BlockJob, Done, Known, Outcome, State
from hpkv_daemon.tiers.remote.format import object_name
from hpkv_daemon.tiers.remote.objects import STREAMS
from hpkv_daemon.tiers.remote.tier import RemoteTier
from tests.mooncakes import MooncakeCluster
from tests.stores import Folder, S3Server

BLOCK_BYTES = (256 << 10, 2 << 20, 16 << 20)
SAMPLE_BYTES = 64 << 20
AIM = Aim(0.9)
QUESTIONS = 512
WAIT_SECONDS = 120.0
SPACE = typed_digest("benchmark", "remote")

_numbers = itertools.count()

Store = Folder | S3Server | MooncakeCluster


def fresh(count: int) -> list[bytes]:
    """Keys that were not used before."""
    return [typed_digest("benchmark", next(_numbers)) for _ in range(count)]


class ObjectClient:
    """The floor for object stores: obstore in threads."""

    def __init__(self, store: Folder | S3Server, memory: memoryview) -> None:
        self._objects = store.objects
        self._memory = memory
        self._threads = ThreadPoolExecutor(STREAMS)

    def put(self, names: Sequence[str], block: int) -> None:
        """Put one object of each name."""

        def one(number: int) -> None:
            view = self._memory[number * block : (number + 1) * block]
            obstore.put(self._objects, names[number], view, mode="create", use_multipart=False)

        list(self._threads.map(one, range(len(names))))

    def get(self, names: Sequence[str], block: int) -> None:
        """Get them back into the same memory."""

        def one(number: int) -> None:
            body = memoryview(obstore.get(self._objects, names[number]).bytes())
            self._memory[number * block : (number + 1) * block] = body

        list(self._threads.map(one, range(len(names))))

    def exists(self, names: Sequence[str]) -> None:
        """Ask for each of the names."""

        def one(name: str) -> None:
            try:
                obstore.head(self._objects, name)
            except FileNotFoundError:
                return

        list(self._threads.map(one, names))

    def delete(self, names: Sequence[str]) -> None:
        """Make room."""
        list(self._threads.map(lambda name: obstore.delete(self._objects, name), names))


class MooncakeClient:
    """The floor for Mooncake Store: its own batches from and into registered memory."""

    def __init__(self, store: MooncakeCluster, memory: memoryview) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        from mooncake.store import MooncakeDistributedStore

        self._client: Any = MooncakeDistributedStore()
        master = store.url.partition("://")[2]
        self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master)
        self._memory = memory
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._client.register_buffer(self._base, len(memory))

    def _places(self, count: int, block: int) -> tuple[list[int], list[int]]:
        return [self._base + number * block for number in range(count)], [block] * count

    def put(self, names: Sequence[str], block: int) -> None:
        """See ``ObjectClient``."""
        if any(self._client.batch_put_from(list(names), *self._places(len(names), block))):
            raise RuntimeError("Mooncake Store did not take all objects")

    def get(self, names: Sequence[str], block: int) -> None:
        """See ``ObjectClient``."""
        if set(self._client.batch_get_into(list(names), *self._places(len(names), block))) != {block}:
            raise RuntimeError("Mooncake Store did not give all objects")

    def exists(self, names: Sequence[str]) -> None:
        """See ``ObjectClient``."""
        self._client.batch_is_exist(list(names))

    def delete(self, names: Sequence[str]) -> None:
        """See ``ObjectClient``."""
        for name in names:
            self._client.remove(name, True)


Client = ObjectClient | MooncakeClient


class TimedTier:
    """The real tier and its process, one batch at a time."""

    def __init__(self, store: Store, pool: SharedMemory) -> None:
        os.environ.update(store.variables)
        self.tier = RemoteTier(store.url, pool.handle.fd, pool.handle.size)
        self.tier.recover()
        self._serve(lambda _: self.tier.usage().state is State.READY)

    def _serve(self, over: Callable[[list[object]], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        events: list[object] = []
        while not over(events):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the tier said nothing for {WAIT_SECONDS:.0f} s: {self.tier.usage()}")
            self.tier.flush()
            select.select([self.tier], [], [], 0.2)
            events += self.tier.poll()

    def move(self, write: bool, keys: Sequence[bytes], block: int) -> None:
        """Write or read one block of each key."""
        jobs = [BlockJob(SPACE, key, None, block, number * block) for number, key in enumerate(keys)]
        ticket = self.tier.write(jobs) if write else self.tier.read(jobs)
        done: list[Done] = []

        def over(events: list[object]) -> bool:
            done.extend(event for event in events if isinstance(event, Done) and event.ticket == ticket)
            return bool(done)

        self._serve(over)
        if set(done[0].outcomes) != {Outcome.OK}:
            raise RuntimeError(f"the tier did not move the blocks: {done[0]}")

    def look_up(self, keys: Sequence[bytes]) -> None:
        """Find out which of these are there."""
        if not self.tier.inquire(SPACE, keys, False):
            raise RuntimeError("the tier does not ask")
        self._serve(lambda events: any(isinstance(event, Known) for event in events))

    def cpu_seconds(self) -> float:
        """Processor time of the remote process so far."""
        fields = Path(f"/proc/{self.tier.usage().pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(work: Callable[[], None]) -> float:
    """Seconds that it took."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Bench:
    """One store, the tier on it, and its own client."""

    def __init__(self, name: str, store: Store, pool: SharedMemory, sample_bytes: int) -> None:
        self._name = name
        self._sample = sample_bytes
        self.tier = TimedTier(store, pool)
        # Memory of its own, which lives as long as the client's registration of it.
        memory = memoryview(mmap.mmap(-1, SAMPLE_BYTES))
        memory[:] = pool.mapping[:SAMPLE_BYTES]
        self.client: Client = (
            MooncakeClient(store, memory) if isinstance(store, MooncakeCluster) else ObjectClient(store, memory)
        )

    def measure(self, block: int, rounds: int) -> Iterator[Measure]:
        """Put and get of one size of blocks."""
        count = max(1, self._sample // block)
        moved = count * block
        for verb in ("put", "get"):
            spent = self.tier.cpu_seconds()
            pairs = self._put(count, block, rounds) if verb == "put" else self._get(count, block, rounds)
            cpu = (self.tier.cpu_seconds() - spent) / (rounds * moved / 1e9)
            size = f"{block >> 10} KiB" if block < 1 << 20 else f"{block >> 20} MiB"
            context = speeds(pairs, moved) | {"cpu_seconds_per_gb": cpu}
            yield ratio(f"{self._name}: {verb}, blocks of {size}", pairs.speed, AIM, context)

    def _put(self, count: int, block: int, rounds: int) -> Pairs:
        def floor() -> float:
            names = [f"floor/{key.hex()}" for key in fresh(count)]
            taken = timed(lambda: self.client.put(names, block))
            self.client.delete(names)
            return taken

        def sample() -> float:
            keys = fresh(count)
            taken = timed(lambda: self.tier.move(True, keys, block))
            self.client.delete([object_name(SPACE, key) for key in keys])
            return taken

        return alternate(floor, {"put": sample}, rounds)["put"]

    def _get(self, count: int, block: int, rounds: int) -> Pairs:
        keys = fresh(count)
        names = [f"floor/{key.hex()}" for key in keys]
        self.client.put(names, block)
        self.tier.move(True, keys, block)
        pairs = alternate(
            lambda: timed(lambda: self.client.get(names, block)),
            {"get": lambda: timed(lambda: self.tier.move(False, keys, block))},
            rounds,
        )["get"]
        self.client.delete([*names, *(object_name(SPACE, key) for key in keys)])
        return pairs

    def presence(self, rounds: int) -> Measure:
        """Batched questions for blocks that are absent."""

        def floor() -> float:
            keys = fresh(QUESTIONS)
            return timed(lambda: self.client.exists([object_name(SPACE, key) for key in keys]))

        def sample() -> float:
            keys = fresh(QUESTIONS)
            return timed(lambda: self.tier.look_up(keys))

        pairs = alternate(floor, {"presence": sample}, rounds)["presence"]
        median = sorted(pairs.samples)[len(pairs.samples) // 2]
        context = {"milliseconds": median * 1e3, "questions_per_second": QUESTIONS / median}
        return ratio(f"{self._name}: presence of {QUESTIONS} blocks", pairs.speed, AIM, context)


@contextmanager
def stores(directory: Path) -> Iterator[dict[str, Store]]:
    """All stores of this machine."""
    server, cluster = S3Server(), MooncakeCluster(lent_bytes=1 << 30)
    try:
        yield {"file": Folder(directory), "mooncake": cluster, "s3": server}
    finally:
        server.close()
        cluster.close()


def run(quick: bool) -> Found:
    """All stores and sizes of blocks."""
    affordable(SAMPLE_BYTES, 1, 8 * SAMPLE_BYTES)
    directory = Path(tempfile.mkdtemp(prefix="hpkv-remote-", dir="/dev/shm"))
    measures: list[Measure] = []
    try:
        with shared(SAMPLE_BYTES) as pool, stores(directory) as found:
            for offset in range(0, SAMPLE_BYTES, 1 << 20):
                pool.mapping[offset : offset + (1 << 20)] = os.urandom(1 << 20)
            for name, store in found.items():
                slow = name == "s3"
                rounds = 2 if quick else 5 if slow else 20
                bench = Bench(name, store, pool, SAMPLE_BYTES // (2 if slow else 1))
                try:
                    for block in BLOCK_BYTES:
                        for measure in bench.measure(block, rounds):
                            measures.append(measure)
                            say(f"{measure.name}: {measure.value:.3f}")
                    measures.append(bench.presence(rounds))
                    say(f"{measures[-1].name}: {measures[-1].value:.3f}")
                finally:
                    bench.tier.tier.close(5.0)
    finally:
        shutil.rmtree(directory)
    return measures, {"sample_bytes": SAMPLE_BYTES, "questions": QUESTIONS}


if __name__ == "__main__":
    sys.exit(main("remote", __doc__, run))
