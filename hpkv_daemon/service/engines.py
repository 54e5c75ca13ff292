"""Engines: the ranks that registered, their common canonical layout, and their store jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpkv_client.errors import LayoutRefused, NotRegistered, UsageError
from hpkv_client.topology import CanonicalLayout, canonical_layout, place
from hpkv_client.types import Keys, MemoryHandle, RankShard, typed_digest
from hpkv_daemon.core.store import Reservation
from hpkv_daemon.movers.base import Attachment
from hpkv_daemon.service.sessions import Session

_REMEMBERED_JOBS = 4096


@dataclass(slots=True)
class Rank:
    """One registered rank."""

    number: int
    session: Session
    shard: RankShard
    regions: tuple[MemoryHandle, ...]
    control: MemoryHandle | None
    device: str
    place: str
    attachment: int = 0
    attached: bool = False
    written_blocks: int = 0
    """Blocks of which this rank wrote its part."""


@dataclass(slots=True)
class StoreJob:
    """One store of an engine, over all of its ranks. Decided once, when its first rank asks."""

    number: int
    keys: Keys
    parent: bytes | None
    chained: bool
    reservation: Reservation
    started: float
    missing: set[int]
    """Ranks that have not asked yet."""
    namespace: int
    turn: int = 0
    """The engine's turn at which this job's first block is written."""
    copying: set[tuple[str, int]] = field(default_factory=set)
    """(device, ticket) of the copies under way."""
    replies: list[tuple[bytes, int]] = field(default_factory=list)
    """Replies that wait for the job's end: (identity, request id)."""
    failed: bool = False

    def part_of(self, shard: RankShard, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """(slot, block) of each block that a rank with this shard writes; ``blocks`` are the rank's, one per key.

        Equal replicas take turns, block by block and from job to job: their shares differ by one block at most.
        """
        fresh = [(slot, block) for slot, block in zip(self.reservation.slots, blocks, strict=True) if slot >= 0]
        return fresh[(shard.replica - self.turn) % shard.replicas :: shard.replicas]


class Engine:
    """One engine replica on this node: complete when ``world`` ranks have registered."""

    def __init__(self, name: str, world: int, fingerprint: bytes, model: str, strategy: str, block_tokens: int) -> None:
        self.name = name
        self.world = world
        self.fingerprint = fingerprint
        self.model = model
        self.strategy = strategy
        self.block_tokens = block_tokens
        self.fields: dict[str, str] = {}
        """What its namespace is made of, for operators."""
        self.key_namespace, self.group = b"", 0
        """Under which it makes block keys, for routers; empty if it does not say."""
        self.archive = False
        """Its fingerprint is that of a namespace as the daemon names it: an operator copies blocks of others."""
        self.ranks: dict[int, Rank] = {}
        self.layout: CanonicalLayout | None = None
        self.namespace: int | None = None
        self.problem = ""
        self.stores: dict[int, StoreJob] = {}
        self.turn = 0
        """Blocks that replicas were given to write so far."""
        self._ended: dict[int, frozenset[int]] = {}

    @property
    def complete(self) -> bool:
        """All ranks are registered."""
        return len(self.ranks) == self.world

    @property
    def ready(self) -> bool:
        """All ranks are registered, proven and mapped: blocks can move."""
        return self.namespace is not None and self.complete and all(rank.attached for rank in self.ranks.values())

    def admit(self, rank: Rank, world: int, fingerprint: bytes) -> None:
        """Add a rank. Raises ``UsageError`` when it contradicts the ranks before it."""
        if world != self.world or rank.number >= world:
            raise UsageError(f"rank {rank.number} of {world} in an engine of {self.world} ranks")
        if fingerprint != self.fingerprint:
            raise UsageError("the ranks of one engine registered different namespaces", "use one model and config")
        self.ranks[rank.number] = rank
        self.layout = None
        self.namespace = None
        self.problem = ""

    def has(self, session: Session) -> bool:
        """Whether the session registered a rank."""
        return any(rank.session is session for rank in self.ranks.values())

    def leave(self, session: Session) -> list[Rank]:
        """Remove the ranks of a session; they are returned so that their memory can be unmapped."""
        gone = [rank for rank in self.ranks.values() if rank.session is session]
        for rank in gone:
            del self.ranks[rank.number]
        if gone:
            self.namespace = None
        return gone

    def prove(self) -> bytes:
        """Fix the canonical layout; the digest that names blocks of exactly this layout.

        Raises ``LayoutRefused`` when the shards do not tile it.
        """
        self.layout = canonical_layout([rank.shard for rank in self.ranks.values()])
        if self.archive:
            return self.fingerprint
        return typed_digest(b"hpkv-layout-v1", self.fingerprint, self.layout.description)

    def attachment_of(self, rank: Rank) -> Attachment:
        """What a mover must map for the rank."""
        if self.layout is None:
            raise LayoutRefused("the engine's layout is not proven yet")
        return Attachment(rank.regions, rank.control, place(rank.shard, self.layout), rank.shard.blocks)

    def rank_of(self, session: Session) -> Rank:
        """The rank that a session registered. Raises ``NotRegistered``."""
        for rank in self.ranks.values():
            if rank.session is session:
                return rank
        raise NotRegistered("this session registered no rank", "register first")

    def end(self, job: StoreJob) -> None:
        """Forget a store job, but remember its number: a late rank must not open it again."""
        self.stores.pop(job.number, None)
        self._ended[job.number] = frozenset(job.missing)
        if len(self._ended) > _REMEMBERED_JOBS:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, number: int) -> bool:
        """Whether the job ran before."""
        return number in self._ended

    def ended_without(self, number: int, rank: int) -> bool:
        """Whether the job was given up before this rank asked."""
        return rank in self._ended.get(number, ())
