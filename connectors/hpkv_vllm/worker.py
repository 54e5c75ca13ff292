"""The worker connector of one rank: registers its shard, sends loads and stores, reports each exactly once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from hpkv_client import launch
from hpkv_client.control import PAGE_BYTES, ControlPage
from hpkv_client.errors import HpkvError, LayoutRefused, Unreachable
from hpkv_client.memory import SharedMemory
from hpkv_client.session import SessionKeeper
from hpkv_client.settings import Settings
from hpkv_client.topology import element_order, shard_of
from hpkv_client.transport import Channel
from hpkv_client.types import typed_digest
from hpkv_client.wire import Reply, handle_to_wire, pack_blocks, shard_to_wire
from hpkv_vllm import compat
from hpkv_vllm.identity import fingerprint
from hpkv_vllm.metadata import Load, Store, WorkerMetadata

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
    request_id: str
    deadline: float
    withdrawn: float = 0.0
    """When it was withdrawn; 0 while it is in order."""


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
        self._keeper: SessionKeeper | None = None
        self._channel: Channel | None = None
        self._pending: dict[int, _Pending] = {}
        """Request id on the wire -> job."""
        self._withdrawing: list[_Pending] = []
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
        """Register the rank's shard. A layout that is not understood means no caching and one clear line."""
        try:
            registration = self._registration(kv_caches)
        except HpkvError as problem:
            log.warning("HPKV is off for this rank: %s", problem)
            return
        path = Path(self._settings.socket)
        self._channel = Channel(path)
        self._keeper = SessionKeeper(
            path,
            {"name": registration["place"], "engine": self._engine, "instance": self._settings.instance},
            registration,
            launch=lambda: launch.ensure_daemon(self._settings, REGISTER_WAIT_SECONDS),
        )
        self._keeper.start()
        link = self._keeper.wait(REGISTER_WAIT_SECONDS, lambda link: link.up or bool(link.problem))
        if not link.up:
            log.warning("HPKV: rank %s starts without cache: %s", registration["place"], link.problem or "no answer")

    def _registration(self, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
        group = compat.supported_group(self._kv_cache_config)
        parallel = compat.parallel_of(self._config)
        tensors, regions = compat.kv_tensors(kv_caches, self._kv_memory)
        block_tokens = group.kv_cache_spec.block_size
        shard = shard_of(
            compat.model_shape(self._config),
            parallel,
            tensors,
            self._kv_cache_config.num_blocks,
            block_tokens,
        )
        orders = {element_order(tensor) for tensor in tensors}
        if len(orders) != 1:
            raise LayoutRefused(f"layers of different element orders: {sorted(orders)}")
        base = fingerprint(self._config, self._kv_cache_config)
        return {
            "rank": parallel.rank,
            "world": parallel.world,
            "namespace": typed_digest(base, orders.pop(), tensors[0].element_bytes),
            "model": str(self._config.model_config.served_model_name or self._config.model_config.model)[:256],
            "place": f"tp{parallel.tp_rank} pp{parallel.pp_rank}",
            "block_tokens": block_tokens,
            "device": "cpu",
            "regions": [handle_to_wire(region.handle) for region in regions],
            "control": handle_to_wire(self._control_memory.handle),
            **shard_to_wire(shard),
        }

    # -- every step ---------------------------------------------------------------------------------------

    def start_loads(self, loads: Iterable[Load]) -> None:
        """Ask the daemon to fill blocks; the end of each is reported by ``results``."""
        deadline = time.monotonic() + self._settings.load_deadline_seconds
        for load in loads:
            body = {
                "job": load.job,
                "lease": load.lease,
                "first": load.first,
                "blocks": pack_blocks(load.blocks),
            }
            if not self._send("load", body, _Pending(load.job, load.request_id, deadline)):
                self._loaded.add(load.request_id)
                self._failed.add(load.request_id)

    def start_stores(self, stores: Iterable[Store]) -> None:
        """Ask the daemon to read blocks that this step filled."""
        deadline = time.monotonic() + self._settings.load_deadline_seconds
        for store in stores:
            body = {
                "job": store.job,
                "parent": store.parent,
                "keys": store.keys,
                "blocks": pack_blocks(store.blocks),
            }
            if not self._send("store", body, _Pending(store.job, "", deadline)):
                self._stored[store.job] = 1

    def _send(self, verb: str, body: dict[str, Any], pending: _Pending) -> bool:
        if self._keeper is None or self._channel is None or not self._keeper.link.usable:
            return False
        self._channel.session = self._keeper.link.session
        try:
            request = self._channel.send(verb, body)
        except Unreachable:
            self._keeper.suspect()
            return False
        self._pending[request] = pending
        return True

    def poll(self, idle: bool) -> None:
        """Collect replies and enforce deadlines. On idle steps wait a moment, so that the daemon gets a core."""
        if self._channel is None or self._keeper is None:
            return
        waiting = bool(self._pending or self._withdrawing)
        pause = IDLE_WAIT_SECONDS if idle and waiting and not (self._loaded or self._stored) else 0.0
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
        if pending.request_id:
            self._loaded.add(pending.request_id)
            if not ok:
                self._failed.add(pending.request_id)
        else:
            self._stored[pending.job] = 1

    def _enforce(self, now: float) -> None:
        """Withdraw what is late or belongs to a daemon that is gone; give blocks back only when nobody copies."""
        assert self._keeper is not None
        lost = not self._keeper.link.up
        late = [(request, pending) for request, pending in self._pending.items() if lost or pending.deadline <= now]
        if late:
            if not lost:
                log.warning("HPKV: %d jobs missed their deadline, the daemon counts as down", len(late))
                self._keeper.suspect()
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
            os.kill(mover, 0)
            if now - self._withdrawing[0].withdrawn > FROZEN_SECONDS:
                log.warning("HPKV: mover %d is frozen in the middle of a copy, ending it", mover)
                os.kill(mover, signal.SIGKILL)
        except ProcessLookupError:
            return True
        except PermissionError:
            # Another user's mover: it is alive, so its word is needed. The blocks stay taken meanwhile.
            return False
        return False

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last call, and which of them failed."""
        loaded, failed = self._loaded, self._failed
        self._loaded, self._failed = set(), set()
        return loaded, failed

    def metadata(self) -> WorkerMetadata | None:
        """Store jobs that this rank is through with since the last call."""
        if not self._stored:
            return None
        stored, self._stored = self._stored, {}
        return WorkerMetadata(stored)

    def shutdown(self) -> None:
        """Leave the daemon politely."""
        if self._keeper is not None:
            self._keeper.stop()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
