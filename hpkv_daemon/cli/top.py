"""``hpkvd top``: the daemon at a glance, again and again."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
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
from hpkv_daemon.cli.overview import HELP, ORDERS, Sample, layout, overview
from hpkv_daemon.cli.tables import console

_KEYS = "q: end, h: keys, s: sort"


@click.command()
@as_json
@reply_timeout(5.0)
@click.option(
    "-i", "--interval", type=click.FloatRange(0.05), default=1.0, show_default=True, help="Seconds of a look."
)
@click.option("-n", "--count", type=click.IntRange(1), help="End after so many looks.")
@click.option("--once", is_flag=True, help="End after one look.")
@click.option("--sort", "order", type=click.Choice(list(ORDERS)), default="size", show_default=True)
@setting_options(*CLIENT_SETTINGS)
def top(
    as_json: bool, timeout: float, interval: float, count: int | None, once: bool, order: str, **flags: Any
) -> None:
    """Watch hit rate, traffic, tiers, evictions, engines and namespaces. Keys: q ends, s sorts, h helps."""
    looks = 1 if once else count
    with connected(client_settings(flags).socket, timeout) as connection:
        if as_json or looks is not None or not (sys.stdout.isatty() and sys.stdin.isatty()):
            _print(connection, interval, looks, order, as_json)
        else:
            _watch(connection, interval, order)


def _sample(connection: Connection) -> Sample:
    stats = connection.call("stats")
    return Sample(time.monotonic(), stats, connection.call("info"))


def _print(connection: Connection, interval: float, looks: int | None, order: str, as_json: bool) -> None:
    before, printed = _sample(connection), 0
    while looks is None or printed < looks:
        time.sleep(interval)
        now = _sample(connection)
        found = overview(before, now, order)
        if as_json:
            emit(found, as_json)
        else:
            console().print(layout(found))
        before, printed = now, printed + 1


def _watch(connection: Connection, interval: float, order: str) -> None:
    from rich.live import Live

    orders = list(ORDERS)
    before = now = _sample(connection)
    footer = _KEYS
    with _keyboard() as pressed, Live(console=console(), screen=True, auto_refresh=False) as screen:
        while True:
            screen.update(layout(overview(before, now, order), f"{footer}   sorted by {order}"), refresh=True)
            key = pressed(interval - (time.monotonic() - now.moment))
            if key == "q":
                return
            if key == "h":
                footer = HELP if footer == _KEYS else _KEYS
            elif key == "s":
                order = orders[(orders.index(order) + 1) % len(orders)]
            elif not key:
                before, now = now, _sample(connection)


@contextmanager
def _keyboard() -> Iterator[Any]:
    """A function that gives the key pressed within so many seconds, or nothing; keys are not echoed meanwhile."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(seconds: float) -> str:
        ready = select.select([fd], [], [], max(0.0, seconds))[0]
        return os.read(fd, 1).decode(errors="replace") or "q" if ready else ""

    tty.setcbreak(fd)
    try:
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
