"""Who is connected, and who holds what: ``hpkvd clients``, ``hpkvd leases``."""

from __future__ import annotations

from typing import Any

import click

from hpkv_daemon.cli.figures import count, duration
from hpkv_daemon.cli.options import (
    CLIENT_SETTINGS,
    as_json,
    client_settings,
    connected,
    reply_timeout,
    setting_options,
)
from hpkv_daemon.cli.output import emit, note
from hpkv_daemon.cli.tables import Column, figure, show, text

CLIENTS = (
    text("NAME", "name"),
    text("ENGINE", "engine"),
    text("MODEL", "model"),
    figure("RANK", "rank", str),
    figure("PID", "pid", str),
    figure("UID", "uid", lambda uid: str(uid) if uid >= 0 else "-"),
    text("HOST", "host"),
    figure("AGE", "age_seconds", duration),
    figure("IDLE", "idle_seconds", duration),
    Column("STATE", lambda row: row["problem"] or ("ready" if row["ready"] else "-")),
)

LEASES = (
    text("ENGINE", "engine"),
    text("MODEL", "model"),
    figure("BLOCKS", "blocks", count),
    figure("LOADS", "loads", count),
    figure("LEFT", "seconds_left", duration),
)


def clients_in(info: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each session of ``info``, with what its engine and its rank are."""
    engines = {engine["engine"]: engine for engine in info["engines"]}
    rows = []
    for session in info["sessions"]:
        engine = engines.get(session["engine"], {})
        rows.append(
            session
            | {
                "model": engine.get("model", ""),
                "ready": bool(engine.get("ready")),
                "problem": engine.get("problem", ""),
            }
        )
    return rows


@click.command()
@as_json
@reply_timeout(5.0)
@setting_options(*CLIENT_SETTINGS)
def clients(as_json: bool, timeout: float, **flags: Any) -> None:
    """List the sessions: engines' ranks and schedulers, and other programs."""
    with connected(client_settings(flags).socket, timeout) as connection:
        info = connection.call("info")
    rows = clients_in(info)
    if as_json:
        emit({"clients": rows, "left_out": info.get("left_out", {}).get("sessions", 0)}, as_json)
    else:
        show(CLIENTS, rows, "nobody is connected")
        if "left_out" in info:
            note("there are more than one answer holds; 'hpkvd stats' counts them")


@click.command()
@as_json
@reply_timeout(5.0)
@setting_options(*CLIENT_SETTINGS)
def leases(as_json: bool, timeout: float, **flags: Any) -> None:
    """List the leases: which engine may read how many blocks, and until when."""
    with connected(client_settings(flags).socket, timeout) as connection:
        found = connection.call("leases")
    if as_json:
        emit(found, as_json)
    else:
        show(LEASES, found["leases"], "no leases")
        if found.get("left_out"):
            note(f"{found['left_out']['leases']} more")
