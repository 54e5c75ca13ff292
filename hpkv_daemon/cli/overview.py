"""What ``hpkvd top`` shows: pure figures from two samples, and how they are laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpkv_daemon.cli.figures import count, duration, share, size, speed
from hpkv_daemon.cli.sessions import clients_in
from hpkv_daemon.cli.tables import Column, figure, table, text

if TYPE_CHECKING:
    from rich.console import RenderableType

ORDERS: Mapping[str, tuple[str, Callable[[dict[str, Any]], Any], bool]] = {
    "size": ("bytes", lambda row: row["bytes"], True),
    "blocks": ("blocks", lambda row: row["blocks"], True),
    "model": ("model", lambda row: row["model"], False),
}
"""Name of an order of the namespaces -> what it goes by, the key, largest first."""

HELP = "q: end   h: this line   s: sort by the next of size, blocks, model"

_TIERS = (
    text("TIER", "tier"),
    text("STATE", "state"),
    figure("USED", "used_bytes", size),
    figure("SIZE", "size_bytes", size),
    Column("FULL", lambda row: share(row["used_bytes"], row["size_bytes"]), figure=True),
    figure("BLOCKS", "blocks", count),
    figure("READ", "read_bytes_per_second", speed),
    figure("WRITE", "write_bytes_per_second", speed),
    figure("EVICTED/s", "evicted_blocks_per_second", count),
)
_NAMESPACES = (
    text("MODEL", "model"),
    text("NAMESPACE", "short"),
    figure("BLOCKS", "blocks", count),
    figure("BYTES", "bytes", size),
    figure("BLOCK", "block_bytes", size),
)
_ENGINES = (
    text("ENGINE", "engine"),
    text("MODEL", "model"),
    text("STRATEGY", "strategy"),
    figure("RANKS", "ranks", str),
    figure("SESSIONS", "sessions", str),
    Column("STATE", lambda row: row["problem"] or ("ready" if row["ready"] else "waits for ranks")),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the daemon said at one moment (seconds of any clock that only grows)."""

    moment: float
    stats: Mapping[str, Any]
    info: Mapping[str, Any]


def overview(before: Sample, now: Sample, order: str = "size") -> dict[str, Any]:
    """The figures of the time between two samples of one daemon; ``before`` may be of an earlier one, or the same."""
    same = before.info["epoch"] == now.info["epoch"] and now.moment > before.moment
    seconds = now.moment - before.moment if same else now.stats["uptime_seconds"] or 1.0

    def gained(name: str) -> float:
        return float(now.stats.get(name, 0) - (before.stats.get(name, 0) if same else 0))

    def per_second(name: str) -> float:
        return round(gained(name) / seconds, 3)

    pool, storage = now.info["pool"], now.info["storage"]
    _, key, descending = ORDERS[order]
    namespaces = [row | {"bytes": row["blocks"] * row["block_bytes"]} for row in now.info["namespaces"]]
    clients = clients_in(dict(now.info))
    requested, matched = gained("requested_blocks"), gained("matched_blocks")
    return {
        "pid": now.info["pid"],
        "epoch": now.info["epoch"],
        "uptime_seconds": now.info["uptime_seconds"],
        "interval_seconds": round(seconds, 3),
        "requests_per_second": per_second("requests"),
        "requested_blocks": int(requested),
        "matched_blocks": int(matched),
        "hit_percent": round(100 * matched / requested, 2) if requested else None,
        "sessions": now.stats["sessions"],
        "leases": now.stats["leases"],
        "tiers": [
            {
                "tier": "memory",
                "state": "ready",
                "used_bytes": pool["resident_bytes"],
                "size_bytes": pool["size_bytes"],
                "blocks": pool["resident_blocks"],
                "read_bytes_per_second": per_second("loaded_bytes"),
                "write_bytes_per_second": per_second("stored_bytes"),
                "evicted_blocks_per_second": per_second("evicted_blocks"),
            },
            {
                "tier": "disk",
                "state": storage["state"] if storage["budget_bytes"] else "off",
                "used_bytes": storage["used_bytes"],
                "size_bytes": storage["budget_bytes"],
                "blocks": storage["blocks"],
                "read_bytes_per_second": per_second("storage_read_bytes"),
                "write_bytes_per_second": per_second("storage_written_bytes"),
                "evicted_blocks_per_second": per_second("storage_evicted_blocks"),
            },
            *_remote(now, per_second),
        ],
        "namespaces": sorted(namespaces, key=key, reverse=descending),
        "engines": [
            {
                "engine": engine["engine"],
                "model": engine["model"],
                "strategy": engine["strategy"],
                "ranks": f"{len(engine['ranks'])}/{engine['world']}",
                "sessions": sum(client["engine"] == engine["engine"] for client in clients),
                "ready": engine["ready"],
                "problem": engine["problem"],
            }
            for engine in now.info["engines"]
        ],
    }


def layout(found: Mapping[str, Any], footer: str = "") -> RenderableType:
    """The figures as tables, a line about the daemon above them and ``footer`` below."""
    from rich.console import Group
    from rich.text import Text

    hit = "-" if found["hit_percent"] is None else f"{found['hit_percent']:.1f}%"
    head = (
        f"hpkvd pid {found['pid']}, up {duration(found['uptime_seconds'])}: hit rate {hit} "
        f"({count(found['matched_blocks'])} of {count(found['requested_blocks'])} blocks), "
        f"{count(found['requests_per_second'])} requests/s, {count(found['sessions'])} sessions, "
        f"{count(found['leases'])} leases; last {duration(found['interval_seconds'])}"
    )
    rows = [row | {"short": row["id"][:12]} for row in found["namespaces"]]
    parts: list[RenderableType] = [Text(head), Text(), table(_TIERS, found["tiers"])]
    if found["engines"]:
        parts += [Text(), table(_ENGINES, found["engines"])]
    if rows:
        parts += [Text(), table(_NAMESPACES, rows)]
    if footer:
        parts += [Text(), Text(footer, style="dim")]
    return Group(*parts)


def _remote(now: Sample, per_second: Callable[[str], float]) -> list[dict[str, Any]]:
    """The row of the tier that nodes share, if there is one. How much it holds is known to the store only."""
    state = now.info.get("remote", {}).get("state", "off")
    if state == "off":
        return []
    return [
        {
            "tier": "remote",
            "state": state,
            "used_bytes": None,
            "size_bytes": None,
            "blocks": None,
            "read_bytes_per_second": per_second("remote_read_bytes"),
            "write_bytes_per_second": per_second("remote_written_bytes"),
            "evicted_blocks_per_second": None,
        }
    ]
