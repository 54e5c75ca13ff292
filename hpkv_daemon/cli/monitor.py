"""``hpkvd monitor``: what happens in the daemon, line by line."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import click

from hpkv_daemon.cli.options import (
    CLIENT_SETTINGS,
    as_json,
    client_settings,
    connected,
    reply_timeout,
    setting_options,
)
from hpkv_daemon.cli.output import note

KINDS = ("opened", "closed", "ready", "refused", "lookup", "stored", "loaded", "evicted", "expired", "moved")
_ASK_EVERY = 0.2


def line(event: Mapping[str, Any], now: datetime) -> str:
    """One event for people; ``now`` is when it was heard of."""
    moment = (now - timedelta(seconds=event["age_seconds"])).strftime("%H:%M:%S.%f")[:-3]
    fields = (
        f"{name}={_value(value)}"
        for name, value in event.items()
        if name not in ("kind", "age_seconds") and value not in ("", None)
    )
    return f"{moment}  {event['kind']:<8}{' '.join(fields)}"


def _value(value: object) -> str:
    text = str(value)
    return json.dumps(text) if any(letter in text for letter in ' "=') else text


@click.command()
@as_json
@reply_timeout(5.0)
@click.option("-n", "--count", type=click.IntRange(1), help="End after so many events.")
@click.option("--only", multiple=True, type=click.Choice(KINDS), help="Only this kind of event; may be repeated.")
@setting_options(*CLIENT_SETTINGS)
def monitor(as_json: bool, timeout: float, count: int | None, only: tuple[str, ...], **flags: Any) -> None:
    """Print sessions, look-ups, stores, loads and evictions as they happen. Ctrl-C ends it."""
    told = 0
    with connected(client_settings(flags).socket, timeout) as connection:
        latest = connection.call("events")["latest"]
        note("following")
        while True:
            found = connection.call("events", {"after": latest})
            latest = found["latest"]
            if found["lost"]:
                note(f"{found['lost']} events came too fast")
            now = datetime.now()  # noqa: TID251  (people compare it with their logs)
            for event in found["events"]:
                if only and event["kind"] not in only:
                    continue
                click.echo(json.dumps(event) if as_json else line(event, now))
                told += 1
                if told == count:
                    return
            if not found["events"]:
                time.sleep(_ASK_EVERY)
