"""Options that commands share, made from the table of settings, and the connection to the daemon."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from hpkv_client.errors import NotRunning
from hpkv_client.settings import SETTINGS, Settings, config_path, load, read_file

Command = TypeVar("Command", bound=Callable[..., Any])

CLIENT_SETTINGS = ("config", "instance", "socket")
"""The settings that say which daemon a command talks to."""

as_json = click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")


def reply_timeout(seconds: float) -> Callable[[Command], Command]:
    """``--timeout`` for commands that wait for an answer."""
    return click.option(
        "--timeout",
        type=click.FloatRange(min=0.001),
        default=seconds,
        show_default=True,
        help="Seconds to wait.",
    )


def setting_options(*names: str) -> Callable[[Command], Command]:
    """The flags of these settings, of all that have one if none is named."""

    def decorate(command: Command) -> Command:
        for setting in reversed([SETTINGS[name] for name in names or SETTINGS]):
            if setting.flag:
                text = f"{setting.help[0].upper()}{setting.help[1:]} ({setting.env})."
                command = click.option(setting.flag, setting.name, metavar="VALUE", help=text)(command)
        return command

    return decorate


def client_settings(flags: Mapping[str, object]) -> Settings:
    """Settings for a command that talks to a daemon; foreign ``HPKV_*`` variables do not disturb it."""
    path, named = config_path(os.environ, flags)
    return load(os.environ, flags, read_file(path, named), path)[0]


class Connection:
    """Requests to a daemon that is known to accept connections."""

    def __init__(self, socket_path: Path, timeout: float) -> None:
        from hpkv_client.transport import Channel

        self._timeout = timeout
        self._channel = Channel(socket_path)

    def call(self, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The reply's body. Raises what the daemon answers, or ``Unreachable``."""
        return self._channel.call(verb, body or {}, self._timeout)

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()


@contextmanager
def connected(socket_path: Path, timeout: float) -> Iterator[Connection]:
    """A connection to the daemon on the socket. Raises ``NotRunning`` at once if there is none."""
    from hpkv_client.launch import listener, require_trusted

    serving = listener(socket_path)
    if serving is None:
        raise NotRunning(f"no hpkvd on {socket_path}", "run 'hpkvd start'")
    require_trusted(socket_path, serving)
    connection = Connection(socket_path, timeout)
    try:
        yield connection
    finally:
        connection.close()
