"""What scheduler and worker connectors tell each other. Pickled by vLLM: ids and keys only."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class Part:
    """What one daemon keeps apart from the rest of an engine's KV: layers of one group with one split of heads.

    ``engine`` is what the engine is called at that daemon, ``place`` the daemon's ``HOST:PORT`` if it runs on
    another node than the scheduler. Blocks with ``snapshots`` hold the state of recurrent layers.
    """

    name: str
    group: int
    block_tokens: int
    window_tokens: int
    snapshots: bool
    engine: str
    place: str = ""


@dataclass(slots=True)
class RankParts(KVConnectorHandshakeMetadata):
    """Handshake, worker to scheduler: the parts of which this rank holds layers, and the machine it runs on."""

    parts: tuple[Part, ...]
    machine: str = ""


@dataclass(slots=True)
class Piece:
    """Blocks ``first`` .. under one lease of one part to copy into the engine's ``blocks``."""

    part: str
    job: int
    lease: int
    first: int
    blocks: list[int]


@dataclass(slots=True)
class Load:
    """Everything a request waits for."""

    request_id: str
    pieces: list[Piece]


@dataclass(slots=True)
class Store:
    """Blocks of one part that are full after this step. ``parent``: key of the block before, None at the start."""

    part: str
    job: int
    chained: bool
    parent: bytes | None
    keys: bytes
    blocks: list[int]


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """Scheduler to worker. ``idle``: nothing is computed, the worker may wait a moment for the daemon.

    ``number`` counts steps from 1; of a ``timed`` one the ranks report the end. ``weights``: as many changes of the
    weights as the scheduler knows of; ranks that know of more touch none of these blocks.
    """

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    idle: bool = False
    number: int = 0
    timed: bool = False
    weights: int = 0

    def __reduce__(self) -> tuple[type[StepMetadata], tuple[object, ...]]:
        """Every step carries one, mostly an empty one: this is a third of what pickling it takes otherwise."""
        return StepMetadata, (self.loads, self.stores, self.idle, self.number, self.timed, self.weights)


@dataclass(slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Worker to scheduler: how many ranks no longer need the source blocks of each store job.

    ``timed``: number of a timed step that has ended. ``weights``: changes of the weights, if the scheduler knows of
    fewer, and ``noticed`` the number of the step before which they happened.
    """

    stored: dict[int, int]
    timed: int = 0
    weights: int = 0
    noticed: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Sum over the ranks of one step."""
        assert isinstance(other, WorkerMetadata)
        total = dict(self.stored)
        for job, count in other.stored.items():
            total[job] = total.get(job, 0) + count
        return WorkerMetadata(
            total,
            max(self.timed, other.timed),
            max(self.weights, other.weights),
            max(self.noticed, other.noticed),
        )
