"""Clients, ranks and engines as tests need them: every session, copy and byte under control."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hpkv_client.client import BlockCache
from hpkv_client.control import PAGE_BYTES, ControlPage
from hpkv_client.launch import listener
from hpkv_client.memory import SharedMemory
from hpkv_client.topology import KvTensor, ModelShape, Parallel, shard_of
from hpkv_client.transport import Channel
from hpkv_client.types import Keys, Layer, MemoryHandle, RankShard, Run, block_key, typed_digest
from hpkv_client.wire import PROTOCOL, Body, Reply, handle_to_wire, pack_blocks, shard_to_wire
from tests.daemons import DaemonFactory, DaemonHandle
from tests.nursery import NURSERY

ROOT = Path(__file__).resolve().parent.parent
NOBODY = 65534
ANSWER_SECONDS = 30.0

Bytes = npt.NDArray[np.uint8]

GAUGES = ("sessions", "engines", "leases", "pool_reserved_blocks", "pool_pinned_blocks")


def wait_until(condition: Callable[[], Any], seconds: float = 30.0, what: str = "") -> Any:
    """The first true answer of ``condition``; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, what or f"{condition} stayed false for {seconds} s"
        time.sleep(0.01)
    return answer


def hashes(*names: object) -> list[bytes]:
    """Prefix hashes of an engine, one per name."""
    return [hashlib.sha256(str(name).encode()).digest() for name in names]


def content(key: bytes, size: int) -> bytes:
    """The bytes that belong to a key; no two keys share any 32 of them."""
    seed = hashlib.sha256(key).digest()
    return (seed * (size // len(seed) + 1))[:size]


def resident_memory(pid: int) -> int:
    """Private memory of a process in bytes, without the pool or other shared mappings."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


def open_descriptors(pid: int) -> int:
    """How many file descriptors a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def processor_seconds(pid: int) -> float:
    """Time that all threads of a process ran so far; exact, not counted in clock ticks."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def is_gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Observed:
    """A running daemon, looked at and disturbed from outside. ``close`` it."""

    def __init__(self, handle: DaemonHandle, faults: Path) -> None:
        self.handle = handle
        self.socket = handle.socket
        self.channel = Channel(handle.socket)
        self._faults = faults
        self._stamp = time.time_ns()

    def close(self) -> None:
        """Close the connection; the daemon goes on."""
        self.channel.close()

    def ask(self, verb: str, **body: Any) -> Body:
        """One request, answered or raised."""
        return self.channel.call(verb, body, ANSWER_SECONDS)

    def stats(self) -> Body:
        """The daemon's counters and gauges."""
        return self.ask("stats")

    def gauges(self) -> dict[str, int]:
        """Only what must be zero when nobody is connected."""
        stats = self.stats()
        return {name: stats[name] for name in GAUGES}

    def mover(self) -> int:
        """Process id of the CPU mover."""
        pid = wait_until(lambda: [mover["pid"] for mover in self.ask("info")["movers"]], what="no mover")[0]
        assert isinstance(pid, int)
        return pid

    def maps(self) -> str:
        """The memory map of the mover."""
        return Path(f"/proc/{self.mover()}/maps").read_text()

    def faults(self, specification: str) -> None:
        """Set the fault hooks from now on; empty for none."""
        fresh = self._faults.with_suffix(".new")
        fresh.write_text(specification)
        # Two changes within one tick of the file system's clock must differ.
        self._stamp += 1_000_000
        os.utime(fresh, ns=(self._stamp, self._stamp))
        fresh.rename(self._faults)

    def settle(self, seconds: float = 30.0, **expected: int) -> None:
        """Wait until all gauges are zero, or as ``expected``, and every invariant holds."""
        wanted = dict.fromkeys(GAUGES, 0) | expected
        deadline = time.monotonic() + seconds
        while (seen := self.gauges()) != wanted:
            assert time.monotonic() < deadline, f"{seen} after {seconds} s, not {wanted}"
            time.sleep(0.02)
        assert self.ask("check")["ok"]

    def assert_sound(self) -> None:
        """Nothing is left of a test, and nothing went wrong in the daemon that no client saw."""
        self.faults("")
        self.settle()
        assert self.stats()["internal_errors"] == 0
        assert "Traceback" not in self.handle.text()


class PatchedDaemon(DaemonHandle):
    """Runs ``PATCH`` before it serves. ``PREFIX`` is a command that starts it somewhere else and becomes it."""

    PREFIX: tuple[str, ...] = ()
    PATCH = ""

    def _spawn(self) -> subprocess.Popen[bytes]:
        code = f"{self.PATCH}\nfrom hpkv_daemon.cli import run; raise SystemExit(run(['serve']))"
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*self.PREFIX, sys.executable, "-c", code], env=self.env, cwd=ROOT, stdout=log, stderr=log
            )
        wait_until(lambda: listener(self.socket), 20, "it did not start")
        return process


class ImpatientDaemon(PatchedDaemon):
    """Gives up sooner: after 1 s on a silent process it cannot see and on a store that a rank never joins, after
    1.5 s on a mover that does not answer and 0.7 s on one that does not confirm. It replaces movers at once. Its own
    sleep counts for less than any of that."""

    PATCH = (
        "from hpkv_daemon.service import clock, movers, service, transfers\n"
        "clock._LONGEST_STEP = 0.3\n"
        "service.SILENCE_SECONDS = transfers.STORE_JOB_SECONDS = 1.0\n"
        "movers.ANSWER_SECONDS, movers.CONFIRM_SECONDS, movers.RESTART_SECONDS = 1.5, 0.7, 0.2\n"
    )


class BlindDaemon(ImpatientDaemon):
    """In a PID namespace of its own: it sees none of its clients. They may be silent for 2 s."""

    PATCH = f"{ImpatientDaemon.PATCH}service.SILENCE_SECONDS = 2.0\n"
    PREFIX = ("unshare", "--pid", "--fork", "--kill-child")


@contextmanager
def observed_daemon(kind: type[DaemonHandle] = DaemonHandle, **env: Any) -> Iterator[Observed]:
    """A daemon with fault hooks that start out empty."""
    factory = DaemonFactory()
    whole = factory.environment(**env)
    run = Path(whole["HPKV_SOCKET"]).parent
    faults = run / "faults"
    whole |= {"HPKV_FAULTS": f"@{faults}", "HPKV_FAULTS_CONFIRM": "this-breaks-my-cache"}
    try:
        handle = kind(whole, run / "hpkvd.out")
        observed = Observed(handle, faults)
        try:
            yield observed
        finally:
            observed.close()
            handle.close()
    finally:
        factory.close()


class Child:
    """A process of its own that runs ``code`` against a daemon; it can be killed. ``close`` it.

    ``say`` in the code prints one line at once; ``wait`` reads one. ``alone``: it is process 1 of a namespace.
    ``pid``: it gets this number, that of a process which is gone; needs root.
    """

    _PRELUDE = (
        "import os, sys, time; from pathlib import Path\n"
        "from hpkv_client.client import BlockCache\n"
        "from hpkv_client.errors import *\n"
        "from tests.support import *\n"
        "socket = Path(os.environ['HPKV_SOCKET'])\n"
        "def say(*words): print(*words, flush=True)\n"
        "def wait(): return sys.stdin.readline().strip()\n"
    )

    def __init__(self, handle: DaemonHandle, code: str, alone: bool = False, pid: int = 0) -> None:
        stdin, self._stdin = os.pipe()
        self._stdout, stdout = os.pipe()
        self._said = b""
        self.pid = NURSERY.fork(self._PRELUDE + code, handle.env, alone, stdin, stdout, pid)
        os.close(stdin)
        os.close(stdout)

    def heard(self, seconds: float = 30.0) -> str:
        """Its next line."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._said:
            left = deadline - time.monotonic()
            assert select.select([self._stdout], [], [], max(0.0, left))[0], f"nothing said for {seconds} s"
            more = os.read(self._stdout, 65536)
            assert more, f"it ended after {self._said!r}"
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def tell(self, line: object = "") -> None:
        """Give it one line."""
        os.write(self._stdin, f"{line}\n".encode())

    def signal(self, number: int) -> None:
        """Send it a signal; one that is gone already gets none."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def ended(self, seconds: float = 30.0) -> None:
        """Wait until it is gone."""
        wait_until(lambda: is_gone(self.pid), seconds)

    def close(self) -> None:
        """End it, whatever it does. May be called again."""
        self.signal(SIGKILL)
        self.ended()
        for fd in (self._stdin, self._stdout):
            if fd >= 0:
                os.close(fd)
        self._stdin = self._stdout = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def plain_shard(block_bytes: int, blocks: int) -> RankShard:
    """The whole of a block in one run."""
    return RankShard((Layer("layer.0", block_bytes, (Run(0, 0, block_bytes, 0, block_bytes),)),), blocks)


class Rank:
    """One rank over a bare connection: it registers what it is told to, and nothing happens behind its back.

    ``memory`` is its KV memory as bytes. ``close`` it.
    """

    def __init__(
        self,
        socket: Path,
        shard: RankShard,
        *,
        engine: str = "engine",
        rank: int = 0,
        world: int = 1,
        namespace: str = "namespace",
    ) -> None:
        self.channel = Channel(socket)
        self.shard = shard
        self.namespace = typed_digest("test", namespace)
        self._engine, self._rank, self._world = engine, rank, world
        self._early: dict[int, Reply] = {}
        self._job = 0
        runs = [run for layer in shard.layers for run in layer.runs]
        self.memory: Bytes = self._allocate(max(run.last_local_byte(shard.blocks) for run in runs))
        self._page = SharedMemory(PAGE_BYTES)
        self.control = ControlPage(self._page.mapping)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _allocate(self, size: int) -> Bytes:
        self.shared = SharedMemory(size)
        return np.frombuffer(self.shared.mapping, np.uint8)

    def _free(self) -> None:
        self.shared.close()

    def _where(self) -> Body:
        return {"device": "cpu", "regions": [handle_to_wire(self.shared.handle)]}

    def close(self) -> None:
        """Say goodbye and drop the memory."""
        if self.channel.session:
            self.call("bye")
        self.drop()

    def drop(self) -> None:
        """Leave without a word."""
        self.channel.close()
        self.control.close()
        self._page.close()
        self._free()

    # -- the session --------------------------------------------------------------------------------------

    def hello(self, **more: Any) -> Self:
        """Open the session."""
        body = {"major": PROTOCOL[0], "minor": PROTOCOL[1], "name": "rank", "engine": self._engine, **more}
        self.channel.session = self.call("hello", **body)["session"]
        return self

    def registration(self, **more: Any) -> Body:
        """The body of its register."""
        body = {
            "rank": self._rank,
            "world": self._world,
            "namespace": self.namespace,
            "model": "test",
            **self._where(),
            "control": handle_to_wire(self._page.handle),
            **shard_to_wire(self.shard),
        }
        return body | more

    def register(self, **more: Any) -> Self:
        """Register, under a new session if there is none."""
        if not self.channel.session:
            self.hello()
        self.call("register", **self.registration(**more))
        return self

    def ready(self, seconds: float = 30.0) -> Self:
        """Wait until its engine is usable."""
        wait_until(lambda: self.call("heartbeat")["ready"], seconds, "the engine did not become ready")
        return self

    def problem(self, seconds: float = 30.0) -> str:
        """Wait until its engine is refused; why."""
        problem = wait_until(lambda: self.call("heartbeat")["problem"], seconds, "nobody refused the engine")
        assert isinstance(problem, str)
        return problem

    # -- requests -----------------------------------------------------------------------------------------

    def ask(self, verb: str, **body: Any) -> int:
        """Send a request; its id."""
        return self.channel.send(verb, body)

    def reply(self, request: int, seconds: float = ANSWER_SECONDS) -> Reply:
        """The reply to a request; others are kept for later."""
        deadline = time.monotonic() + seconds
        while request not in self._early:
            left = deadline - time.monotonic()
            assert left > 0, f"no reply within {seconds} s"
            self._early |= {reply.id: reply for reply in self.channel.replies(left)}
        return self._early.pop(request)

    def has_reply(self, request: int) -> bool:
        """Whether it is here."""
        self._early |= {reply.id: reply for reply in self.channel.replies()}
        return request in self._early

    def call(self, verb: str, **body: Any) -> Body:
        """A request and its result, or the error it names."""
        return self.reply(self.ask(verb, **body)).result()

    def next_job(self) -> int:
        """A job number that was not used before."""
        self._job += 1
        return self._job

    # -- blocks -------------------------------------------------------------------------------------------

    def keys(self, prefix_hashes: Sequence[bytes]) -> bytes:
        """The block keys as they travel."""
        return Keys.of([block_key(self.namespace, 0, prefix) for prefix in prefix_hashes]).blob

    def ask_store(
        self,
        prefix_hashes: Sequence[bytes],
        blocks: Sequence[int],
        *,
        job: int = 0,
        parent: bytes | None = None,
    ) -> int:
        """Send a store of a chain of blocks; the request's id."""
        above = None if parent is None else block_key(self.namespace, 0, parent)
        return self.ask(
            "store",
            job=job or self.next_job(),
            parent=above,
            keys=self.keys(prefix_hashes),
            blocks=pack_blocks(blocks),
        )

    def store(self, prefix_hashes: Sequence[bytes], blocks: Sequence[int], **more: Any) -> int:
        """Store a chain; how many blocks are kept."""
        kept = self.reply(self.ask_store(prefix_hashes, blocks, **more)).result()["kept"]
        assert isinstance(kept, int)
        return kept

    def match(self, prefix_hashes: Sequence[bytes]) -> tuple[int, int]:
        """Length of the resident prefix and the lease on it."""
        answer = self.call("match", keys=self.keys(prefix_hashes))
        return answer["hit"], answer["lease"]

    def ask_load(self, lease: int, blocks: Sequence[int], *, first: int = 0, job: int = 0) -> int:
        """Send a load of leased blocks; the request's id."""
        wanted = pack_blocks(blocks)
        return self.ask("load", job=job or self.next_job(), lease=lease, first=first, blocks=wanted)

    def load(self, lease: int, blocks: Sequence[int], **more: Any) -> int:
        """Load leased blocks; how many."""
        loaded = self.reply(self.ask_load(lease, blocks, **more)).result()["loaded"]
        assert isinstance(loaded, int)
        return loaded

    def block(self, number: int) -> Bytes:
        """One block of a rank with a plain shard."""
        size = self.shard.block_bytes
        return self.memory[number * size : (number + 1) * size]


class KvRank(Rank):
    """A rank whose memory is laid out as an attention backend would: ``view`` is (layer, block, ...).

    ``order`` is ``hnd`` or ``nhd``. ``canonical`` blocks are arrays (layer, head, token, width) or
    (layer, token, head, width) of bytes over the whole model.
    """

    LAYERS, HEADS, TOKENS, WIDTH = 4, 4, 8, 24

    def __init__(
        self,
        socket: Path,
        *,
        engine: str,
        tp: tuple[int, int] = (0, 1),
        layers: tuple[int, int] = (0, LAYERS),
        pp: tuple[int, int] = (0, 1),
        order: str = "hnd",
        latent: bool = False,
        heads: int = HEADS,
        blocks: int = 6,
        namespace: str = "namespace",
    ) -> None:
        parallel = Parallel(tp[1], tp[0], pp[1], pp[0])
        self.order = order
        self._layers = range(*layers)
        self._blocks = blocks
        replicas = max(1, tp[1] // (1 if latent else heads))
        self._heads = 1 if latent else max(1, heads // tp[1])
        first = 0 if latent else tp[0] // replicas * self._heads
        self._mine = slice(first, first + self._heads)
        inner = (self._heads, self.TOKENS) if order == "hnd" else (self.TOKENS, self._heads)
        layer_bytes = blocks * self._heads * self.TOKENS * self.WIDTH
        tensors = [self._tensor(layer, i * layer_bytes, latent) for i, layer in enumerate(self._layers)]
        shard = shard_of(ModelShape(heads, latent), parallel, tensors, blocks, self.TOKENS)
        super().__init__(
            socket,
            shard,
            engine=engine,
            rank=parallel.rank,
            world=parallel.world,
            namespace=f"{namespace}-{order}",
        )
        self.view = self.memory[: layer_bytes * len(self._layers)].reshape(
            len(self._layers), blocks, *inner, self.WIDTH
        )

    def _tensor(self, layer: int, offset: int, latent: bool) -> KvTensor:
        heads, tokens, width, name = self._heads, self.TOKENS, self.WIDTH, f"model.layers.{layer}.attn"
        block = heads * tokens * width
        if latent:
            return KvTensor(name, 0, (self._blocks, tokens, width), (block, width, 1), 1, offset)
        by_head, by_token = (tokens * width, width) if self.order == "hnd" else (width, heads * width)
        shape = (self._blocks, heads, tokens, width)
        return KvTensor(name, 0, shape, (block, by_head, by_token, 1), 1, offset)

    def _share(self, canonical: Bytes) -> Bytes:
        layers = canonical[self._layers.start : self._layers.stop]
        return layers[:, self._mine] if self.order == "hnd" else layers[:, :, self._mine]

    def fill(self, block: int, canonical: Bytes) -> None:
        """Put its part of a canonical block into its memory."""
        self.view[:, block] = self._share(canonical)

    def holds(self, block: int, canonical: Bytes) -> bool:
        """Whether its memory equals its part of the canonical block."""
        return bool((self.view[:, block] == self._share(canonical)).all())


def canonical_block(seed: object, order: str = "hnd", heads: int = KvRank.HEADS) -> Bytes:
    """Random bytes in the shape of a whole block."""
    layers, tokens, width = KvRank.LAYERS, KvRank.TOKENS, KvRank.WIDTH
    inner = (heads, tokens) if order == "hnd" else (tokens, heads)
    generator = np.random.default_rng(int.from_bytes(hashes(seed)[0][:8]))
    return generator.integers(0, 256, (layers, *inner, width), np.uint8)


class Victim:
    """A correct client that puts and gets without a pause and checks every byte. A context manager.

    ``check`` fails if a byte was wrong, a block got lost or a call took longer than ``patience`` seconds.
    """

    KEYS, BLOCK_BYTES = 8, 4096

    def __init__(self, socket: Path, patience: float = 5.0) -> None:
        self.rounds = 0
        self._slowest = 0.0
        self._patience = patience
        self._stop = threading.Event()
        self._problem: BaseException | None = None
        self._cache = BlockCache("victim", self.BLOCK_BYTES, arena_blocks=self.KEYS, socket=socket)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._cache.close()

    def check(self) -> None:
        """It works now, and has worked since the last check."""
        rounds = self.rounds
        wait_until(lambda: self._problem or self.rounds > rounds + 1, what="the victim stands still")
        if self._problem:
            raise AssertionError("the victim was harmed") from self._problem
        assert self._slowest < self._patience, f"a call of the victim took {self._slowest:.1f} s"
        self._slowest = 0.0

    def _run(self) -> None:
        wanted = {key: content(key, self.BLOCK_BYTES) for key in hashes(*range(self.KEYS))}
        try:
            while not self._stop.wait(0.005):
                started = time.monotonic()
                assert self._cache.put(wanted) == self.KEYS
                assert self._cache.get(list(wanted)) == list(wanted.values())
                self._slowest = max(self._slowest, time.monotonic() - started)
                self.rounds += 1
        except BaseException as problem:  # noqa: BLE001  (raised again by the test's own thread)
            self._problem = problem


def strange_handle(rank: Rank, **changes: Any) -> Body:
    """The wire form of the rank's memory handle with some fields changed."""
    handle: MemoryHandle = rank.shared.handle
    return handle_to_wire(handle) | changes
