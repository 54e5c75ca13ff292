"""``hpkvd latency``: how long the daemon's control loop takes to answer, as clients see it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from hpkv_daemon.cli.options import (
    CLIENT_SETTINGS,
    Connection,
    as_json,
    client_settings,
    connected,
    reply_timeout,
    setting_options,
)
from hpkv_daemon.cli.output import emit

_PERCENTILES = (50, 90, 99)


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """What so many round trips (at least one) took, in microseconds."""
    ordered = sorted(seconds)
    ranks = {f"p{part}": ordered[min(len(ordered) - 1, len(ordered) * part // 100)] for part in _PERCENTILES}
    chosen = {"min": ordered[0], "mean": sum(ordered) / len(ordered)} | ranks | {"max": ordered[-1]}
    return {"pings": len(ordered)} | {f"{name}_microseconds": round(1e6 * value, 1) for name, value in chosen.items()}


def line(found: dict[str, float]) -> str:
    """One line for people."""
    figures = (f"{name.removesuffix('_microseconds')} {value:.0f}" for name, value in found.items() if "_" in name)
    return f"{', '.join(figures)} us of {found['pings']:.0f} pings"


def _measure(connection: Connection, pings: int, pause: float, taken: list[float]) -> None:
    for number in range(pings):
        if number:
            time.sleep(pause)
        started = time.perf_counter()
        connection.call("ping")
        taken.append(time.perf_counter() - started)


@click.command()
@as_json
@reply_timeout(5.0)
@click.option("-n", "--count", type=click.IntRange(1), default=100, show_default=True, help="Pings in a line.")
@click.option(
    "-i", "--interval", type=click.FloatRange(0), default=0.01, show_default=True, help="Seconds between them."
)
@click.option("--once", is_flag=True, help="End after one line.")
@setting_options(*CLIENT_SETTINGS)
def latency(as_json: bool, timeout: float, count: int, interval: float, once: bool, **flags: Any) -> None:
    """Ping the daemon again and again, and print how long its answers took. Ctrl-C ends it."""
    with connected(client_settings(flags).socket, timeout) as connection:
        connection.call("ping")
        while True:
            taken: list[float] = []
            try:
                _measure(connection, count, interval, taken)
            except KeyboardInterrupt:
                once = True
            if taken and as_json:
                emit(summary(taken), as_json)
            elif taken:
                click.echo(line(summary(taken)))
            if once:
                return
