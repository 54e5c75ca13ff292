"""What scheduler and worker connectors tell each other, step by step. Pickled by vLLM: ids and keys only."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(slots=True)
class Load:
    """Blocks ``first`` .. of a leased prefix to copy into the engine's ``blocks`` for one request."""

    job: int
    request_id: str
    lease: int
    first: int
    blocks: list[int]


@dataclass(slots=True)
class Store:
    """Blocks that are full after this step. ``parent``: key of the block before the first, None at the start."""

    job: int
    parent: bytes | None
    keys: bytes
    blocks: list[int]


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """Scheduler to worker. ``idle``: nothing is computed, the worker may wait a moment for the daemon."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    idle: bool = False


@dataclass(slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Worker to scheduler: how many ranks no longer need the source blocks of each store job."""

    stored: dict[int, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Sum over the ranks of one step."""
        assert isinstance(other, WorkerMetadata)
        total = dict(self.stored)
        for job, count in other.stored.items():
            total[job] = total.get(job, 0) + count
        return WorkerMetadata(total)
