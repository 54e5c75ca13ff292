"""The worker connector of one rank: registers its shards, sends loads and stores, reports each exactly once."""

from __future__ import annotations

import os
import select
import signal
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from hpkv_client import launch
from hpkv_client.control import PAGE_BYTES, ControlPage
from hpkv_client.cuda import CudaError
from hpkv_client.errors import HpkvError, Unreachable
from hpkv_client.memory import SharedMemory
from hpkv_client.session import SessionKeeper
from hpkv_client.settings import Settings
from hpkv_client.transport import Channel
from hpkv_client.wire import Reply, pack_blocks
from hpkv_vllm import compat, reloads
from hpkv_vllm.cuda_export import ComputeStream
from hpkv_vllm.identity import machine_id
from hpkv_vllm.metadata import RankParts, StepMetadata, WorkerMetadata
from hpkv_vllm.metrics import Changes
from hpkv_vllm.order import StreamOrder
from hpkv_vllm.regions import GpuMemory
from hpkv_vllm.shards import PartShard, shards_of

log = init_logger("vllm.hpkv.worker")

IDLE_WAIT_SECONDS = 0.005
"""On steps without computation the worker waits so long for the daemon instead of spinning against it."""
REGISTER_WAIT_SECONDS = 60.0
"""The engine's start waits so long for a first answer; a pool of many GiB takes its time to be allocated."""
FROZEN_SECONDS = 1.0
"""A mover that holds a slice longer than this after its job was withdrawn is not running."""


@dataclass(slots=True)
class _Pending:
    """A job whose end the engine waits for. ``request_id`` is empty for a store."""

    job: int
    part: str
    request_id: str
    deadline: float
    weights: int
    """Changes of the weights before it was sent."""
    withdrawn: float = 0.0
    """When it was withdrawn; 0 while it is in order."""


@dataclass(frozen=True, slots=True)
class _Message:
    verb: str
    body: dict[str, Any]
    pending: _Pending


class WorkerConnector:
    """Worker side. Called by the engine's main thread only; nothing here waits longer than a few milliseconds."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings, engine: str) -> None:
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._engine = engine
        self._kv_memory = compat.KvMemory()
        self._control_memory = SharedMemory(PAGE_BYTES)
        self._control = ControlPage(self._control_memory.mapping)
        self._keepers: dict[str, SessionKeeper] = {}
        """Part -> its session; every part is an engine of its own to the daemon."""
        self._weights = 0
        """Changes of the weights since the engine started."""
        self._counters: Counter[str] = Counter()
        """For operators: told by the session of the first part."""
        self.changes = Changes(self._counters)
        """The same, for the engine's own metrics."""
        self._parts: RankParts | None = None
        self._channel: Channel | None = None
        self._gpu: GpuMemory | None = None
        self._order: StreamOrder[_Message] | None = None
        """Of a GPU's rank: blocks are read, and written, after what its stream holds now."""
        self._gpu_lost = False
        self._pending: dict[int, _Pending] = {}
        """Request id on the wire -> job."""
        self._withdrawing: list[_Pending] = []
        self._ended_mover = 0
        self._loading: dict[str, int] = {}
        """Request -> pieces of its load that are under way."""
        self._failed_pieces: set[str] = set()
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._stored: dict[int, int] = {}

    # -- start --------------------------------------------------------------------------------------------

    def memory_context(self) -> AbstractContextManager[None] | None:
        """Active while vLLM allocates the KV cache; None off the CPU."""
        if self._config.device_config.device_type != "cpu":
            return None
        return self._kv_memory.context()

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Register the rank's shards. A layout that is not understood means no caching and one clear line."""
        try:
            shards = shards_of(
                self._config,
                self._kv_cache_config,
                kv_caches,
                self._kv_memory,
                self._control_memory,
                self._settings,
                self._engine,
                self._open_gpu,
            )
        except HpkvError as problem:
            log.warning("HPKV is off for this rank: %s", problem)
            return
        path = Path(self._settings.socket)
        self._channel = Channel(path)
        for one in shards:
            self._keepers[one.part.name] = self._keeper(path, one)
        self._parts = RankParts(tuple(one.part for one in shards if one.shard.layers), machine_id())
        place = shards[0].registration["place"]
        for one in shards:
            log.info("HPKV: rank %s of %s", place, _described(one))
        reloads.watch(self._weights_change)
        self._await(place)

    def _open_gpu(self) -> GpuMemory:
        """The GPU's memory, on the first call; from then on messages keep the order of its stream."""
        if self._gpu is None:
            compat.refuse_sleep(self._config)
            self._gpu = compat.gpu_memory()
            self._order = StreamOrder(ComputeStream(self._gpu.driver), compat.compute_stream)
        return self._gpu

    def _keeper(self, path: Path, one: PartShard) -> SessionKeeper:
        hello = {
            "name": one.registration["place"],
            "engine": one.part.engine,
            "instance": self._settings.instance,
        }
        launcher = None if self._keepers else lambda: launch.ensure_daemon(self._settings, REGISTER_WAIT_SECONDS)
        counters = None if self._keepers else self._counters
        hand_over = self._gpu.hand_over if self._gpu else None
        keeper = SessionKeeper(path, hello, one.registration, launcher, counters, hand_over)
        keeper.start()
        return keeper

    def _await(self, place: str) -> None:
        deadline = time.monotonic() + REGISTER_WAIT_SECONDS
        for keeper in self._keepers.values():
            link = keeper.wait(deadline - time.monotonic(), lambda link: link.up or bool(link.problem))
            if not link.up:
                log.warning("HPKV: rank %s starts without cache: %s", place, link.problem or "no answer")
                return

    def parts(self) -> RankParts | None:
        """The parts of which this rank holds layers, for the scheduler; None when HPKV is off here."""
        return self._parts

    # -- every step ---------------------------------------------------------------------------------------

    def start_loads(self, step: StepMetadata) -> None:
        """Ask the daemon to fill blocks; the end of each is reported by ``results``."""
        if not step.loads:
            return
        deadline = time.monotonic() + self._settings.load_deadline_seconds
        current = step.weights == self._weights
        for load in step.loads:
            self._loading[load.request_id] = len(load.pieces)
            for piece in load.pieces:
                body = {
                    "job": piece.job,
                    "lease": piece.lease,
                    "first": piece.first,
                    "blocks": pack_blocks(piece.blocks),
                }
                pending = _Pending(piece.job, piece.part, load.request_id, deadline, self._weights)
                if not current or not self._give("load", body, pending):
                    self._conclude(pending, ok=current and self._elsewhere(piece.part))

    def start_stores(self, step: StepMetadata) -> None:
        """Ask the daemon to read blocks that this step filled."""
        if not step.stores:
            return
        deadline = time.monotonic() + self._settings.load_deadline_seconds
        current = step.weights == self._weights
        for store in step.stores:
            body: dict[str, Any] = {"job": store.job, "keys": store.keys, "blocks": pack_blocks(store.blocks)}
            if store.chained:
                body["parent"] = store.parent
            pending = _Pending(store.job, store.part, "", deadline, self._weights)
            if not current or not self._give("store" if store.chained else "put", body, pending):
                self._conclude(pending, ok=False)

    def _give(self, verb: str, body: dict[str, Any], pending: _Pending) -> bool:
        """Send it, or keep it until the GPU has done what was put into its stream before; False: it cannot be sent."""
        if self._order is None:
            return self._send(verb, body, pending)
        if self._gpu_lost or not self._usable(pending.part):
            return False
        try:
            self._order.hold(_Message(verb, body, pending))
        except CudaError as problem:
            self._lose_gpu(self._order, problem)
            return False
        return True

    def _release(self, order: StreamOrder[_Message], now: float) -> None:
        """Send what the GPU is through with; what comes too late is not sent at all."""
        try:
            for message in order.passed():
                if not self._send(message.verb, message.body, message.pending):
                    self._conclude(message.pending, ok=False)
        except CudaError as problem:
            self._lose_gpu(order, problem)
        for message in order.take(lambda message: message.pending.deadline <= now):
            self._counters["late_jobs"] += 1
            self._conclude(message.pending, ok=False)

    def _lose_gpu(self, order: StreamOrder[_Message], problem: CudaError) -> None:
        log.warning("HPKV is off for this rank: %s", problem)
        self._gpu_lost = True
        for message in order.take(lambda _: True):
            self._conclude(message.pending, ok=False)

    def _usable(self, part: str) -> bool:
        keeper = self._keepers.get(part)
        return keeper is not None and self._channel is not None and keeper.link.usable

    def _send(self, verb: str, body: dict[str, Any], pending: _Pending) -> bool:
        keeper = self._keepers.get(pending.part)
        if keeper is None or self._channel is None or not keeper.link.usable:
            return False
        try:
            request = self._channel.send(verb, body, keeper.link.session)
        except Unreachable:
            self._suspect()
            return False
        self._pending[request] = pending
        return True

    def _elsewhere(self, part: str) -> bool:
        """Whether the part is kept on another node: this rank holds none of it."""
        return bool(self._keepers) and part not in self._keepers

    def _suspect(self) -> None:
        for keeper in self._keepers.values():
            keeper.suspect()

    def poll(self, idle: bool) -> None:
        """Collect replies and enforce deadlines. On idle steps wait a moment, so that the daemon gets a core."""
        if self._channel is None:
            return
        if self._order is not None:
            self._release(self._order, time.monotonic())
        waiting = bool(self._pending or self._withdrawing)
        # Also a rank that is through: it would take the core that the mover needs for the others.
        pause = IDLE_WAIT_SECONDS if idle and not (self._loaded or self._stored) else 0.0
        if waiting or pause:
            # Asking a socket in vain costs a decode step more than all else here.
            for reply in self._channel.replies(pause):
                self._take(reply)
        if waiting:
            self._enforce(time.monotonic())

    def _take(self, reply: Reply) -> None:
        pending = self._pending.pop(reply.id, None)
        if pending is None:
            return
        if not reply.ok:
            # A refused or failed job is over: the daemon answers only when no copy of it runs.
            log.debug("HPKV: job %d: %s", pending.job, reply.body.get("message"))
        self._conclude(pending, reply.ok)

    def _conclude(self, pending: _Pending, ok: bool) -> None:
        if not pending.request_id:
            self._stored[pending.job] = 1
            return
        if not ok or pending.weights != self._weights:
            # Also what came whole: it was computed with weights that the engine has no more.
            self._failed_pieces.add(pending.request_id)
        self._loading[pending.request_id] -= 1
        if self._loading[pending.request_id]:
            return
        del self._loading[pending.request_id]
        self._loaded.add(pending.request_id)
        if pending.request_id in self._failed_pieces:
            self._failed_pieces.discard(pending.request_id)
            self._failed.add(pending.request_id)

    def _enforce(self, now: float) -> None:
        """Withdraw what is late or belongs to a daemon that is gone; give blocks back only when nobody copies."""
        lost = any(not self._keepers[pending.part].link.up for pending in self._pending.values())
        late = [(request, pending) for request, pending in self._pending.items() if lost or pending.deadline <= now]
        if late:
            if not lost:
                self._counters["late_jobs"] += len(late)
                log.warning("HPKV: %d jobs missed their deadline, the daemon counts as down", len(late))
                self._suspect()
            self._control.withdraw_through(max(pending.job for _, pending in late))
            for request, pending in late:
                del self._pending[request]
                pending.withdrawn = now
                self._withdrawing.append(pending)
        if self._withdrawing and self._nobody_copies(now):
            for pending in self._withdrawing:
                self._conclude(pending, ok=False)
            self._withdrawing.clear()

    def _nobody_copies(self, now: float) -> bool:
        if self._control.quiet():
            return True
        mover = self._control.mover_pid
        try:
            if _has_ended(mover):
                return True
            if mover != self._ended_mover and now - self._withdrawing[0].withdrawn > FROZEN_SECONDS:
                self._ended_mover = mover
                log.warning("HPKV: mover %d is frozen in the middle of a copy, ending it", mover)
                os.kill(mover, signal.SIGKILL)
        except PermissionError:
            # Another user's mover: it is alive, so its word is needed. The blocks stay taken meanwhile.
            return False
        return False

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last call, and which of them failed."""
        loaded, failed = self._loaded, self._failed
        self._loaded, self._failed = set(), set()
        return loaded, failed

    def metadata(self, step: StepMetadata) -> WorkerMetadata | None:
        """Store jobs that this rank is through with since the last call, and what there is to tell of the step."""
        timed = step.number if step.timed else 0
        changed = step.number > 0 and step.weights != self._weights
        if not (self._stored or timed or changed):
            return None
        stored, self._stored = self._stored, {}
        return WorkerMetadata(stored, timed, *((self._weights, step.number) if changed else (0, 0)))

    def _weights_change(self) -> None:
        self._weights += 1

    def shutdown(self) -> None:
        """Leave the daemon politely."""
        for keeper in self._keepers.values():
            keeper.stop()
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _has_ended(mover: int) -> bool:
    """Whether the process holds no mapping any more: gone, a zombie, or its number is another program's by now."""
    try:
        pidfd = os.pidfd_open(mover)
    except (ProcessLookupError, ValueError):
        return True
    try:
        ended = bool(select.select([pidfd], [], [], 0)[0])
        return ended or b"hpkv_daemon.movers" not in Path(f"/proc/{mover}/cmdline").read_bytes()
    except FileNotFoundError:
        return True
    finally:
        os.close(pidfd)


def _described(one: PartShard) -> str:
    """What a rank holds of one part, for the log."""
    shard, registered = one.shard, one.registration
    return (
        f"{registered['model']} ({registered['strategy']}), part {one.part.name}: {len(shard.layers)} layers, "
        f"{shard.block_bytes} bytes of each block of {one.part.block_tokens} tokens, "
        f"replica {shard.replica} of {shard.replicas}"
    )
