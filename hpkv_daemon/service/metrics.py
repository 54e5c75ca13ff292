"""The metrics of ``/metrics``: one table of names, types and meanings, each with how it is read from a snapshot.

Names by the rules of Prometheus: base units, ``_total`` for counters. Labels are bounded: at most ``MOST_APART``
namespaces and models are told apart, the rest is summed under empty labels. ``docs/metrics.md`` is its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hpkv_client.counters import ENGINE_COUNTERS
from hpkv_daemon.core.counts import MOST_APART, BlockCounts, Histogram, Moved
from hpkv_daemon.service.snapshot import Snapshot

SHORT_NAME = 12
"""Hexadecimal digits of a namespace in its label: enough to find it in ``hpkvd info``."""

Labels = tuple[str, ...]
Sample = tuple[Labels, float | Histogram]
Read = Callable[[Snapshot], Iterable[Sample]]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. ``kind`` is counter, gauge or histogram; ``read`` gives values, with labels in their order."""

    name: str
    kind: str
    help: str
    labels: Labels
    read: Read


REMOTE_COUNTERS = {
    "existing_blocks": "Blocks that were to be written and were there",
    "failed_writes": "Blocks that could not be written",
    "failed_reads": "Blocks that could not be read",
    "missing_blocks": "Blocks that were believed to be there and were not",
    "bad_blocks": "Objects that were not the block they should be",
    "refused_writes": "Blocks that it did not take",
    "refused_reads": "Blocks that it did not give",
    "lookups": "Look-ups in the store",
    "lookup_questions": "Blocks that they asked for",
    "lookup_timeouts": "Look-ups that were not answered in time",
    "restarts": "Remote processes that died and were replaced",
}
"""Counters of the remote tier that are no transfers, with their texts."""

_NAMESPACE = ("namespace", "model")
_MOVES = ("tier", "direction", *_NAMESPACE)


def _labels(counts: BlockCounts) -> Labels:
    return counts.name[:SHORT_NAME], counts.model


def _shown(snapshot: Snapshot) -> Iterable[BlockCounts]:
    """The counts of all namespaces, those of the rest only if anything is in them."""
    rest, *apart = snapshot.namespaces
    return [*apart, rest] if rest.offered or rest.resident or rest.lookups else apart


def _one(value: Callable[[Snapshot], float]) -> Read:
    return lambda snapshot: [((), value(snapshot))]


def _counted(name: str, unit: float = 1) -> Read:
    return lambda snapshot: [
        ((), snapshot.counters.get(name, 0) / unit if unit != 1 else snapshot.counters.get(name, 0))
    ]


def _each(*values: tuple[Labels, Callable[[BlockCounts], float]]) -> Read:
    """Of every namespace, a value for each of these leading labels."""
    return lambda snapshot: [
        ((*leading, *_labels(counts)), value(counts)) for counts in _shown(snapshot) for leading, value in values
    ]


def _moved(value: Callable[[Moved], float]) -> Read:
    memory = [
        (("memory", "load"), lambda counts: value(counts.loads)),
        (("memory", "store"), lambda counts: value(counts.stores)),
    ]
    disk = [
        (("disk", "load"), lambda counts: value(counts.reads)),
        (("disk", "store"), lambda counts: value(counts.writes)),
    ]

    remote = [
        (("remote", "load"), lambda counts: value(counts.remote_reads)),
        (("remote", "store"), lambda counts: value(counts.remote_writes)),
    ]

    def read(snapshot: Snapshot) -> Iterable[Sample]:
        beyond = [*(disk if _has_storage(snapshot) else ()), *(remote if _has_remote(snapshot) else ())]
        return _each(*memory, *beyond)(snapshot)

    return read


def _has_storage(snapshot: Snapshot) -> bool:
    return bool(snapshot.storage["budget_bytes"])


def _has_remote(snapshot: Snapshot) -> bool:
    return bool(snapshot.remote["state"] != "off")


def _resident_bytes(snapshot: Snapshot) -> Iterable[Sample]:
    """Those that are not counted apart have what is left."""
    rest = snapshot.pool.resident_bytes
    for counts in _shown(snapshot):
        if counts.block_bytes:
            size = counts.resident * counts.block_bytes
            rest -= size
            yield _labels(counts), size
        else:
            yield _labels(counts), rest


def _evicted(snapshot: Snapshot) -> Iterable[Sample]:
    yield from _each((("memory",), lambda counts: counts.evicted))(snapshot)
    if _has_storage(snapshot):
        yield ("disk", "", ""), snapshot.counters.get("storage_evicted_blocks", 0)


def _durations(snapshot: Snapshot) -> Iterable[Sample]:
    for (tier, direction), taken in snapshot.durations.items():
        if tier != "disk" or _has_storage(snapshot):
            yield (tier, direction), taken


def _told(name: str, unit: float) -> Read:
    def read(snapshot: Snapshot) -> Iterable[Sample]:
        for model, totals in snapshot.engines.items():
            value = totals.get(name, 0)
            yield (model,), value / unit if unit != 1 else value

    return read


def _quotas(position: int) -> Read:
    def read(snapshot: Snapshot) -> Iterable[Sample]:
        for account in snapshot.accounts[:MOST_APART]:
            if account[position] is not None:
                yield (account[0],), account[position]  # type: ignore[misc]

    return read


def _storage_state(snapshot: Snapshot) -> Iterable[Sample]:
    if _has_storage(snapshot):
        for state in ("starting", "recovering", "ready", "degraded"):
            yield (state,), float(snapshot.storage["state"] == state)


def _storage(name: str) -> Read:
    return lambda snapshot: [((), float(snapshot.storage[name]))] if _has_storage(snapshot) else []


def _storage_counted(name: str) -> Read:
    read = _counted(f"storage_{name}")
    return lambda snapshot: read(snapshot) if _has_storage(snapshot) else []


def _remote_state(snapshot: Snapshot) -> Iterable[Sample]:
    if _has_remote(snapshot):
        for state in ("starting", "ready", "degraded"):
            yield (state,), float(snapshot.remote["state"] == state)


def _remote(name: str) -> Read:
    return lambda snapshot: [((), float(snapshot.remote[name]))] if _has_remote(snapshot) else []


def _remote_counted(name: str) -> Read:
    read = _counted(f"remote_{name}")
    return lambda snapshot: read(snapshot) if _has_remote(snapshot) else []


def _info(snapshot: Snapshot) -> Iterable[Sample]:
    identity = snapshot.identity
    return [((identity.version, identity.instance, identity.policy), 1)]


def _engine_metric(name: str) -> str:
    """``load_wait_microseconds`` is told in seconds."""
    return f"hpkv_engine_{name.replace('microseconds', 'seconds')}_total"


def _counter(name: str, text: str, labels: Labels, read: Read) -> Metric:
    return Metric(name, "counter", text, labels, read)


def _gauge(name: str, text: str, labels: Labels, read: Read) -> Metric:
    return Metric(name, "gauge", text, labels, read)


METRICS: tuple[Metric, ...] = (
    _gauge("hpkv_build_info", "Always 1", ("version", "instance", "policy"), _info),
    _gauge("hpkv_uptime_seconds", "Since the daemon began to serve", (), _one(lambda it: it.uptime)),
    _gauge("hpkv_sessions", "Connected ranks and clients", (), _one(lambda it: it.sessions)),
    _gauge(
        "hpkv_engines",
        "Engines by state: ready, or waiting for ranks, a proof or a mover",
        ("state",),
        lambda it: [(("ready",), sum(it.engines_ready)), (("waiting",), it.engines_ready.count(False))],
    ),
    _gauge("hpkv_leases", "Leases that are held", (), _one(lambda it: it.leases)),
    _gauge("hpkv_movers", "Mover processes", (), _one(lambda it: len(it.movers))),
    _gauge(
        "hpkv_mover_jobs",
        "Copies that wait or run",
        (),
        _one(lambda it: sum(int(str(one["jobs"])) for one in it.movers)),
    ),
    _counter("hpkv_mover_restarts_total", "Movers that died and were replaced", (), _counted("mover_restarts")),
    _counter("hpkv_requests_total", "Requests", (), _counted("requests")),
    _counter("hpkv_bad_requests_total", "Requests that break the protocol", (), _counted("bad_requests")),
    _counter(
        "hpkv_refused_requests_total", "Requests that were answered with an error", (), _counted("refused_requests")
    ),
    _counter("hpkv_internal_errors_total", "Bugs that a request or the clock met", (), _counted("internal_errors")),
    _counter(
        "hpkv_failed_jobs_total",
        "Loads and stores of which a copy failed, and stores that some rank never joined",
        ("kind",),
        lambda it: [
            (("load",), it.counters.get("load_failures", 0)),
            (("store",), it.counters.get("store_failures", 0)),
            (("abandoned",), it.counters.get("abandoned_jobs", 0)),
        ],
    ),
    _counter("hpkv_expired_leases_total", "Leases that nobody gave back in time", (), _counted("expired_leases")),
    _gauge("hpkv_pool_size_bytes", "Size of the pool", (), _one(lambda it: it.identity.pool_bytes)),
    _gauge(
        "hpkv_pool_free_bytes",
        "Part of the pool that no size of blocks has taken",
        (),
        _one(lambda it: it.slots[1] * it.slots[2]),
    ),
    _gauge(
        "hpkv_pool_reserved_blocks",
        "Blocks that are being written, wait for their parent, or are hidden but still read",
        (),
        _one(lambda it: it.pool.reserved_blocks),
    ),
    _gauge("hpkv_pool_pinned_blocks", "Blocks that cannot leave now", (), _one(lambda it: it.pool.pinned_blocks)),
    _counter(
        "hpkv_moved_spans_total", "Parts of the pool that went to another size of blocks", (), _counted("moved_spans")
    ),
    _gauge(
        "hpkv_resident_blocks", "Blocks that a look-up finds in memory", _NAMESPACE, _each(((), lambda it: it.resident))
    ),
    _gauge("hpkv_resident_bytes", "The same in bytes", _NAMESPACE, _resident_bytes),
    _counter(
        "hpkv_lookups_total", "Look-ups, without those of the next row", _NAMESPACE, _each(((), lambda it: it.lookups))
    ),
    _counter(
        "hpkv_deferred_lookups_total",
        "Look-ups that were told to ask again soon: storage gives blocks back",
        _NAMESPACE,
        _each(((), lambda it: it.deferred_lookups)),
    ),
    _counter(
        "hpkv_lookup_blocks_total",
        "Blocks that were looked up, by result: hit or miss",
        ("result", *_NAMESPACE),
        _each((("hit",), lambda it: it.hit), (("miss",), lambda it: it.missed)),
    ),
    _counter(
        "hpkv_offered_blocks_total",
        "Blocks that engines asked to store, and storage to give back",
        _NAMESPACE,
        _each(((), lambda it: it.offered)),
    ),
    _counter(
        "hpkv_kept_blocks_total", "Of these, blocks that were here already", _NAMESPACE, _each(((), lambda it: it.kept))
    ),
    _counter(
        "hpkv_dropped_blocks_total",
        "Of these, blocks without room (full: every slot was in use), or without a parent (orphan)",
        ("reason", *_NAMESPACE),
        _each((("full",), lambda it: it.full), (("orphan",), lambda it: it.orphan)),
    ),
    _counter(
        "hpkv_reserved_blocks_total",
        "Of these, blocks that got a slot",
        _NAMESPACE,
        _each(((), lambda it: it.reserved)),
    ),
    _counter(
        "hpkv_stored_blocks_total",
        "Blocks of engines that became resident",
        _NAMESPACE,
        _each(((), lambda it: it.stored)),
    ),
    _counter(
        "hpkv_promoted_blocks_total",
        "Blocks that storage gave back: the hits of the disk",
        _NAMESPACE,
        _each(((), lambda it: it.promoted)),
    ),
    _counter(
        "hpkv_aborted_blocks_total",
        "Blocks with a slot whose bytes did not come",
        _NAMESPACE,
        _each(((), lambda it: it.aborted)),
    ),
    _counter(
        "hpkv_withdrawn_blocks_total",
        "Blocks with a slot that were cleared, or lost their parent, before they became resident",
        _NAMESPACE,
        _each(((), lambda it: it.withdrawn)),
    ),
    _counter(
        "hpkv_restored_blocks_total",
        "Blocks that an earlier daemon left",
        _NAMESPACE,
        _each(((), lambda it: it.restored)),
    ),
    _counter(
        "hpkv_evicted_blocks_total",
        "Blocks that left to make room; of the disk for all namespaces together",
        ("tier", *_NAMESPACE),
        _evicted,
    ),
    _counter(
        "hpkv_cleared_blocks_total", "Resident blocks that were cleared", _NAMESPACE, _each(((), lambda it: it.cleared))
    ),
    _counter(
        "hpkv_transfer_blocks_total",
        "Blocks copied: between engines and memory (each rank's part counts), between memory and disk",
        _MOVES,
        _moved(lambda it: it.blocks),
    ),
    _counter("hpkv_transfer_bytes_total", "The same in bytes", _MOVES, _moved(lambda it: it.bytes)),
    _counter(
        "hpkv_transfer_seconds_total", "Time that movers and disk took for them", _MOVES, _moved(lambda it: it.seconds)
    ),
    Metric(
        "hpkv_transfer_duration_seconds",
        "histogram",
        "From a rank's request (memory), or the submission of a batch (disk), until the copy is over",
        ("tier", "direction"),
        _durations,
    ),
    _gauge("hpkv_quota_held_bytes", "What a model with a quota holds", ("quota",), _quotas(1)),
    _gauge("hpkv_quota_reserved_bytes", "What others leave it", ("quota",), _quotas(2)),
    _gauge("hpkv_quota_limit_bytes", "What it may hold at most", ("quota",), _quotas(3)),
    _gauge("hpkv_storage_state", "1 for the state that the disk tier is in", ("state",), _storage_state),
    _gauge("hpkv_storage_limit_bytes", "What the disk tier may take", (), _storage("budget_bytes")),
    _gauge("hpkv_storage_used_bytes", "What its files take", (), _storage("used_bytes")),
    _gauge("hpkv_storage_live_bytes", "Bytes of the blocks that it has", (), _storage("live_bytes")),
    _gauge("hpkv_storage_blocks", "Blocks that it has", (), _storage("blocks")),
    _gauge("hpkv_storage_queued_blocks", "Blocks that wait to be handed to it", (), _storage("queued_blocks")),
    _gauge("hpkv_storage_queued_bytes", "Bytes that it is writing", (), _storage("queued_bytes")),
    _counter(
        "hpkv_storage_failed_writes_total", "Blocks that could not be written", (), _storage_counted("failed_writes")
    ),
    _counter("hpkv_storage_failed_reads_total", "Blocks that could not be read", (), _storage_counted("failed_reads")),
    _counter("hpkv_storage_bad_records_total", "Blocks that were damaged", (), _storage_counted("bad_records")),
    _counter(
        "hpkv_storage_refused_writes_total", "Blocks that it did not take", (), _storage_counted("refused_writes")
    ),
    _counter("hpkv_storage_refused_reads_total", "Blocks that it did not give", (), _storage_counted("refused_reads")),
    _counter(
        "hpkv_storage_reinserted_blocks_total",
        "Blocks that were written again elsewhere",
        (),
        _storage_counted("reinserted_blocks"),
    ),
    _counter(
        "hpkv_storage_restarts_total", "Disk processes that died and were replaced", (), _storage_counted("restarts")
    ),
    _gauge("hpkv_remote_state", "1 for the state that the remote tier is in", ("state",), _remote_state),
    _gauge("hpkv_remote_queued_blocks", "Blocks that wait to be handed to it", (), _remote("queued_blocks")),
    _gauge("hpkv_remote_queued_bytes", "Bytes that it is writing", (), _remote("queued_bytes")),
    *(_counter(f"hpkv_remote_{name}_total", text, (), _remote_counted(name)) for name, text in REMOTE_COUNTERS.items()),
    *(
        _counter(_engine_metric(name), text, ("model",), _told(name, 1e6 if name.endswith("_microseconds") else 1))
        for name, text in ENGINE_COUNTERS.items()
    ),
)
"""Every metric, in the order of the documentation."""
