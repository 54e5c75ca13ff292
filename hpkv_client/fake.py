"""What ``hpkv_client.testing.FakeDaemon`` answers: the verbs of the protocol over a dict of blocks."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from hpkv_client import wire
from hpkv_client.errors import (
    HpkvError,
    LeaseLost,
    NotRegistered,
    UnknownSession,
    UsageError,
    VersionMismatch,
)
from hpkv_client.memory import map_shared
from hpkv_client.topology import CanonicalLayout, canonical_layout, place
from hpkv_client.types import BlockKey, Keys, RankShard, Run, typed_digest
from hpkv_client.wire import PROTOCOL, Body, Request, unpack_blocks

HEARTBEAT_SECONDS = 2.0
LEASE_SECONDS = 30.0


@dataclass(slots=True)
class _Session:
    name: str
    engine: str


@dataclass(slots=True)
class _Rank:
    """One registered rank and its memory, mapped."""

    session: int
    shard: RankShard
    regions: list[mmap.mmap]
    runs: tuple[Run, ...] = ()

    def pieces(self, block: int) -> Iterator[tuple[mmap.mmap, slice, slice]]:
        """Region, bytes in it and bytes of the canonical block, for all the rank holds of the block."""
        for run in self.runs:
            for i in range(run.count):
                local = run.local_offset + block * run.block_stride + i * run.local_step
                canonical = run.canonical_offset + i * run.canonical_step
                yield (
                    self.regions[run.region],
                    slice(local, local + run.fragment),
                    slice(canonical, canonical + run.fragment),
                )

    def close(self) -> None:
        for region in self.regions:
            region.close()


@dataclass(slots=True)
class _Store:
    """A store job over all ranks: the blocks it fills, and who has not asked yet."""

    keys: Keys
    filling: dict[BlockKey, bytearray]
    orphaned: bool
    missing: set[int]
    turn: int


@dataclass(slots=True)
class _Engine:
    world: int
    fingerprint: bytes
    ranks: dict[int, _Rank] = field(default_factory=dict)
    layout: CanonicalLayout | None = None
    stores: dict[int, _Store] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    problem: str = ""
    turn: int = 0

    @property
    def namespace(self) -> bytes:
        """What blocks of exactly this layout are kept under."""
        assert self.layout is not None
        return typed_digest(b"hpkv-layout-v1", self.fingerprint, self.layout.description)

    def complete(self) -> None:
        """Prove the layout once all ranks are here."""
        if len(self.ranks) == self.world:
            self.layout = canonical_layout([rank.shard for rank in self.ranks.values()])
            for rank in self.ranks.values():
                rank.runs = place(rank.shard, self.layout)


class FakeService:
    """Sessions, engines and blocks of a fake daemon. ``answer`` is the only way in; one thread at a time."""

    def __init__(self, blocks: dict[tuple[bytes, BlockKey], bytes]) -> None:
        self.blocks = blocks
        self.epoch = secrets.token_hex(8)
        self._started = time.monotonic()
        self._sessions: dict[int, _Session] = {}
        self._engines: dict[str, _Engine] = {}
        self._leases: dict[int, tuple[str, list[BlockKey]]] = {}
        self._counters: Counter[str] = Counter()

    def answer(self, request: Request) -> Body:
        """The body of the reply. Raises ``HpkvError`` for a refusal."""
        self._counters["requests"] += 1
        body = getattr(self, f"_do_{request.verb}")(request)
        assert isinstance(body, dict)
        return body

    def forget_sessions(self) -> None:
        """Every client is a stranger from now on."""
        for engine in self._engines.values():
            for rank in engine.ranks.values():
                rank.close()
        self._sessions.clear()
        self._engines.clear()
        self._leases.clear()

    # -- sessions -------------------------------------------------------------------------------------------

    def _do_hello(self, request: Request) -> Body:
        body = request.body
        if body["major"] != PROTOCOL[0]:
            raise VersionMismatch(f"the fake speaks {wire.version_text()}, the client {body['major']}")
        token = secrets.randbits(62) | 1
        self._sessions[token] = _Session(body["name"], body["engine"])
        return {
            "session": token,
            "epoch": self.epoch,
            "major": PROTOCOL[0],
            "minor": PROTOCOL[1],
            "pid": os.getpid(),
            "heartbeat_seconds": HEARTBEAT_SECONDS,
            "lease_seconds": LEASE_SECONDS,
        }

    def _session(self, request: Request) -> _Session:
        session = self._sessions.get(request.session)
        if session is None:
            raise UnknownSession("unknown session", "say hello again")
        return session

    def _engine(self, request: Request) -> _Engine:
        """The session's engine, ready to move blocks."""
        name = self._session(request).engine
        engine = self._engines.get(name)
        if engine is None or engine.layout is None:
            raise NotRegistered(f"engine {name!r} is not ready")
        return engine

    def _rank(self, request: Request) -> tuple[_Engine, int, _Rank]:
        engine = self._engine(request)
        for number, rank in engine.ranks.items():
            if rank.session == request.session:
                return engine, number, rank
        raise NotRegistered("this session registered no rank", "register first")

    def _do_bye(self, request: Request) -> Body:
        self._do_unregister(request)
        del self._sessions[request.session]
        return {}

    def _do_heartbeat(self, request: Request) -> Body:
        engine = self._engines.get(self._session(request).engine)
        ready = engine is not None and engine.layout is not None
        return {"epoch": self.epoch, "ready": ready, "problem": engine.problem if engine else "", "descriptors": ""}

    def _do_register(self, request: Request) -> Body:
        body, name = request.body, self._session(request).engine
        shard = wire.shard_from_wire(body)
        engine = self._engines.setdefault(name, _Engine(body["world"], body["namespace"]))
        if engine.world != body["world"] or body["rank"] >= engine.world:
            raise UsageError(f"rank {body['rank']} of {body['world']} in an engine of {engine.world} ranks")
        rank = _Rank(request.session, shard, [map_shared(handle) for handle in body["regions"]])
        if body["rank"] in engine.ranks:
            engine.ranks[body["rank"]].close()
        engine.ranks[body["rank"]] = rank
        try:
            engine.complete()
        except HpkvError as problem:
            engine.problem = str(problem)
            raise
        return {"ready": engine.layout is not None}

    def _do_unregister(self, request: Request) -> Body:
        name = self._session(request).engine
        engine = self._engines.get(name)
        if engine is not None:
            for number, rank in list(engine.ranks.items()):
                if rank.session == request.session:
                    engine.ranks.pop(number).close()
                    engine.layout = None
                    engine.stores.clear()
            if not engine.ranks:
                del self._engines[name]
        return {}

    # -- blocks ---------------------------------------------------------------------------------------------

    def _do_match(self, request: Request) -> Body:
        engine, keys = self._engine(request), Keys(request.body["keys"])
        hit = list(takewhile(lambda key: (engine.namespace, key) in self.blocks, keys))
        self._counters["requested_blocks"] += len(keys)
        self._counters["matched_blocks"] += len(hit)
        return {"hit": len(hit), "lease": self._grant(request, hit) if hit else 0, "coming": 0}

    def _do_acquire(self, request: Request) -> Body:
        engine, keys = self._engine(request), Keys(request.body["keys"])
        found = bytes((engine.namespace, key) in self.blocks for key in keys)
        return {"found": found, "lease": self._grant(request, list(keys)) if any(found) else 0, "coming": 0}

    def _grant(self, request: Request, keys: list[BlockKey]) -> int:
        lease = secrets.randbits(60) | 1
        self._leases[lease] = (self._session(request).engine, keys)
        return lease

    def _do_contains(self, request: Request) -> Body:
        namespace = self._engine(request).namespace
        return {"found": bytes((namespace, key) in self.blocks for key in Keys(request.body["keys"]))}

    def _do_release(self, request: Request) -> Body:
        name, number = self._session(request).engine, request.body["lease"]
        ours = number in self._leases and self._leases[number][0] == name
        if ours:
            del self._leases[number]
        return {"released": ours}

    def _do_load(self, request: Request) -> Body:
        engine, _, rank = self._rank(request)
        body, blocks = request.body, unpack_blocks(request.body["blocks"])
        owner, keys = self._leases.get(body["lease"], ("", []))
        if owner != self._session(request).engine:
            raise LeaseLost(f"lease {body['lease']} is unknown or expired", "match again")
        wanted = keys[body["first"] : body["first"] + len(blocks)]
        if len(wanted) != len(blocks):
            raise UsageError(f"lease {body['lease']} covers {len(keys)} blocks")
        if any((engine.namespace, key) not in self.blocks for key in wanted):
            raise UsageError(f"lease {body['lease']} covers only the blocks that were found")
        if any((engine.namespace, key) not in self.blocks for key in wanted):
            raise UsageError(f"lease {body['lease']} covers only the blocks that were found")
        self._fill(engine, rank, wanted, blocks)
        return {"loaded": len(blocks)}

    def _do_get(self, request: Request) -> Body:
        engine, _, rank = self._rank(request)
        pairs = _pairs(request)
        here = [(key, block) for key, block in pairs if (engine.namespace, key) in self.blocks]
        self._fill(engine, rank, [key for key, _ in here], [block for _, block in here])
        return {"found": bytes((engine.namespace, key) in self.blocks for key, _ in pairs)}

    def _fill(self, engine: _Engine, rank: _Rank, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        _require_blocks(rank, blocks)
        for key, block in zip(keys, blocks, strict=True):
            canonical = self.blocks[engine.namespace, key]
            for region, here, there in rank.pieces(block):
                region[here] = canonical[there]
        self._counters["loaded_blocks"] += len(blocks)
        self._counters["loaded_bytes"] += len(blocks) * rank.shard.block_bytes

    def _do_store(self, request: Request) -> Body:
        return self._keep(request, request.body["parent"])

    def _do_put(self, request: Request) -> Body:
        return self._keep(request, None)

    def _keep(self, request: Request, parent: bytes | None) -> Body:
        engine, number, rank = self._rank(request)
        job, pairs = request.body["job"], _pairs(request)
        _require_blocks(rank, [block for _, block in pairs])
        if job in engine.ended:
            raise UsageError(f"store job {job} is over", "number jobs upwards")
        store = engine.stores.get(job) or self._open_store(engine, Keys(request.body["keys"]), parent)
        engine.stores[job] = store
        if number not in store.missing or store.keys.blob != request.body["keys"]:
            raise UsageError(f"store job {job}: rank {number} asked twice or for other blocks")
        store.missing.discard(number)
        fresh = [(key, block) for key, block in pairs if key in store.filling]
        for key, block in fresh[(rank.shard.replica - store.turn) % rank.shard.replicas :: rank.shard.replicas]:
            for region, here, there in rank.pieces(block):
                store.filling[key][there] = region[here]
        if store.missing:
            return {"kept": 0, "dropped": 0, "partial": True}
        del engine.stores[job]
        engine.ended.add(job)
        self.blocks.update({(engine.namespace, key): bytes(data) for key, data in store.filling.items()})
        self._counters["stored_blocks"] += len(store.filling)
        self._counters["stored_bytes"] += sum(map(len, store.filling.values()))
        dropped = len(pairs) if store.orphaned else 0
        return {"kept": len(pairs) - dropped, "dropped": dropped, "partial": False}

    def _open_store(self, engine: _Engine, keys: Keys, parent: bytes | None) -> _Store:
        assert engine.layout is not None
        orphaned = parent is not None and (engine.namespace, parent) not in self.blocks
        fresh = [] if orphaned else [key for key in keys if (engine.namespace, key) not in self.blocks]
        size = engine.layout.block_bytes
        store = _Store(keys, {key: bytearray(size) for key in fresh}, orphaned, set(engine.ranks), engine.turn)
        engine.turn += len(store.filling)
        return store

    def _do_cancel(self, request: Request) -> Body:
        self._rank(request)
        return {"running": False}

    def _do_reset(self, request: Request) -> Body:
        return self._clear(self._engine(request).namespace)

    # -- operators ------------------------------------------------------------------------------------------

    def _do_clear(self, request: Request) -> Body:
        return self._clear(request.body["namespace"])

    def _clear(self, namespace: bytes | None) -> Body:
        gone = [where for where in self.blocks if namespace is None or where[0] == namespace]
        for where in gone:
            del self.blocks[where]
        self._leases.clear()
        return {"cleared_blocks": len(gone)}

    def _about(self) -> Body:
        uptime = round(time.monotonic() - self._started, 3)
        return {"pid": os.getpid(), "epoch": self.epoch, "uptime_seconds": uptime, "version": "fake"}

    def _do_ping(self, request: Request) -> Body:
        return self._about() | {
            "protocol": wire.version_text(),
            "instance": "",
            "echo": request.body["echo"],
        }

    def _do_info(self, request: Request) -> Body:  # noqa: ARG002
        return self._about() | {
            "engines": [
                {"engine": name, "world": engine.world, "ready": engine.layout is not None}
                for name, engine in self._engines.items()
            ],
            "sessions": [{"name": each.name, "engine": each.engine} for each in self._sessions.values()],
            "leases": {"count": len(self._leases)},
        }

    def _do_stats(self, request: Request) -> Body:  # noqa: ARG002
        return dict(self._counters) | {
            "sessions": len(self._sessions),
            "engines": len(self._engines),
            "leases": len(self._leases),
            "pool_resident_blocks": len(self.blocks),
            "pool_resident_bytes": sum(map(len, self.blocks.values())),
        }

    def _do_check(self, request: Request) -> Body:  # noqa: ARG002
        return {"ok": True, "blocks": len(self.blocks), "leases": len(self._leases)}

    def _do_config(self, request: Request) -> Body:  # noqa: ARG002
        return {"settings": {}, "origins": {}}


def _pairs(request: Request) -> list[tuple[BlockKey, int]]:
    keys, blocks = Keys(request.body["keys"]), unpack_blocks(request.body["blocks"])
    if len(keys) != len(blocks):
        raise UsageError(f"{len(keys)} keys for {len(blocks)} blocks")
    return list(zip(keys, blocks, strict=True))


def _require_blocks(rank: _Rank, blocks: Sequence[int]) -> None:
    if blocks and max(blocks) >= rank.shard.blocks:
        raise UsageError(f"block {max(blocks)} of an engine with {rank.shard.blocks} blocks")
