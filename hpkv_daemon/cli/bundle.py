"""``hpkvd support-bundle``: what somebody who helps needs to see, in one file."""

from __future__ import annotations

import io
import json
import os
import platform
import tarfile
import time
from pathlib import Path
from typing import Any

import click

from hpkv_client.errors import HpkvError
from hpkv_client.settings import Settings
from hpkv_daemon.cli.options import as_json, client_settings, connected, reply_timeout, setting_options
from hpkv_daemon.cli.output import emit, note

_VERBS = ("ping", "info", "stats", "config", "leases", "check")
_LOG_BYTES = 1 << 20


def contents(settings: Settings, flags: dict[str, Any], timeout: float) -> dict[str, bytes]:
    """Name -> text of each file. No prompts, no blocks, no keys: the daemon tells none, and no key file is read."""
    from importlib.metadata import version

    from hpkv_client.wire import version_text
    from hpkv_daemon.cli.doctor import diagnose, report
    from hpkv_daemon.cli.launching import log_path

    about = {
        "version": version("hpkv"),
        "protocol": version_text(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }
    files = {"about.json": about, "doctor.json": report(diagnose(flags, False, timeout))} | _asked(settings, timeout)
    whole = {name: json.dumps(data, indent=1, default=str).encode() + b"\n" for name, data in files.items()}
    return whole | {"log.txt": _tail(log_path(settings))}


def _asked(settings: Settings, timeout: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        with connected(settings.socket, timeout) as connection:
            for verb in _VERBS:
                found[f"{verb}.json"] = connection.call(verb)
    except HpkvError as problem:
        found["unanswered.json"] = {"problem": problem.message, "hint": problem.hint}
    return found


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_BYTES))
            return log.read(_LOG_BYTES)
    except OSError as problem:
        return f"{path}: {problem.strerror}; under systemd: journalctl -u hpkvd\n".encode()


@click.command("support-bundle")
@click.argument("file", type=click.Path(path_type=Path), default=Path("hpkvd-support.tar.gz"))
@as_json
@reply_timeout(5.0)
@setting_options()
def support_bundle(file: Path, as_json: bool, timeout: float, **flags: Any) -> None:
    """Write what somebody who helps needs to see to a new FILE: state, settings, doctor, the log's end.

    It has names of models, paths and processes, and no prompts, blocks or keys. It works without a daemon, too.
    """
    files = contents(client_settings(flags), flags, timeout)
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    now = int(time.time())  # noqa: TID251  (dates of files)
    with os.fdopen(fd, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"hpkvd-support/{name}")
            entry.size, entry.mtime, entry.mode = len(text), now, 0o600
            archive.addfile(entry, io.BytesIO(text))
    if as_json:
        emit({"file": str(file.absolute()), "size_bytes": file.stat().st_size, "files": sorted(files)}, as_json)
    else:
        note(f"wrote {file}; look at it before you send it")
