"""Commands for the tiers below memory: drain, scrub, import."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from hpkv_client.errors import HpkvError
from hpkv_client.values import parse_size
from hpkv_daemon.cli.options import CLIENT_SETTINGS, Connection, as_json, client_settings, connected, setting_options
from hpkv_daemon.cli.output import emit, note

_ANSWER_SECONDS = 30.0
_ASK_EVERY = 0.2
_TELL_EVERY = 2.0

_wait = click.option("--wait/--no-wait", default=True, show_default=True, help="Stay until it is over.")


@click.command()
@as_json
@_wait
@setting_options(*CLIENT_SETTINGS)
def drain(as_json: bool, wait: bool, **flags: Any) -> int:
    """Write everything that is in memory to storage, as before maintenance. Exit 1 if that fails."""
    with connected(client_settings(flags).socket, _ANSWER_SECONDS) as connection:
        reply = connection.call("drain", {"begin": True})
        if wait:
            reply = _follow(connection, "drain", reply, _drained)
    emit(reply, as_json)
    if reply["problem"]:
        note(f"not everything is on storage: {reply['problem']}")
    return HpkvError.exit_code if reply["problem"] else 0


def _drained(reply: dict[str, Any]) -> str:
    looked = 100 * (reply["slots"] - reply["left_slots"]) // max(1, reply["slots"])
    return f"{looked} % looked at, {reply['written_blocks']} blocks written, {reply['queued_blocks']} to go"


@click.command()
@as_json
@_wait
@click.option("--rate", metavar="SIZE", help="Bytes per second at most, as in 200m; without it as fast as it goes.")
@setting_options(*CLIENT_SETTINGS)
def scrub(as_json: bool, wait: bool, rate: str | None, **flags: Any) -> int:
    """Read and verify everything on storage; what is damaged is forgotten. Exit 1 if anything was."""
    body: dict[str, Any] = {"begin": True}
    if rate is not None:
        body["bytes_per_second"] = max(1, parse_size(rate))
    with connected(client_settings(flags).socket, _ANSWER_SECONDS) as connection:
        reply = connection.call("scrub", body)
        if wait:
            reply = _follow(connection, "scrub", reply, _scrubbed)
    emit(reply, as_json)
    return HpkvError.exit_code if reply["bad_blocks"] else 0


def _scrubbed(reply: dict[str, Any]) -> str:
    return (
        f"{reply['done_segments']} of {reply['segments']} segments, "
        f"{reply['good_blocks']} good blocks, {reply['bad_blocks']} bad ones"
    )


@click.command("import")
@click.argument("path", type=click.Path(exists=True, file_okay=False, resolve_path=True))
@as_json
@_wait
@setting_options(*CLIENT_SETTINGS)
def import_(path: str, as_json: bool, wait: bool, **flags: Any) -> int:
    """Copy the blocks of another daemon's storage in PATH into this one's. That daemon must not run."""
    with connected(client_settings(flags).socket, _ANSWER_SECONDS) as connection:
        reply = connection.call("import", {"path": path})
        if wait:
            reply = _follow(connection, "import", reply, _imported)
    emit(reply, as_json)
    if reply["problem"]:
        note(f"not everything was imported: {reply['problem']}")
    return HpkvError.exit_code if reply["problem"] else 0


def _imported(reply: dict[str, Any]) -> str:
    return f"{reply['imported_blocks']} blocks imported, {reply['known_blocks']} were here"


def _follow(
    connection: Connection, verb: str, reply: dict[str, Any], text: Callable[[dict[str, Any]], str]
) -> dict[str, Any]:
    """Ask until it is over, and tell now and then how far it is; the last reply."""
    told = time.monotonic()
    while not reply["over"]:
        time.sleep(_ASK_EVERY)
        reply = connection.call(verb)
        if time.monotonic() - told > _TELL_EVERY:
            told = time.monotonic()
            note(text(reply))
    return reply
