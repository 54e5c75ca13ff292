"""The manual page hpkvd(1), from the commands themselves: written to stdout."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import version

import click

from hpkv_client.settings import SETTINGS
from hpkv_daemon.cli import hpkvd

_EXIT_CODES = {0: "ok", 1: "failed", 2: "usage", 3: "not running", 69: "unreachable", 75: "busy", 77: "permission"}
_EXIT_CODES[78] = "configuration"


def escaped(text: str) -> str:
    """As roff wants it: no escapes, no minus that becomes a hyphen, no line that is a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.M)


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands under a group with their full names, in the order of its help."""
    context = click.Context(group, info_name="hpkvd")
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def _command(path: tuple[str, ...], command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(("hpkvd", *path)))
    yield f".SS hpkvd {escaped(' '.join((*path, *command.collect_usage_pieces(context))))}"
    yield escaped(re.sub(r"\s*\n\s*", " ", (command.help or "").replace("\b", "")).strip())
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        # A setting's flag is told once, further down.
        if record is not None and parameter.name not in SETTINGS and "--help" not in record[0]:
            yield from (".TP", f".B {escaped(record[0])}", escaped(record[1]))


def page() -> Iterator[str]:
    """The lines of the page."""
    yield f'.TH HPKVD 1 "" "HPKV {version("hpkv")}" "HPKV"'
    yield from (".SH NAME", "hpkvd \\- one KV cache per node for LLM inference, outside the engines that use it")
    yield from (".SH SYNOPSIS", ".B hpkvd", ".I COMMAND", "[\\fIOPTION\\fR]...")
    yield from (".SH DESCRIPTION", "Results go to stdout, everything else to stderr.")
    yield escaped("--json gives one line of JSON, for commands that have a result.")
    yield ".SH COMMANDS"
    for path, command in commands(hpkvd):
        yield from _command(path, command)
    yield ".SH SETTINGS"
    yield escaped("A flag wins over its variable, that over the configuration file, that over the default.")
    for setting in SETTINGS.values():
        if setting.name != "faults":
            yield from (".TP", f".BR {escaped(' , '.join(filter(None, (setting.flag, setting.env))))}")
            fixed = f" Default: {setting.default}." if isinstance(setting.default, str) else ""
            yield escaped(f"{setting.help[0].upper()}{setting.help[1:]}.{fixed}")
    yield ".SH EXIT STATUS"
    for code, meaning in _EXIT_CODES.items():
        yield from (".TP", f".B {code}", meaning)
    yield from (".SH FILES", ".TP", ".I /etc/hpkv/hpkvd.toml", "Settings of this machine.")
    yield from (".TP", ".I /run/hpkv/hpkvd.sock", "Where the daemon listens; members of the group hpkv may connect.")
    yield from (".TP", ".I /dev/shm/hpkv", "The pool. It outlives the daemon.")
    yield from (".SH SEE ALSO", ".BR systemctl (1),", ".BR journalctl (1)")


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")
