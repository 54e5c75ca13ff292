"""The scheduler connector: asks for prefixes early, plans loads and stores, keeps source blocks pinned."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from hpkv_client.errors import HpkvError, Unreachable
from hpkv_client.session import SessionKeeper
from hpkv_client.settings import Settings
from hpkv_client.transport import Channel
from hpkv_client.types import KeyMaker
from hpkv_client.wire import Reply
from hpkv_vllm import compat
from hpkv_vllm.identity import fingerprint
from hpkv_vllm.metadata import Load, StepMetadata, Store, WorkerMetadata

log = init_logger("vllm.hpkv.scheduler")

READY_WAIT_SECONDS = 10.0
STEP_WAIT_SECONDS = 0.002
"""Most time one scheduling step spends waiting for look-ups, over all requests."""
RESET_SECONDS = 2.0
_MAX_KEYS = 1 << 15
_MAX_PINNED_SHARE = 4
"""At most one part in this many of the engine's blocks is pinned for stores at any time."""


@dataclass(slots=True)
class _Request:
    """What the connector knows about one live request."""

    request: Any
    keys: list[bytes] = field(default_factory=list)
    lookup: int = 0
    """Id of the match under way, 0 if none."""
    asked: float = 0.0
    hit: int | None = None
    """Blocks that the daemon had at the last match; None before its answer."""
    lease: int = 0
    local: int = 0
    offered: int = 0
    """Blocks up to here are in the daemon or on their way."""
    blocks: list[int] = field(default_factory=list)
    refused: bool = False
    """A load failed: nothing more is loaded for this request."""


class SchedulerConnector:
    """Scheduler side. Called by the engine core's thread only."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings, engine: str) -> None:
        group = compat.supported_group(kv_cache_config)
        self._block_tokens = int(group.kv_cache_spec.block_size)
        hash_tokens = int(getattr(kv_cache_config, "hash_block_size", None) or self._block_tokens)
        self._hashes_per_block = self._block_tokens // hash_tokens
        self._settings = settings
        self._world = int(vllm_config.parallel_config.world_size)
        namespace = fingerprint(vllm_config, kv_cache_config)
        log.info("HPKV: namespace %s, blocks of %d tokens", namespace.hex(), self._block_tokens)
        self._key = KeyMaker(namespace, 0)
        self._pool: Any = None
        self._requests: dict[str, _Request] = {}
        self._lookups: dict[int, str] = {}
        self._loading: dict[str, int] = {}
        """Request id -> lease of its load."""
        self._new_loads: list[Load] = []
        self._jobs = itertools.count(1)
        self._pinned: dict[int, tuple[list[int], int]] = {}
        """Store job -> (blocks, ranks that are through)."""
        self._pinned_blocks = 0
        self._wait_left = STEP_WAIT_SECONDS
        path = Path(settings.socket)
        self._channel = Channel(path)
        hello = {"name": "scheduler", "engine": engine, "instance": settings.instance}
        self._keeper = SessionKeeper(path, hello)
        self._keeper.start()
        self._keeper.wait(READY_WAIT_SECONDS, lambda link: link.usable or bool(link.problem))

    def bind(self, block_pool: Any) -> None:
        """The pool of the engine's blocks, for pinning."""
        self._pool = block_pool

    # -- look-ups -----------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Start the look-up at once; its answer is here when the request is scheduled."""
        state = self._state(request)
        if not request.skip_reading_prefix_cache:
            self._ask(state)

    def _state(self, request: Any) -> _Request:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = _Request(request)
        return state

    def _extend_keys(self, state: _Request) -> None:
        hashes, step = state.request.block_hashes, self._hashes_per_block
        for i in range(len(state.keys), len(hashes) // step):
            state.keys.append(self._key(bytes(hashes[(i + 1) * step - 1])))

    def _ask(self, state: _Request) -> None:
        self._extend_keys(state)
        state.hit, state.lookup = 0, 0
        if not state.keys or not self._keeper.link.usable:
            return
        self._channel.session = self._keeper.link.session
        try:
            state.lookup = self._channel.send("match", {"keys": b"".join(state.keys[:_MAX_KEYS])})
        except Unreachable:
            self._keeper.suspect()
            return
        state.hit, state.asked = None, time.monotonic()
        self._lookups[state.lookup] = state.request.request_id

    def _take(self, reply: Reply) -> None:
        request_id = self._lookups.pop(reply.id, None)
        if request_id is None:
            return
        state = self._requests.get(request_id)
        if not reply.ok:
            # The daemon restarted or lost a rank: look at once, not at the next heartbeat.
            self._keeper.suspect()
        lease = reply.body.get("lease", 0) if reply.ok else 0
        if state is None or state.lookup != reply.id:
            self._release(lease)
            return
        state.lookup = 0
        state.hit = reply.body["hit"] if reply.ok else 0
        state.lease = lease
        state.offered = max(state.offered, state.hit or 0)

    def _receive(self, timeout: float = 0.0) -> None:
        for reply in self._channel.replies(timeout):
            self._take(reply)

    def _release(self, lease: int) -> None:
        if not lease or not self._keeper.link.usable:
            return
        try:
            self._channel.send("release", {"lease": lease})
        except Unreachable:
            self._keeper.suspect()

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``local_tokens`` that can be loaded; None while the daemon has not answered yet."""
        state = self._state(request)
        if request.skip_reading_prefix_cache or state.refused or not self._keeper.link.usable:
            return 0, False
        lease_age = time.monotonic() - state.asked
        if not state.lookup and (state.hit is None or lease_age > self._settings.lease_seconds / 2):
            self._drop_lease(state)
            self._ask(state)
        if state.lookup and not self._await(state):
            return None, False
        block = self._block_tokens
        hit = min(state.hit or 0, (request.num_tokens - 1) // block) * block
        if hit <= local_tokens or local_tokens % block or not state.lease:
            return 0, False
        state.local = local_tokens
        return hit - local_tokens, True

    def _await(self, state: _Request) -> bool:
        """True when the look-up is answered or given up; waits within the step's budget."""
        started = time.monotonic()
        self._receive()
        if state.lookup and self._wait_left > 0:
            self._receive(self._wait_left)
            self._wait_left -= time.monotonic() - started
        if not state.lookup:
            return True
        if time.monotonic() - state.asked < self._settings.submit_deadline_ms / 1000:
            return False
        log.warning("HPKV: no answer to a look-up within %d ms", self._settings.submit_deadline_ms)
        self._lookups.clear()
        self._channel.reset()
        self._keeper.suspect()
        for other in self._requests.values():
            if other.lookup:
                other.lookup, other.hit = 0, 0
        return True

    def _drop_lease(self, state: _Request) -> None:
        self._release(state.lease)
        state.lease, state.hit = 0, None

    # -- plans --------------------------------------------------------------------------------------------

    def after_allocation(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """The engine has blocks for what ``matched_tokens`` promised: plan the load into them."""
        state = self._state(request)
        if not external_tokens:
            if request.request_id not in self._loading and state.lease:
                self._release(state.lease)
                state.lease = 0
            return
        first = state.local // self._block_tokens
        count = external_tokens // self._block_tokens
        own = blocks.get_block_ids()[0]
        load = Load(next(self._jobs), request.request_id, state.lease, first, own[first : first + count])
        self._loading[request.request_id] = state.lease
        state.lease = 0
        self._new_loads.append(load)

    def plan_step(self, output: Any) -> StepMetadata:
        """Loads and stores of this step, for every rank."""
        self._receive()
        self._wait_left = STEP_WAIT_SECONDS
        metadata = StepMetadata(self._new_loads, idle=output.total_num_scheduled_tokens == 0)
        self._new_loads = []
        for request_id in output.preempted_req_ids or ():
            self._forget_hit(request_id)
        computed = self._follow_blocks(output)
        for request_id, count in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is not None and request_id in computed:
                self._plan_store(state, computed[request_id] + count, metadata)
        return metadata

    def _forget_hit(self, request_id: str) -> None:
        """After a preemption the request is looked up again, with the tokens it has by then."""
        state = self._requests.get(request_id)
        if state is not None:
            self._drop_lease(state)
            state.blocks = []

    def _follow_blocks(self, output: Any) -> dict[str, int]:
        """Update the block tables; computed tokens of each scheduled request before this step."""
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            state = self._requests.get(new.req_id)
            if state is not None:
                state.blocks = list(new.block_ids[0])
                computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            state = self._requests.get(request_id)
            if state is None:
                continue
            fresh = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                state.blocks = list(fresh[0]) if fresh else state.blocks
            elif fresh:
                state.blocks += fresh[0]
            computed[request_id] = cached.num_computed_tokens[i]
        return computed

    def _plan_store(self, state: _Request, computed: int, metadata: StepMetadata) -> None:
        """Offer the blocks that are full after this step, have confirmed tokens and are not offered yet."""
        if not self._keeper.link.usable or state.lookup:
            return
        self._extend_keys(state)
        end = min(computed // self._block_tokens, len(state.keys), len(state.blocks))
        first = state.offered
        room = self._pool.num_gpu_blocks // _MAX_PINNED_SHARE - self._pinned_blocks
        end = min(end, first + max(0, room), first + _MAX_KEYS)
        if end <= first:
            return
        blocks = state.blocks[first:end]
        parent = state.keys[first - 1] if first else None
        store = Store(next(self._jobs), parent, b"".join(state.keys[first:end]), blocks)
        compat.touch(self._pool, blocks)
        self._pinned[store.job] = (blocks, 0)
        self._pinned_blocks += len(blocks)
        state.offered = end
        metadata.stores.append(store)

    # -- results ------------------------------------------------------------------------------------------

    def take_output(self, output: Any) -> None:
        """What the ranks report: finished loads end leases, finished stores unpin blocks."""
        failed = set(getattr(output, "failed_recving", None) or ())
        for request_id in output.finished_recving or ():
            self._release(self._loading.pop(request_id, 0))
            state = self._requests.get(request_id)
            if state is not None and request_id in failed:
                # A daemon that says hit and then fails would be asked for ever.
                state.refused, state.offered, state.hit = True, 0, 0
        metadata = output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata):
            for job, count in metadata.stored.items():
                self._count(job, count)

    def _count(self, job: int, count: int) -> None:
        blocks, through = self._pinned[job]
        if through + count < self._world:
            self._pinned[job] = (blocks, through + count)
            return
        compat.untouch(self._pool, blocks)
        self._pinned_blocks -= len(blocks)
        del self._pinned[job]

    @property
    def has_pins(self) -> bool:
        """The engine must keep stepping: ranks still have completions to report."""
        return bool(self._pinned)

    def finished(self, request: Any) -> None:
        """The request is over. A load of it that still runs keeps its lease until the ranks report."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return
        self._lookups.pop(state.lookup, None)
        self._release(state.lease)

    def reset(self) -> bool:
        """Forget this engine's namespace in the daemon; False if that could not be confirmed."""
        link = self._keeper.link
        if not link.usable:
            return False
        for state in self._requests.values():
            state.hit, state.lease, state.offered = None, 0, 0
        channel = Channel(self._channel.socket_path)
        channel.session = link.session
        try:
            channel.call("reset", {}, RESET_SECONDS)
        except HpkvError as problem:
            log.warning("HPKV: reset failed: %s", problem)
            return False
        finally:
            channel.close()
        return True

    def shutdown(self) -> None:
        """Leave the daemon politely."""
        self._keeper.stop()
        self._channel.close()
