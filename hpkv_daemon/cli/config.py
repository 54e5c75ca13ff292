"""``hpkvd config``: what the settings are, and where they come from."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from hpkv_client.settings import SETTINGS, report
from hpkv_daemon.cli.options import (
    CLIENT_SETTINGS,
    as_json,
    client_settings,
    connected,
    reply_timeout,
    setting_options,
)
from hpkv_daemon.cli.output import emit


@click.group()
def config() -> None:
    """Show the settings."""


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
