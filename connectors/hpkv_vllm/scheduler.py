"""The scheduler connector: asks for prefixes early, plans loads and stores, keeps source blocks pinned."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from hpkv_client.errors import HpkvError
from hpkv_client.prefix import usable_tokens
from hpkv_client.settings import Settings
from hpkv_vllm import compat
from hpkv_vllm.identity import Adapters, fingerprint, machine_id, namespace_fields
from hpkv_vllm.keys import PrefixKeys
from hpkv_vllm.lookup import MAX_KEYS, Directory, Lookup
from hpkv_vllm.metadata import Load, Part, Piece, RankParts, StepMetadata, Store, WorkerMetadata
from hpkv_vllm.metrics import Changes
from hpkv_vllm.pace import LEAST_TOKENS, Pace
from hpkv_vllm.pins import Pins
from hpkv_vllm.reloads import Epoch

log = init_logger("vllm.hpkv.scheduler")

_TIMED_STEPS = 64
"""More steps than that are never under way at once."""

_RETRIES = 1
"""A load that failed is tried again so often: a copy may fail once, but a daemon that always fails is not asked on."""


@dataclass(slots=True)
class _Request:
    """What the connector knows about one live request. Lists are by part."""

    request: Any
    keys: list[list[bytes]]
    offered: list[int]
    """Blocks up to here are in the daemon or on their way."""
    adapter: bytes | None
    """Digest of its LoRA adapter; None when nothing may be cached for it."""
    lookup: Lookup | None = None
    """The look-up under way or answered last, with its leases."""
    tokens: int | None = None
    """Tokens that can be loaded, from the start of the prompt; None before the answer."""
    local: int = 0
    tables: list[list[int]] = field(default_factory=list)
    """Block ids per KV-cache group, on versions of vLLM that do not tell them each step."""
    failures: int = 0
    """Loads of this request that failed."""
    late: bool = False
    """One of them took so long that nothing more is loaded for this request."""
    due: float = 0
    """Before so many tokens are computed there is nothing to offer: most steps of decoding look no further."""

    def offer_anew(self) -> None:
        """Nothing of it is known to be in the daemon."""
        self.offered, self.due = [0] * len(self.offered), 0


@dataclass(slots=True)
class _Loading:
    """A load that the ranks are at."""

    leases: dict[int, int]
    planned: float
    tokens: int


class SchedulerConnector:
    """Scheduler side. Called by the engine core's thread only."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        groups = compat.groups_of(vllm_config, kv_cache_config)
        self._settings = settings
        self._alignment = math.lcm(*(group.block_tokens for group in groups))
        self._pins = Pins(int(vllm_config.parallel_config.world_size))
        namespace = fingerprint(namespace_fields(vllm_config, kv_cache_config, settings.weights_id))
        self._keys = PrefixKeys(namespace, compat.hash_tokens(vllm_config, kv_cache_config))
        log.info("HPKV: namespace %s, %d KV-cache groups", namespace.hex(), len(groups))
        self._adapters = Adapters()
        self._counters: Counter[str] = Counter()
        self.changes = Changes(self._counters)
        """What is counted, for the engine's own metrics."""
        self._directory = Directory(settings, (), self._counters)
        self._epoch = Epoch()
        self._pace = Pace()
        self._may_recompute = settings.load_when == "faster"
        self._steps = itertools.count(1)
        self._timed: dict[int, tuple[int, float]] = {}
        """Number of a step that is timed -> its tokens, and when it was planned."""
        self._last_output = 0.0
        self._requests: dict[str, _Request] = {}
        self._loading: dict[str, _Loading] = {}
        """By request id."""
        self._new_loads: list[Load] = []
        self._jobs = itertools.count(1)

    def bind(self, block_pool: Any) -> None:
        """The pool of the engine's blocks, for pinning."""
        self._pins.bind(block_pool)

    def meet(self, ranks: Iterable[RankParts]) -> None:
        """All ranks have told which parts they hold; one that holds none is off, and so is the engine."""
        known: dict[str, Part] = {}
        for rank in ranks:
            if not rank.parts:
                log.warning("HPKV is off: a rank of the engine could not register")
                return
            if rank.machine != machine_id() and not all(part.place for part in rank.parts):
                log.warning("HPKV is off: a rank runs on another machine; start engines over several by --nnodes")
                return
            known.update((part.name, part) for part in rank.parts)
        parts = sorted(known.values(), key=lambda part: part.name)
        try:
            self._directory = Directory(self._settings, parts, self._counters)
        except HpkvError as problem:
            log.warning("HPKV is off: %s", problem)

    # -- look-ups -----------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Start the look-up at once; its answer is here when the request is scheduled."""
        state = self._state(request)
        if not request.skip_reading_prefix_cache and state.adapter is not None:
            self._ask(state)

    def _state(self, request: Any) -> _Request:
        state = self._requests.get(request.request_id)
        if state is None:
            parts = len(self._directory.parts)
            adapter = self._adapters.digest(request) if self._epoch.settled else None
            state = _Request(request, [[] for _ in range(parts)], [0] * parts, adapter)
            self._requests[request.request_id] = state
        return state

    def _extend_keys(self, state: _Request) -> None:
        self._keys.extend(state.keys, self._directory, state.request.block_hashes, state.adapter or b"")

    def _limit(self, request: Any) -> int:
        """The last token of a prompt is always computed: its logits are needed."""
        return int(request.num_tokens - 1) // self._alignment * self._alignment

    def _ask(self, state: _Request) -> None:
        self._extend_keys(state)
        self._directory.drop(state.lookup)
        limit = self._limit(state.request)
        keys = [keys[: limit // part.block_tokens] for part, keys in zip(self._directory, state.keys, strict=True)]
        state.lookup = self._directory.ask(keys, str(state.request.request_id)) if limit else None
        state.tokens = None if state.lookup else 0
        if state.lookup is not None and self._may_recompute and not self._pace.worth_waiting(time.monotonic()):
            # What is on its way is for those that ask later.
            state.lookup.patience = 0.0

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``local_tokens`` that can be loaded; None while the daemon has not answered yet."""
        state = self._state(request)
        given_up = state.late or state.failures > _RETRIES or state.adapter is None
        if request.skip_reading_prefix_cache or given_up or not self._directory.usable:
            return 0, False
        if state.lookup is None or self._is_stale(state.lookup):
            self._ask(state)
        if state.lookup is not None and not self._directory.answered(state.lookup):
            return None, False
        self._conclude(state)
        tokens = state.tokens or 0
        held = state.lookup is not None and state.lookup.leases
        if not held or tokens <= local_tokens or local_tokens % self._alignment:
            return 0, False
        if self._may_recompute and not self._pace.worth_loading(time.monotonic()):
            self._counters["hits_recomputed"] += 1
            self._counters["hit_tokens_recomputed"] += tokens - local_tokens
            self._directory.drop(state.lookup)
            return 0, False
        state.local = local_tokens
        return tokens - local_tokens, True

    def _is_stale(self, lookup: Lookup) -> bool:
        return time.monotonic() - lookup.asked > self._settings.lease_seconds / 2

    def _conclude(self, state: _Request) -> None:
        """Once all parts have answered: what can be loaded, and what need not be stored."""
        lookup = state.lookup
        if state.tokens is not None or lookup is None or lookup.open:
            return
        found = [lookup.found.get(index) for index in range(len(self._directory.parts))]
        state.tokens = 0
        if all(found):
            state.tokens = usable_tokens([one for one in found if one], self._limit(state.request), self._alignment)
        self._time_fetch(lookup)
        for index, part in enumerate(self._directory):
            one = found[index]
            leading = one.leading if one and not part.window_tokens else state.tokens // part.block_tokens
            state.offered[index] = max(state.offered[index], leading)

    def _time_fetch(self, lookup: Lookup) -> None:
        """Blocks came from disk or another node while the request waited: how fast."""
        if not lookup.fetched_since:
            return
        now, parts = time.monotonic(), self._directory.parts
        gained = [
            (lookup.found[index].leading - before) * parts[index].block_tokens
            for index, before in lookup.leading.items()
            if index in lookup.found
        ]
        self._pace.fetching.sample(max(gained, default=0), now - lookup.fetched_since, now)

    # -- plans --------------------------------------------------------------------------------------------

    def after_allocation(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """The engine has blocks for what ``matched_tokens`` promised: plan the load into them."""
        state = self._state(request)
        lookup = state.lookup
        if lookup is None:
            return
        if not external_tokens:
            self._directory.release(lookup.leases)
            lookup.leases = {}
            return
        tables = blocks.get_block_ids()
        end = state.local + external_tokens
        pieces = []
        for index, part in enumerate(self._directory):
            first = state.local // part.block_tokens
            wanted = tables[part.group][first : end // part.block_tokens]
            # Blocks before a sliding window are not there; the engine gives block 0 for them.
            absent = sum(1 for block in wanted if not block) if part.window_tokens else 0
            if absent < len(wanted):
                job, lease = next(self._jobs), lookup.leases.get(index, 0)
                pieces.append(Piece(part.name, job, lease, first + absent, wanted[absent:]))
        self._loading[request.request_id] = _Loading(lookup.leases, time.monotonic(), external_tokens)
        lookup.leases = {}
        self._counters["loads"] += 1
        self._counters["hit_tokens_loaded"] += external_tokens
        self._new_loads.append(Load(request.request_id, pieces))

    def plan_step(self, output: Any) -> StepMetadata:
        """Loads and stores of this step, for every rank."""
        idle = output.total_num_scheduled_tokens == 0
        self._directory.new_step(idle)
        number = next(self._steps)
        timed = self._is_timed(number, output.total_num_scheduled_tokens)
        metadata = StepMetadata(self._new_loads, [], idle, number, timed, self._epoch.changes)
        if not idle:
            self._epoch.computes(number)
        self._new_loads = []
        for request_id in output.preempted_req_ids or ():
            self._forget(request_id)
        computed = self._follow(output)
        for request_id, count in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None or state.adapter is None or request_id not in computed:
                continue
            reached = computed[request_id] + count
            if reached >= state.due:
                tables = compat.block_tables(output, request_id) or state.tables
                self._plan_stores(state, reached, tables, metadata)
        for request_id, found in compat.snapshots(output).items():
            state = self._requests.get(request_id)
            if state is not None and state.adapter is not None and self._directory.usable:
                self._plan_snapshots(state, found, metadata)
        return metadata

    def _is_timed(self, number: int, tokens: int) -> bool:
        """Whether the step is worth timing."""
        # A step whose end no rank reported is not waited for.
        self._timed.pop(number - _TIMED_STEPS, None)
        if tokens < LEAST_TOKENS:
            return False
        self._timed[number] = tokens, time.monotonic()
        return True

    def _forget(self, request_id: str) -> None:
        """After a preemption the request is looked up again, with the tokens it has by then."""
        state = self._requests.get(request_id)
        if state is not None:
            self._directory.drop(state.lookup)
            state.lookup, state.tokens, state.tables = None, None, []

    def _follow(self, output: Any) -> dict[str, int]:
        """Update the block tables; computed tokens of each scheduled request before this step."""
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            state = self._requests.get(new.req_id)
            if state is not None:
                state.tables = [list(table) for table in new.block_ids]
                computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            state = self._requests.get(request_id)
            if state is None:
                continue
            fresh = cached.new_block_ids[i]
            if fresh and request_id in cached.resumed_req_ids:
                state.tables = [list(table) for table in fresh]
            elif fresh:
                for table, more in zip(state.tables, fresh, strict=True):
                    table += more
            computed[request_id] = cached.num_computed_tokens[i]
        return computed

    def _plan_stores(
        self, state: _Request, computed: int, tables: list[list[int]] | tuple[list[int], ...], metadata: StepMetadata
    ) -> None:
        """Offer the blocks that are full after this step, have confirmed tokens and are not offered yet."""
        if not self._directory.usable:
            return
        if state.lookup is not None:
            self._conclude(state)
            if state.lookup.open:
                return
        self._extend_keys(state)
        for index, part in enumerate(self._directory):
            if part.snapshots:
                continue
            table, keys = tables[part.group], state.keys[index]
            first = state.offered[index]
            room = self._pins.room
            end = min(computed // part.block_tokens, len(keys), len(table), first + max(0, room), first + MAX_KEYS)
            wanted = [i for i in range(first, end) if table[i]]
            if wanted:
                parent = keys[first - 1] if first else None
                self._offer(part, parent, [keys[i] for i in wanted], [table[i] for i in wanted], metadata)
            state.offered[index] = max(first, end)
        ends = zip(self._directory, state.offered, strict=True)
        state.due = min(((end + 1) * part.block_tokens for part, end in ends if not part.snapshots), default=math.inf)

    def _plan_snapshots(self, state: _Request, found: list[tuple[int, int, int]], metadata: StepMetadata) -> None:
        """Offer snapshots as the engine hands them over: a block table does not tell where they are."""
        self._extend_keys(state)
        for index, part in enumerate(self._directory):
            for group, block, tokens in found:
                number, rest = divmod(tokens, part.block_tokens)
                known = part.snapshots and part.group == group and not rest and number <= len(state.keys[index])
                if known and block and self._pins.room > 0:
                    self._offer(part, None, [state.keys[index][number - 1]], [block], metadata)

    def _offer(
        self, part: Part, parent: bytes | None, keys: list[bytes], blocks: list[int], metadata: StepMetadata
    ) -> None:
        store = Store(part.name, next(self._jobs), not part.window_tokens, parent, b"".join(keys), blocks)
        self._counters["stores"] += 1
        self._pins.pin(store.job, blocks)
        metadata.stores.append(store)

    # -- results ------------------------------------------------------------------------------------------

    def take_output(self, output: Any) -> None:
        """What the ranks report: finished loads end leases, finished stores unpin blocks."""
        failed = set(getattr(output, "failed_recving", None) or ())
        now = time.monotonic()
        for request_id in output.finished_recving or ():
            load = self._loading.pop(request_id, None)
            if load is None:
                continue
            self._directory.release(load.leases)
            state = self._requests.get(request_id)
            if request_id not in failed:
                self._pace.loading.sample(load.tokens, now - load.planned, now)
                self._count_saved(load.tokens, now - load.planned)
                continue
            self._counters["load_failures"] += 1
            self._counters["hit_tokens_failed"] += load.tokens
            if state is not None:
                # What the daemons still have is asked for once more; vLLM has given the blocks of this load back.
                state.failures += 1
                state.late = now - load.planned >= self._settings.load_deadline_seconds
                state.lookup, state.tokens = None, None
                state.offer_anew()
        metadata = output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata):
            self._time(metadata.timed, now)
            if self._epoch.told(metadata.weights, metadata.noticed):
                self._weights_changed()
            for job, count in metadata.stored.items():
                self._pins.through(job, count)
        self._last_output = now

    def _count_saved(self, tokens: int, seconds: float) -> None:
        """A load took so long; computing the tokens would have taken what the engine's speed tells."""
        self._counters["load_wait_microseconds"] += int(seconds * 1e6)
        speed = self._pace.computing.latest()
        if speed:
            self._counters["saved_prefill_microseconds"] += int(tokens / speed * 1e6)

    def _weights_changed(self) -> None:
        """Requests that began before keep KV of both weights; those that come are cached under a salt of their own."""
        self._keys.salt(self._epoch.salt)
        for state in self._requests.values():
            self._directory.drop(state.lookup)
            state.lookup, state.tokens, state.adapter = None, None, None
        log.warning(
            "HPKV: the weights have been changed; %s",
            "what they compute is this engine's own"
            if self._epoch.settled
            else "nothing is cached until the engine's prefix cache and the connector's have been reset",
        )

    def _time(self, step: int, now: float) -> None:
        """A timed step has ended. It began when it was planned, or when the step before it ended."""
        tokens, planned = self._timed.pop(step, (0, 0.0))
        if tokens:
            self._pace.computing.sample(tokens, now - max(planned, self._last_output), now)

    @property
    def has_pins(self) -> bool:
        """The engine must keep stepping: ranks still have completions to report."""
        return bool(self._pins)

    def finished(self, request: Any) -> None:
        """The request is over. A load of it that still runs keeps its leases until the ranks report."""
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self._directory.drop(state.lookup)

    def reset(self) -> bool:
        """Forget this engine's blocks in the daemon; False if that could not be confirmed."""
        if self._pins.engine_is_empty:
            self._epoch.emptied()
        forgotten = self._epoch.forget()
        self._keys.salt(self._epoch.salt)
        for state in self._requests.values():
            self._directory.drop(state.lookup)
            state.lookup, state.tokens = None, None
            state.keys = [[] for _ in state.keys]
            state.offer_anew()
        return forgotten or self._directory.reset()

    def shutdown(self) -> None:
        """Leave the daemon politely."""
        self._directory.close()
