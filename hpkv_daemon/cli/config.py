"""``hpkvd config`` and ``hpkvd reload``: what the settings are, where they come from, and changing them."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from hpkv_client.errors import NotPermitted, NotRunning, Unreachable
from hpkv_client.settings import SETTINGS, report, setting_named
from hpkv_daemon.cli.options import (
    CLIENT_SETTINGS,
    as_json,
    client_settings,
    connected,
    reply_timeout,
    setting_options,
)
from hpkv_daemon.cli.output import emit, note

_ASK_SECONDS = 2.0


@click.group()
def config() -> None:
    """Show, check and change the settings."""


@config.command()
@as_json
@setting_options()
def show(as_json: bool, **flags: Any) -> None:
    """What a daemon started here with these flags would use, and where each value comes from."""
    from hpkv_daemon.config import load_settings

    _emit_settings(report(*load_settings(os.environ, flags)), as_json)


@config.command()
@as_json
@reply_timeout(5.0)
@setting_options(*CLIENT_SETTINGS)
def running(as_json: bool, timeout: float, **flags: Any) -> None:
    """What the running daemon uses, whatever has been edited since it started."""
    with connected(client_settings(flags).socket, timeout) as connection:
        _emit_settings(connection.call("config"), as_json)


def _emit_settings(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(found, as_json)
        return
    origins = found["origins"]
    rows = {
        key: f"{'-' if value in (None, '') else value}  ({origins.get(key)})"
        for key, value in found["settings"].items()
    }
    emit(rows, as_json)


@config.command()
@as_json
@setting_options()
def check(as_json: bool, **flags: Any) -> None:
    """Check the configuration as a daemon started here would, and tell what a running one does not use yet.

    Exit 78 if it would not start.
    """
    from hpkv_daemon.config import load_settings, verify

    settings, origins = load_settings(os.environ, flags)
    verify(settings)
    fresh = report(settings, origins)["settings"]
    used = _running_settings(settings.socket)
    differ = [
        {"name": name, "running": used[name], "configured": value}
        for name, value in fresh.items()
        if used is not None and name in used and used[name] != value
    ]
    found = {"ok": True, "config": str(settings.config), "running": used is not None, "differs": differ}
    if as_json:
        emit(found, as_json)
        return
    click.echo(f"{settings.config}: ok")
    for change in differ:
        name, running, configured = change.values()
        click.echo(f"{name}: {configured} configured, {running} running")


def _running_settings(socket: Path) -> dict[str, Any] | None:
    """What the daemon on the socket uses; None without one that answers."""
    try:
        with connected(socket, _ASK_SECONDS) as connection:
            found: dict[str, Any] = connection.call("config")["settings"]
            return found
    except (NotRunning, NotPermitted, Unreachable):
        return None


@config.command()
@click.argument("name", default="*")
@as_json
@reply_timeout(5.0)
@setting_options(*CLIENT_SETTINGS)
def get(name: str, as_json: bool, timeout: float, **flags: Any) -> None:
    """What the running daemon uses for NAME: a setting, its variable, or a pattern as in 'storage*'."""
    with connected(client_settings(flags).socket, timeout) as connection:
        found = connection.call("config")["settings"]
    if any(letter in name for letter in "*?["):
        chosen = {key: value for key, value in found.items() if fnmatchcase(key, name)}
    else:
        key = setting_named(name).key
        chosen = {key: found.get(key)}
    emit(chosen, as_json)


@config.command("set")
@click.argument("name")
@click.argument("value")
@as_json
@reply_timeout(5.0)
@setting_options(*CLIENT_SETTINGS)
def set_(name: str, value: str, as_json: bool, timeout: float, **flags: Any) -> None:
    """Change log_level, lease_seconds, quotas or storage_daily_writes until the next reload or restart.

    An empty VALUE is the default. Exit 2 for a setting that needs a restart.
    """
    with connected(client_settings(flags).socket, timeout) as connection:
        changed = connection.call("set", {"name": setting_named(name).name, "value": value})
    if as_json:
        emit(changed, as_json)
    else:
        click.echo(f"{changed['name']}: {_shown(changed['now'])} (was {_shown(changed['before'])})")


@click.command()
@as_json
@reply_timeout(30.0)
@setting_options(*CLIENT_SETTINGS)
def reload(as_json: bool, timeout: float, **flags: Any) -> None:
    """Let the daemon read its configuration anew, as SIGHUP does. Says what changed, and what needs a restart."""
    with connected(client_settings(flags).socket, timeout) as connection:
        found = connection.call("reload")
    if as_json:
        emit(found, as_json)
        return
    for change in found["changed"]:
        click.echo(f"{change['name']}: {_shown(change['now'])} (was {_shown(change['before'])})")
    for change in found["needs_restart"]:
        note(f"{change['name']}: {_shown(change['now'])} needs 'hpkvd restart' (now {_shown(change['before'])})")
    if not found["changed"] and not found["needs_restart"]:
        note("nothing changed")


def _shown(value: object) -> str:
    return "-" if value in (None, "") else str(value)


@config.command()
@as_json
def default(as_json: bool) -> None:
    """All settings with their defaults, as a TOML file to start from."""
    settings = [setting for setting in SETTINGS.values() if setting.name != "config" and setting.flag]
    defaults = {setting.name: setting.default_value(os.environ, "") for setting in settings}
    if as_json:
        emit(defaults, as_json)
        return
    click.echo("# Settings of hpkvd with their defaults; uncomment what you change.")
    for setting in settings:
        click.echo(f"\n# {setting.help} ({setting.env}, {setting.flag})")
        value = defaults[setting.name]
        # JSON text is TOML text, too.
        click.echo(f"# {setting.name} = {json.dumps(value)}" if value is not None else f"# {setting.name} is not set")
