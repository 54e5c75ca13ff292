"""``HpkvConnectorV1``: the class vLLM instantiates by name. Translates its hooks; decides nothing itself."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from hpkv_client.errors import HpkvError
from hpkv_client.settings import from_environment
from hpkv_vllm import compat
from hpkv_vllm.metadata import RankParts, StepMetadata
from hpkv_vllm.metrics import CounterMetrics, CounterStats
from hpkv_vllm.plugin import SWITCH
from hpkv_vllm.scheduler import SchedulerConnector
from hpkv_vllm.worker import WorkerConnector

log = init_logger("vllm.hpkv")


def enabled() -> bool:
    """Whether the user switched HPKV on."""
    return os.environ.get(SWITCH, "0").strip().lower() in ("1", "true", "yes", "on")


class HpkvConnectorV1(KVConnectorBase_V1, SupportsHMA):
    """A cache beside the engine: every hook works, and means "miss", when HPKV is off or its daemon is not there."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # The stock policy ends a request whose load fails; the scheduler reads this after us.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        self._scheduler: SchedulerConnector | None = None
        self._worker: WorkerConnector | None = None
        if not enabled():
            if role == KVConnectorRole.SCHEDULER:
                log.warning("HPKV is off: set %s=1 to use it", SWITCH)
            return
        _show_client_log()
        try:
            compat.groups_of(vllm_config, kv_cache_config)
            settings = from_environment(os.environ)
            engine = str(vllm_config.kv_transfer_config.engine_id)
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = SchedulerConnector(vllm_config, kv_cache_config, settings)
            else:
                self._worker = WorkerConnector(vllm_config, kv_cache_config, settings, engine)
        except HpkvError as problem:
            log.warning("HPKV is off: %s", problem)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache may lose a store; nothing waits for it."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:  # noqa: ARG003
        """Head-major: a rank's shard of a block is one contiguous run per layer. vLLM takes it as a preference."""
        return "HND"

    # -- worker -------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        """Makes vLLM allocate the KV cache in memory that can be shared."""
        return self._worker.memory_context() if self._worker else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register this rank's shard with the daemon."""
        if self._worker:
            self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Send this step's loads."""
        if self._worker:
            self._worker.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only after its load."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do per layer: blocks are stored after the step."""

    def wait_for_save(self) -> None:
        """The step's blocks are full: send the stores."""
        if self._worker:
            self._worker.start_stores(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """vLLM before 0.30. Failed loads are reported as done and by ``get_block_ids_with_load_errors``."""
        return None, self._poll()[0]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        """Loads that ended, and those of them that failed."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        loaded, failed = self._poll()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def _poll(self) -> tuple[set[str], set[str]]:
        if not self._worker:
            return set(), set()
        metadata = self._connector_metadata
        self._worker.poll(isinstance(metadata, StepMetadata) and metadata.idle)
        return self._worker.results()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What this rank has to tell the scheduler after the step."""
        if not self._worker:
            return None
        metadata = self._connector_metadata
        return self._worker.metadata(metadata if isinstance(metadata, StepMetadata) else StepMetadata())

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    # -- scheduler ----------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The engine's blocks, for pinning the sources of stores."""
        if self._scheduler:
            self._scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """Look the prefix up as early as possible."""
        if self._scheduler:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the engine's own hit."""
        return self._scheduler.matched_tokens(request, num_computed_tokens) if self._scheduler else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load."""
        if self._scheduler:
            self._scheduler.after_allocation(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Everything the ranks have to do in this step."""
        return self._scheduler.plan_step(scheduler_output) if self._scheduler else StepMetadata()

    def update_connector_output(self, connector_output: Any) -> None:
        """Everything the ranks report."""
        if self._scheduler:
            self._scheduler.take_output(connector_output)

    def get_kv_connector_stats(self) -> CounterStats | None:
        """What this process counted since the last step."""
        side = self._scheduler or self._worker
        return side.changes.take() if side else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CounterStats:
        """In the API server: what its engines counted."""
        return CounterStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> CounterMetrics | None:
        """In the API server: where it is told."""
        if not enabled():
            return None
        return CounterMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def has_pending_push_work(self) -> bool:
        """Keep stepping until the sources of all stores are free."""
        return self._scheduler.has_pins if self._scheduler else False

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """Blocks under a store are pinned by themselves; the request's own may go."""
        if self._scheduler:
            self._scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Same, for engines with several KV-cache groups."""
        return self.request_finished(request, [])

    def get_handshake_metadata(self) -> RankParts | None:
        """Tells the scheduler which parts of the KV this rank holds; an empty answer means that HPKV is off."""
        if self._worker is None:
            return None
        return self._worker.parts() or RankParts(())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """What the ranks of all stages hold."""
        if self._scheduler:
            self._scheduler.meet(metadata.values())

    def take_events(self) -> Iterable[Any]:
        """No events."""
        return ()

    def reset_cache(self) -> bool | None:
        """Forget this model's blocks in the daemon."""
        return self._scheduler.reset() if self._scheduler else None

    def shutdown(self) -> None:
        """Leave the daemon."""
        for side in (self._scheduler, self._worker):
            if side:
                side.shutdown()


def _show_client_log() -> None:
    """The client library logs through vLLM's handlers."""
    client = logging.getLogger("hpkv_client")
    client.parent = logging.getLogger("vllm")
    client.setLevel(logging.INFO)
