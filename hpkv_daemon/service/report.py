"""What the daemon tells operators. Units are in the names; no keys, tokens or salts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hpkv_client.wire import MAX_FRAME, MAX_INT, Body, encode_reply
from hpkv_daemon.core.store import BlockStore
from hpkv_daemon.service.engines import Engine
from hpkv_daemon.service.explain import Explanations
from hpkv_daemon.service.movers import Movers
from hpkv_daemon.service.sessions import Session, SessionTable
from hpkv_daemon.tiers.base import COUNTERS as TIER_COUNTERS
from hpkv_daemon.tiers.remote.shared import COUNTERS as REMOTE_TIER_COUNTERS


@dataclass(frozen=True, slots=True)
class Identity:
    """What the daemon tells about itself."""

    pid: int
    epoch: str
    version: str
    instance: str
    socket: str
    pool_path: str
    pool_bytes: int
    policy: str
    metrics: str = ""
    """``HOST:PORT`` of ``/metrics``, empty without."""
    events: str = ""
    """Where KV events are published, empty without."""


def describe(
    identity: Identity,
    uptime: float,
    awake: float,
    store: BlockStore,
    engines: Iterable[Engine],
    sessions: SessionTable,
    movers: Movers,
    explanations: Explanations,
    tiers: dict[str, Body],
) -> Body:
    """The body of ``info``. ``awake`` is now by the sessions' clock."""
    engines = list(engines)
    whole: Body = {
        "pid": identity.pid,
        "epoch": identity.epoch,
        "version": identity.version,
        "instance": identity.instance,
        "uptime_seconds": round(uptime, 3),
        "socket": identity.socket,
        "metrics": identity.metrics,
        "events": identity.events,
        "pool": _pool(identity, store),
        "namespaces": _namespaces(store, engines, explanations),
        "quotas": [
            {
                "model": account.name or "(all others)",
                "held_bytes": account.held,
                "reserved_bytes": account.reserved,
                "maximum_bytes": account.maximum,
            }
            for account in store.blocks.accounts
        ],
        "engines": [_engine(engine, _counted(engine, sessions)) for engine in engines],
        "sessions": [
            {
                "name": session.name,
                "engine": session.engine,
                "pid": session.pid,
                "uid": session.uid,
                "host": session.host,
                "rank": _rank_of(session, engines),
                "age_seconds": round(awake - session.started, 3),
                "idle_seconds": round(awake - session.seen, 3),
            }
            for session in sessions
        ],
        "leases": {"count": len(store.leases)},
        "movers": movers.describe(),
        **tiers,
    }
    return fitted(whole)


def _rank_of(session: Session, engines: list[Engine]) -> int | None:
    """The number of the rank that the session registered, if it did."""
    own = (rank.number for engine in engines for rank in engine.ranks.values() if rank.session is session)
    return next(own, None)


def leases(store: BlockStore, now: float) -> Body:
    """The body of ``leases``, those that end first first."""
    rows = [
        {
            "engine": str(lease.owner),
            "model": store.blocks.namespaces[lease.namespace].tenant,
            "blocks": lease.length,
            "loads": lease.transfers,
            "seconds_left": round(max(0.0, lease.deadline - now), 3),
        }
        for lease in sorted(store.leases, key=lambda lease: lease.deadline)
    ]
    return fitted({"leases": rows})


def fitted(body: Body) -> Body:
    """The body, with as many of its longest list's last entries left out as it takes to fit into a frame."""
    lists = [name for name, value in body.items() if isinstance(value, list)]
    left_out: Counter[str] = Counter()
    while len(encode_reply(MAX_INT, body)) > MAX_FRAME and any(body[name] for name in lists):
        longest = max(lists, key=lambda name: len(encode_reply(0, {name: body[name]})))
        kept = len(body[longest]) // 2
        left_out[longest] += len(body[longest]) - kept
        body = body | {longest: body[longest][:kept], "left_out": dict(left_out)}
    return body


def _pool(identity: Identity, store: BlockStore) -> Body:
    slots, usage = store.blocks.slots, store.blocks.usage
    return {
        "path": identity.pool_path,
        "size_bytes": identity.pool_bytes,
        "policy": identity.policy,
        "extent_bytes": slots.extent_bytes,
        "extents": slots.extents,
        "free_extents": slots.free_extents(),
        "restored_blocks": store.blocks.restored_blocks,
        "resident_blocks": usage.resident_blocks,
        "resident_bytes": usage.resident_bytes,
        "reserved_blocks": usage.reserved_blocks,
        "pinned_blocks": usage.pinned_blocks,
    }


def _namespaces(store: BlockStore, engines: list[Engine], explanations: Explanations) -> list[Body]:
    by_number = {engine.namespace: engine for engine in engines}
    found = []
    for number, namespace in enumerate(store.blocks.namespaces):
        engine = by_number.get(number)
        found.append(
            {
                "id": namespace.fingerprint.hex(),
                "model": explanations.model_of(number) or namespace.tenant,
                "block_bytes": namespace.block_bytes,
                "block_tokens": engine.block_tokens if engine else 0,
                "blocks": len(namespace.slots),
            }
        )
    return found


def _counted(engine: Engine, sessions: SessionTable) -> Body:
    """What the engine's processes count themselves, summed."""
    total: Counter[str] = Counter()
    for session in sessions:
        if session.engine == engine.name:
            total.update(session.counters)
    return dict(sorted(total.items()))


def _engine(engine: Engine, counted: Body) -> Body:
    return {
        "engine": engine.name,
        "model": engine.model,
        "strategy": engine.strategy,
        "world": engine.world,
        "ready": engine.ready,
        "problem": engine.problem,
        "namespace": engine.namespace,
        "key_namespace": engine.key_namespace.hex(),
        "group": engine.group,
        "block_tokens": engine.block_tokens,
        "block_bytes": engine.layout.block_bytes if engine.layout else 0,
        "counters": counted,
        "ranks": [
            {
                "rank": rank.number,
                "place": rank.place,
                "pid": rank.session.pid,
                "device": rank.device,
                "layers": len(rank.shard.layers),
                "first_layer": rank.shard.layers[0].name if rank.shard.layers else "",
                "last_layer": rank.shard.layers[-1].name if rank.shard.layers else "",
                "block_bytes": rank.shard.block_bytes,
                "replicas": rank.shard.replicas,
                "replica": rank.shard.replica,
                "written_blocks": rank.written_blocks,
            }
            for rank in sorted(engine.ranks.values(), key=lambda rank: rank.number)
        ],
    }


def statistics(counters: Counter[str], uptime: float, store: BlockStore, sessions: int, engines: int) -> Body:
    """The body of ``stats``: counters since start (monotonic) and gauges (``pool_*``, ``sessions``, ``leases``)."""
    usage = store.blocks.usage
    known = dict.fromkeys((*COUNTERS, *STORAGE_COUNTERS, *REMOTE_COUNTERS), 0) | dict(counters)
    return known | {
        "uptime_seconds": round(uptime, 3),
        "sessions": sessions,
        "engines": engines,
        "leases": len(store.leases),
        "pool_resident_blocks": usage.resident_blocks,
        "pool_resident_bytes": usage.resident_bytes,
        "pool_reserved_blocks": usage.reserved_blocks,
        "pool_pinned_blocks": usage.pinned_blocks,
    }


STORAGE_COUNTERS = tuple(f"storage_{name}" for name in TIER_COUNTERS)
REMOTE_COUNTERS = tuple(f"remote_{name}" for name in REMOTE_TIER_COUNTERS)
COUNTERS = (
    "requests",
    "bad_requests",
    "refused_requests",
    "internal_errors",
    "requested_blocks",
    "matched_blocks",
    "loaded_blocks",
    "loaded_bytes",
    "load_microseconds",
    "load_failures",
    "offered_blocks",
    "kept_blocks",
    "stored_blocks",
    "stored_bytes",
    "store_microseconds",
    "store_failures",
    "abandoned_jobs",
    "aborted_blocks",
    "dropped_full_blocks",
    "dropped_orphan_blocks",
    "promoted_blocks",
    "promoted_bytes",
    "evicted_blocks",
    "evicted_bytes",
    "moved_spans",
    "cleared_blocks",
    "expired_leases",
    "mover_restarts",
)
"""Every counter, present in ``stats`` from the start."""
