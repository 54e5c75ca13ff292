"""``hpkvd pin``, ``hpkvd unpin``, ``hpkvd pins``: prefixes that are never evicted."""

from __future__ import annotations

from typing import Any

import click

from hpkv_client.errors import UsageError
from hpkv_daemon.cli.figures import count, size
from hpkv_daemon.cli.options import (
    CLIENT_SETTINGS,
    as_json,
    client_settings,
    connected,
    reply_timeout,
    setting_options,
)
from hpkv_daemon.cli.output import emit, note
from hpkv_daemon.cli.tables import figure, show, text

PINS = (
    text("PREFIX", "prefix"),
    text("MODEL", "model"),
    figure("BLOCKS", "blocks", count),
    figure("BYTES", "bytes", size),
)


@click.command()
@as_json
@reply_timeout(5.0)
@setting_options(*CLIENT_SETTINGS)
def pins(as_json: bool, timeout: float, **flags: Any) -> None:
    """List the pinned prefixes."""
    with connected(client_settings(flags).socket, timeout) as connection:
        found = connection.call("pins")
    if as_json:
        emit(found, as_json)
    else:
        show(PINS, found["pins"], "nothing is pinned")
        note(f"{size(found['pinned_bytes'])} of {size(found['limit_bytes'])} that may be pinned")


@click.command()
@click.argument("prefix", default="")
@as_json
@reply_timeout(5.0)
@click.option("--request", metavar="ID", default="", help="What the latest look-up of this request found instead.")
@setting_options(*CLIENT_SETTINGS)
def pin(prefix: str, as_json: bool, timeout: float, request: str, **flags: Any) -> None:
    """Never evict PREFIX, as 'hpkvd hot' names it, until it is unpinned or the daemon ends."""
    if bool(prefix) == bool(request):
        raise UsageError("pin needs either PREFIX or --request", "see 'hpkvd hot' and 'hpkvd explain'")
    with connected(client_settings(flags).socket, timeout) as connection:
        found = connection.call("pin", {"prefix": prefix, "request": request})
    if as_json:
        emit(found, as_json)
    else:
        show(PINS, found["pins"], "nothing is pinned")


@click.command()
@click.argument("prefix", default="")
@as_json
@reply_timeout(5.0)
@click.option("--all", "all_", is_flag=True, help="All that are pinned.")
@setting_options(*CLIENT_SETTINGS)
def unpin(prefix: str, as_json: bool, timeout: float, all_: bool, **flags: Any) -> None:
    """Let PREFIX, as 'hpkvd pins' names it, be evicted again."""
    if bool(prefix) == all_:
        raise UsageError("unpin needs either PREFIX or --all", "see 'hpkvd pins'")
    with connected(client_settings(flags).socket, timeout) as connection:
        emit(connection.call("unpin", {"prefix": prefix}), as_json)
