"""``hpkvd hot``: the prefixes that are found most."""

from __future__ import annotations

from typing import Any

import click

from hpkv_daemon.cli.figures import count, size
from hpkv_daemon.cli.options import (
    CLIENT_SETTINGS,
    as_json,
    client_settings,
    connected,
    reply_timeout,
    setting_options,
)
from hpkv_daemon.cli.output import emit
from hpkv_daemon.cli.tables import Column, figure, show, text

PREFIXES = (
    text("PREFIX", "prefix"),
    text("MODEL", "model"),
    figure("USES", "uses", count),
    figure("BLOCKS", "blocks", count),
    figure("BYTES", "bytes", size),
    Column("MEMORY", lambda row: "yes" if row["resident"] else "no"),
)


@click.command()
@as_json
@reply_timeout(5.0)
@click.option("-n", "--last", type=click.IntRange(1, 256), default=20, show_default=True, help="So many prefixes.")
@setting_options(*CLIENT_SETTINGS)
def hot(as_json: bool, timeout: float, last: int, **flags: Any) -> None:
    """List the prefixes that look-ups found most often, the most used first."""
    with connected(client_settings(flags).socket, timeout) as connection:
        found = connection.call("hot", {"last": last})
    if as_json:
        emit(found, as_json)
    else:
        show(PREFIXES, found["prefixes"], "no look-up has found anything yet")
