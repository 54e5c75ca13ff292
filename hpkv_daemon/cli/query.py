"""Commands that ask a running daemon: status, ping, stats, info, explain, check, clear; and version."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from hpkv_client.errors import HpkvError, NotPermitted, NotRunning, Unreachable, UsageError
from hpkv_daemon.cli.options import (
    CLIENT_SETTINGS,
    Connection,
    as_json,
    client_settings,
    connected,
    reply_timeout,
    setting_options,
)
from hpkv_daemon.cli.output import emit, note
from hpkv_daemon.locks import Holder, instance_holder

_ROLLING = ("requests", "matched_blocks", "loaded_blocks", "stored_blocks", "evicted_blocks", "sessions")
"""What ``stats -i`` shows of the many counters, if the daemon has them."""

_HEADER_EVERY = 20


@click.command()
@as_json
@reply_timeout(5.0)
@setting_options(*CLIENT_SETTINGS)
def status(as_json: bool, timeout: float, **flags: Any) -> int:
    """Say whether the daemon runs. Exit 0 if it answers, 3 if it does not run, 69 if it hangs."""
    settings = client_settings(flags)
    holder = _lock_holder(settings.socket)
    found: dict[str, Any] = {
        "running": False,
        "state": "stopped",
        "pid": holder.pid if holder else None,
        "socket": str(settings.socket),
        "epoch": None,
        "uptime_seconds": None,
    }
    exit_code = NotRunning.exit_code
    try:
        with connected(settings.socket, timeout) as connection:
            found |= connection.call("ping")
            found |= {"running": True, "state": "running"}
            exit_code = 0
    except NotRunning:
        if found["pid"] is not None:
            found["state"] = "starting"
    except Unreachable as problem:
        now = _lock_holder(settings.socket)
        if now is not None and not now.ready:
            # With socket activation connections are taken before there is a daemon.
            found |= {"pid": now.pid, "state": "starting"}
        else:
            found |= {"running": True, "state": "hanging"}
            exit_code = problem.exit_code
        note(str(problem))
    found.pop("echo", None)
    emit(found, as_json)
    return exit_code


def _lock_holder(socket_path: Path) -> Holder | None:
    try:
        return instance_holder(socket_path)
    except NotPermitted:
        # Another user's daemon: its socket will tell, if we may use that.
        return None


@click.command()
@as_json
@reply_timeout(5.0)
@setting_options(*CLIENT_SETTINGS)
def ping(as_json: bool, timeout: float, **flags: Any) -> None:
    """Ask the daemon for a sign of life and time it."""
    with connected(client_settings(flags).socket, timeout) as connection:
        connection.call("ping")
        started = time.perf_counter()
        reply = connection.call("ping")
        reply["round_trip_ms"] = round((time.perf_counter() - started) * 1000, 3)
    reply.pop("echo", None)
    emit(reply, as_json)


@click.command()
@as_json
@reply_timeout(5.0)
@click.option("-i", "--interval", type=click.FloatRange(min=0.01), help="Repeat every SECONDS, as rolling columns.")
@click.option("-n", "--count", type=click.IntRange(min=1), help="With -i: end after this many lines.")
@setting_options(*CLIENT_SETTINGS)
def stats(as_json: bool, timeout: float, interval: float | None, count: int | None, **flags: Any) -> None:
    """Print the daemon's counters and gauges."""
    if count is not None and interval is None:
        raise UsageError("--count needs --interval", "add -i SECONDS")
    with connected(client_settings(flags).socket, timeout) as connection:
        if interval is None:
            emit(dict(sorted(connection.call("stats").items())), as_json)
        else:
            _roll(connection, interval, count, as_json)


def _roll(connection: Connection, interval: float, count: int | None, as_json: bool) -> None:
    before: dict[str, Any] = {}
    line = 0
    while count is None or line < count:
        if line:
            time.sleep(interval)
        now = connection.call("stats")
        if as_json:
            emit(dict(sorted(now.items())), as_json)
        else:
            columns = [name for name in _ROLLING if name in now] or sorted(now)[: len(_ROLLING)]
            if line % _HEADER_EVERY == 0:
                click.echo("  ".join(f"{name:>22}" for name in columns))
            click.echo("  ".join(f"{_change(now[name], before.get(name)):>22}" for name in columns))
        before = now
        line += 1


def _change(value: Any, before: Any) -> str:
    return str(value) if before is None else f"{value} ({value - before:+})"


@click.command()
@as_json
@reply_timeout(5.0)
@setting_options(*CLIENT_SETTINGS)
def info(as_json: bool, timeout: float, **flags: Any) -> None:
    """Describe pool, namespaces, engines with their shards, sessions, leases, movers."""
    with connected(client_settings(flags).socket, timeout) as connection:
        emit(connection.call("info"), as_json)


@click.command()
@click.argument("engine", default="")
@as_json
@reply_timeout(5.0)
@click.option("--request", metavar="ID", default="", help="Only the look-ups of this request.")
@click.option("-n", "--last", type=click.IntRange(1, 256), default=20, show_default=True, help="So many look-ups.")
@setting_options(*CLIENT_SETTINGS)
def explain(engine: str, as_json: bool, timeout: float, request: str, last: int, **flags: Any) -> None:
    """Tell why prompts missed: the latest look-ups (of ENGINE), and how other namespaces differ."""
    with connected(client_settings(flags).socket, timeout) as connection:
        emit(connection.call("explain", {"engine": engine, "request": request, "last": last}), as_json)


@click.command()
@as_json
@reply_timeout(60.0)
@setting_options(*CLIENT_SETTINGS)
def check(as_json: bool, timeout: float, **flags: Any) -> int:
    """Let the daemon check its own bookkeeping. Exit 1 if something is wrong."""
    with connected(client_settings(flags).socket, timeout) as connection:
        reply = connection.call("check")
    emit(reply, as_json)
    return 0 if reply.get("ok") is True else HpkvError.exit_code


@click.command()
@as_json
@reply_timeout(60.0)
@click.option("--namespace", metavar="HEX", help="Only this namespace, as 'hpkvd info' names it.")
@setting_options(*CLIENT_SETTINGS)
def clear(as_json: bool, timeout: float, namespace: str | None, **flags: Any) -> None:
    """Drop all cached blocks, or those of one namespace."""
    body: dict[str, Any] = {}
    if namespace is not None:
        try:
            body["namespace"] = bytes.fromhex(namespace)
        except ValueError:
            raise UsageError(f"namespace {namespace!r} is not hexadecimal", "copy it from 'hpkvd info'") from None
    with connected(client_settings(flags).socket, timeout) as connection:
        emit(connection.call("clear", body), as_json)


@click.command()
@as_json
def version(as_json: bool) -> None:
    """Print the versions of hpkvd and of its protocol."""
    from importlib.metadata import version as package_version

    from hpkv_client.wire import version_text

    emit({"version": package_version("hpkv"), "protocol": version_text()}, as_json)
