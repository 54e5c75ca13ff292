"""Commands that begin and end daemons: serve, start, stop, restart."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from hpkv_client.errors import Busy, HpkvError, NotRunning
from hpkv_daemon.cli.options import CLIENT_SETTINGS, as_json, client_settings, reply_timeout, setting_options
from hpkv_daemon.cli.output import emit, note

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@click.command()
@click.option("--report-fd", type=int, hidden=True)
@setting_options()
def serve(report_fd: int | None, **flags: Any) -> None:
    """Run a daemon in the foreground until SIGTERM or SIGINT. SIGHUP reads the configuration anew."""
    # There is nothing to read anew before it begins, and nothing after.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in _STOP_SIGNALS:
        # Until the daemon has handlers of its own there is nothing to clean up, and stopping is no failure.
        signal.signal(number, lambda *_: sys.exit(0))
    # An engine's thread may have had signals blocked when it started us.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    from hpkv_daemon.cli.reporting import Report

    report = Report(report_fd)
    try:
        _serve(report, flags)
    except HpkvError as problem:
        report.fail(problem)
        raise
    finally:
        for number in _STOP_SIGNALS:
            # It ends anyway: an impatient second signal must not turn that into a failure.
            signal.signal(number, signal.SIG_IGN)


def _serve(report: Any, flags: dict[str, Any]) -> None:
    from hpkv_daemon.cli.reporting import Allocation
    from hpkv_daemon.config import load_settings, prepare, reread, summary
    from hpkv_daemon.locks import instance_holder

    settings, origins = load_settings(os.environ, flags)
    holder = instance_holder(settings.socket)
    if holder is not None and holder.pid is not None:
        # The lock itself is taken later; asked now, its holder comes before any complaint about our settings.
        raise Busy(
            f"socket {settings.socket} is in use by hpkvd, pid {holder.pid}",
            "'hpkvd stop' ends it; HPKV_SOCKET or HPKV_INSTANCE make room for another",
        )
    warnings = prepare(settings)
    for text in warnings:
        report.warn(text)
    notes = [(logging.INFO, summary(settings, origins))] + [(logging.WARNING, text) for text in warnings]
    # What is imported here starts threads. With the signals blocked they inherit that: else one of them may take a
    # signal, and Python its handler into the main thread in the middle of what must not be cut short there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_STOP_SIGNALS, signal.SIGHUP))
    from hpkv_daemon import app

    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    app.serve(settings, origins, Allocation(report, notes), lambda: reread(settings, flags))


@click.command()
@click.option("--if-needed", is_flag=True, help="For engines: say nothing if one runs; use all CPUs.")
@as_json
@reply_timeout(60.0)
@setting_options()
def start(if_needed: bool, as_json: bool, timeout: float, **flags: Any) -> None:
    """Start a daemon in the background and wait until it answers."""
    if if_needed:
        # Engines pin their ranks to cores; their daemon serves all of them, and runs where this is denied.
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    _start(flags, timeout, as_json, quiet=if_needed)


def _start(flags: dict[str, Any], timeout: float, as_json: bool, quiet: bool) -> None:
    from hpkv_daemon.cli.launching import log_path, start_daemon
    from hpkv_daemon.config import load_settings

    settings, _ = load_settings(os.environ, flags)
    with _allocation_bar() as progress:
        answer, started = start_daemon(settings, flags, timeout, progress, note)
    if as_json:
        facts = {key: answer.get(key) for key in ("pid", "epoch", "uptime_seconds")}
        emit({"started": started, "socket": str(settings.socket)} | facts, as_json)
    elif not quiet:
        where = f"pid {answer.get('pid')}, socket {settings.socket}"
        note(f"started: {where}, log {log_path(settings)}" if started else f"already running: {where}")


@contextmanager
def _allocation_bar() -> Iterator[Any]:
    """A function to call with (bytes done, bytes in all): a bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("allocating the pool"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("pool", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@click.command()
@reply_timeout(30.0)
@click.option("--force", is_flag=True, help="Kill it if it has not ended by then.")
@click.option("--discard", is_flag=True, help="Forget its blocks and free their memory, also if it has ended before.")
@setting_options(*CLIENT_SETTINGS, "pool_path")
def stop(timeout: float, force: bool, discard: bool, **flags: Any) -> None:
    """Stop the daemon and wait until it is gone. Its pool stays for the next one unless told otherwise."""
    from hpkv_daemon.cli.launching import stop_daemon

    settings = client_settings(flags)
    pool = settings.pool_path
    ended = False
    try:
        pid, pool_of_daemon = stop_daemon(settings.socket, timeout, force)
        ended, pool = True, pool_of_daemon or pool
        stays = "" if discard else "; its blocks stay in memory for the next one, 'hpkvd stop --discard' frees it"
        note(f"pid {pid} has ended{stays}")
    except NotRunning:
        if not discard:
            raise
    if discard:
        _discard(pool, ended)


def _discard(directory: Path, ended: bool) -> None:
    from hpkv_client.values import format_size
    from hpkv_daemon.directories import acting_as_owner
    from hpkv_daemon.pool.file import discard

    with acting_as_owner(directory):
        freed = discard(directory)
    if freed:
        note(f"removed the pool in {directory}: {format_size(freed)} are free again")
    elif not ended:
        raise NotRunning(f"no hpkvd and no pool in {directory}", "nothing to stop")


@click.command()
@click.option("--force", is_flag=True, help="Kill the old one if it does not end.")
@as_json
@reply_timeout(60.0)
@setting_options()
def restart(force: bool, as_json: bool, timeout: float, **flags: Any) -> None:
    """Stop the daemon, if one runs, and start one."""
    from hpkv_daemon.cli.launching import stop_daemon
    from hpkv_daemon.config import load_settings

    settings, _ = load_settings(os.environ, flags)
    try:
        stop_daemon(settings.socket, timeout, force)
    except NotRunning:
        note("none was running")
    _start(flags, timeout, as_json, quiet=False)
