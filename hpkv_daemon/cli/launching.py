"""Start a detached daemon and wait until it answers; stop one and wait until it is gone."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpkv_client.errors import Busy, HpkvError, NotPermitted, NotRunning, Unreachable
from hpkv_client.launch import listener
from hpkv_client.settings import SETTINGS, Settings
from hpkv_daemon.cli.options import connected
from hpkv_daemon.cli.reporting import failure_in
from hpkv_daemon.directories import acting_as_owner
from hpkv_daemon.locks import Holder, InstanceLock, ensure_socket_directory, instance_holder

_POLL_SECONDS = 0.02
_KILL_SECONDS = 10.0

Progress = Callable[[int, int], None]
Warn = Callable[[str], None]


def answer(socket_path: Path, deadline: float) -> dict[str, Any] | None:
    """What the daemon on the socket answers to a ping; None if nothing is there to ask.

    Raises ``Unreachable`` if something accepts connections and stays silent until the deadline (monotonic).
    """
    if listener(socket_path) is None:
        return None
    try:
        with connected(socket_path, max(0.1, deadline - time.monotonic())) as connection:
            return connection.call("ping")
    except NotRunning:
        return None


def log_path(settings: Settings) -> Path:
    """Where a detached daemon's output goes."""
    return settings.log_file or settings.socket.with_suffix(".log")


def start_daemon(
    settings: Settings, flags: Mapping[str, object], timeout: float, progress: Progress, warn: Warn
) -> tuple[dict[str, Any], bool]:
    """The answer of the daemon on the socket, and whether this call started it.

    Any number of processes may do this at once. Raises what keeps the daemon from starting, or
    ``Unreachable`` after ``timeout`` seconds without progress.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = answer(settings.socket, deadline)
        if found is not None:
            return found, False
        if instance_holder(settings.socket) is not None:
            # Another process is starting one, or an old one is about to leave.
            time.sleep(_POLL_SECONDS)
            continue
        starting = _Starting(settings, flags, progress, warn)
        try:
            return starting.wait(timeout), True
        except Busy:
            if instance_holder(settings.socket) is None and listener(settings.socket) is None:
                raise
    raise Unreachable(f"hpkvd on {settings.socket} was not ready after {timeout:g} s", f"see {log_path(settings)}")


class _Starting:
    """A daemon between its spawn and its first answer."""

    def __init__(self, settings: Settings, flags: Mapping[str, object], progress: Progress, warn: Warn) -> None:
        self._settings = settings
        self._progress = progress
        self._warn = warn
        self._error: HpkvError | None = None
        self._allocated = False
        ensure_socket_directory(settings.socket)
        self._pipe, theirs = os.pipe()
        try:
            self._process = _spawn(settings, flags, theirs)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(theirs)

    def wait(self, timeout: float) -> dict[str, Any]:
        """Its answer to a ping. It is ended again if ``timeout`` passes without progress, or on Ctrl-C."""
        try:
            return self._wait(timeout)
        except (Unreachable, KeyboardInterrupt):
            self._process.terminate()
            raise
        finally:
            os.close(self._pipe)

    def _wait(self, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        lines = self._lines()
        while time.monotonic() < deadline:
            for message in next(lines, [{"gone": True}]):
                if message.get("gone"):
                    raise self._error or self._died()
                deadline = time.monotonic() + timeout
                self._heed(message)
            if self._allocated:
                found = answer(self._settings.socket, deadline)
                if found is not None:
                    return found
        raise Unreachable(f"hpkvd made no progress for {timeout:g} s while starting", f"see {log_path(self._settings)}")

    def _heed(self, message: dict[str, Any]) -> None:
        self._error = failure_in(message) or self._error
        if "warning" in message:
            self._warn(str(message["warning"]))
        if "done_bytes" in message:
            self._allocated = message["done_bytes"] == message["total_bytes"]
            self._progress(message["done_bytes"], message["total_bytes"])

    def _lines(self) -> Iterator[list[dict[str, Any]]]:
        """Batches of messages, empty ones included, until the daemon closes its end."""
        rest = b""
        while True:
            if not select.select([self._pipe], [], [], _POLL_SECONDS)[0]:
                yield []
                continue
            chunk = os.read(self._pipe, 1 << 16)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            yield [json.loads(line) for line in lines]

    def _died(self) -> HpkvError:
        status = self._process.wait()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return HpkvError(f"hpkvd ended while starting ({how})", f"see {log_path(self._settings)}")


def _spawn(settings: Settings, flags: Mapping[str, object], report_fd: int) -> subprocess.Popen[bytes]:
    # -P: modules come from where this one did, never from the directory the user happens to be in.
    command = [sys.executable, "-P", "-m", "hpkv_daemon", "serve", "--report-fd", str(report_fd)]
    for name, value in flags.items():
        if value is not None:
            command += [SETTINGS[name].flag, str(value)]
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        log = os.open(log_path(settings), append, 0o600)
    except PermissionError:
        raise NotPermitted(
            f"log file {log_path(settings)} is not writable", "set HPKV_LOG_FILE to another path"
        ) from None
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(report_fd,),
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(log)


def stop_daemon(socket_path: Path, timeout: float, force: bool) -> tuple[int, Path | None]:
    """End the daemon that owns the socket path and wait until it is gone; its pid and the directory of its pool.

    None for the directory: it had not got that far.

    Raises ``NotRunning``, ``NotPermitted``, or ``HpkvError`` if it has not ended after ``timeout`` seconds;
    with ``force`` it is killed then.
    """
    holder = instance_holder(socket_path)
    if holder is None:
        raise _nothing_to_stop(socket_path)
    if holder.pid is None:
        raise Busy(f"hpkvd on {socket_path} is just starting", "try again")
    if not holder.here:
        raise NotPermitted(f"hpkvd on {socket_path} runs in another PID namespace", "stop it from there")
    try:
        process = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        raise _nothing_to_stop(socket_path) from None
    try:
        if not _still_held_by(holder, socket_path):
            raise _nothing_to_stop(socket_path)
        if holder.uid not in (0, os.stat(f"/proc/{holder.pid}").st_uid):
            raise NotPermitted(
                f"lock of {socket_path} names pid {holder.pid}, which is not its owner's", "look at both"
            )
        _end(process, holder.pid, timeout, force)
    finally:
        os.close(process)
    if force and instance_holder(socket_path) is None:
        # A killed daemon could not clean up behind itself. If the socket is a service manager's, it stays.
        with suppress(Busy), acting_as_owner(socket_path.parent), InstanceLock(socket_path):
            pass
    return holder.pid, Path(holder.pool).parent if holder.pool else None


def _nothing_to_stop(socket_path: Path) -> NotRunning:
    return NotRunning(f"no hpkvd on {socket_path}", "nothing to stop")


def _still_held_by(holder: Holder, socket_path: Path) -> bool:
    """Whether the pid was that of the daemon when it was opened: only then may the process be signalled."""
    now = instance_holder(socket_path)
    return now is not None and (now.pid, now.started) == (holder.pid, holder.started)


def _end(process: int, pid: int, timeout: float, force: bool) -> None:
    _send(process, pid, signal.SIGTERM)
    if _ended(process, timeout):
        return
    if force:
        _send(process, pid, signal.SIGKILL)
        if _ended(process, _KILL_SECONDS):
            return
    raise HpkvError(f"hpkvd (pid {pid}) has not ended after {timeout:g} s", "see its log, or add --force to kill it")


def _send(process: int, pid: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return
    except PermissionError:
        raise NotPermitted(f"hpkvd (pid {pid}) belongs to another user", "run as its owner") from None


def _ended(process: int, timeout: float) -> bool:
    poller = select.poll()
    poller.register(process, select.POLLIN)
    return bool(poller.poll(timeout * 1000))
