"""The command ``hpkvd``. Each command's module is imported only when the command runs."""

from __future__ import annotations

import importlib
import keyword
import logging
import os
import sys
from collections.abc import Sequence

import click

from hpkv_client.errors import HpkvError

_INTERRUPTED = 130

_MODULES = {
    "serve": "lifecycle",
    "start": "lifecycle",
    "stop": "lifecycle",
    "restart": "lifecycle",
    "status": "query",
    "ping": "query",
    "stats": "query",
    "info": "query",
    "top": "top",
    "latency": "latency",
    "clients": "sessions",
    "leases": "sessions",
    "hot": "hot",
    "warm": "warm",
    "pins": "pins",
    "pin": "pins",
    "unpin": "pins",
    "monitor": "monitor",
    "explain": "query",
    "check": "query",
    "clear": "query",
    "export": "archiving",
    "restore": "archiving",
    "drain": "storage",
    "scrub": "storage",
    "import": "storage",
    "doctor": "doctor",
    "bench": "bench",
    "support-bundle": "bundle",
    "dashboard": "monitoring",
    "alerts": "monitoring",
    "remote": "remote",
    "config": "config",
    "reload": "config",
    "keygen": "keys",
    "install-service": "installation",
    "completion": "completion",
    "version": "query",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_MODULES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        if name not in _MODULES:
            return None
        module = importlib.import_module(f"hpkv_daemon.cli.{_MODULES[name]}")
        attribute = name.replace("-", "_")
        command = getattr(module, f"{attribute}_" if keyword.iskeyword(name) else attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def hpkvd() -> None:
    """HPKV: one KV cache per node, outside the engines that use it.

    \b
    Exit codes: 0 ok, 1 failed, 2 usage, 3 not running, 69 unreachable,
    75 busy, 77 permission, 78 configuration.
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. Errors become one line on stderr."""
    try:
        status = hpkvd.main(list(arguments), prog_name="hpkvd", standalone_mode=False)
    except click.ClickException as problem:
        problem.show()
        return problem.exit_code
    except click.Abort:
        return _INTERRUPTED
    except HpkvError as problem:
        _complain(str(problem))
        return problem.exit_code
    except OSError as problem:
        where = f"{problem.filename}: " if problem.filename else ""
        _complain(f"{where}{problem.strerror or problem}")
        return HpkvError.exit_code
    return status if isinstance(status, int) else 0


def _complain(text: str) -> None:
    """One line on stderr; in the journal it is an error."""
    if "JOURNAL_STREAM" in os.environ:
        from hpkv_daemon.logs import goes_to_journal, with_priority

        if goes_to_journal(sys.stderr.fileno(), os.environ):
            click.echo(with_priority(logging.ERROR, text), err=True)
            return
    click.echo(f"hpkvd: {text}", err=True)


def main() -> None:
    """Entry point of ``hpkvd``."""
    sys.exit(run(sys.argv[1:]))
