"""``hpkvd install-service``: the systemd service, for who installed HPKV by pip. The Debian package brings its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import click

from hpkv_client.errors import Busy, ConfigError, HpkvError, NotPermitted, NotRunning, UsageError
from hpkv_daemon.cli.output import note

UNITS = ("hpkvd.socket", "hpkvd.service")
_PACKAGED_COMMAND = "/usr/bin/hpkvd"
_PRIVATE = (Path("/home"), Path("/root"), Path("/run/user"))
"""Where the service sees nothing (ProtectHome= in systemd.exec(5))."""
_PLACES = {
    "systemd/hpkvd.socket": "etc/systemd/system/hpkvd.socket",
    "systemd/hpkvd.service": "etc/systemd/system/hpkvd.service",
    "systemd/sysusers.conf": "etc/sysusers.d/hpkv.conf",
    "systemd/tmpfiles.conf": "etc/tmpfiles.d/hpkv.conf",
}
_SETTINGS = "etc/hpkv/hpkvd.toml"


@click.command("install-service")
@click.option("--root", type=click.Path(path_type=Path), default="/", help="Of another system, as in an image.")
@click.option("--now", is_flag=True, help="Start the service, too (with --remove it is always stopped).")
@click.option("--remove", is_flag=True, help="Undo it. Settings, user and stored blocks stay.")
def install_service(root: Path, now: bool, remove: bool) -> None:
    """Install this hpkvd as a systemd service with a user of its own, and enable it."""
    here = root.resolve() == Path("/")
    if now and not here:
        raise UsageError("--now starts a service of this system, --root names another", "leave one of them out")
    if here and os.geteuid() != 0:
        raise NotPermitted("only root may install a service", "use sudo, or --root for another system")
    if remove:
        _remove(root, here)
        return
    packaged = root / "usr/lib/systemd/system/hpkvd.service"
    if packaged.exists():
        raise Busy(f"the package's service is there: {packaged}", "use that, or 'apt remove hpkv' first")
    command = _own_command()
    if here:
        _require_reachable(command)
    for place, text in _contents(command):
        _write(root / place, text)
    if not (root / _SETTINGS).exists():
        _write(root / _SETTINGS, _asset("hpkvd.toml"))
    if here:
        _run("systemd-sysusers", "hpkv.conf")
        _run("systemd-tmpfiles", "--create", "hpkv.conf")
        _run("systemctl", "daemon-reload")
    _run("systemctl", *([] if here else [f"--root={root}"]), "enable", *UNITS)
    if now:
        _run("systemctl", "restart", *UNITS)
    note(
        f"the service is installed{'' if now else '; it starts with the system'}; who may use it: members of group hpkv"
    )


def _remove(root: Path, here: bool) -> None:
    there = [root / place for place in _PLACES.values() if (root / place).exists()]
    if not there:
        raise NotRunning(f"no service of 'hpkvd install-service' in {root}", "nothing to remove")
    _run("systemctl", *(["--now"] if here else [f"--root={root}"]), "disable", *UNITS)
    for path in there:
        path.unlink()
    if here:
        _run("systemctl", "daemon-reload")
    note("the service is removed; its pool stays in /dev/shm/hpkv until 'hpkvd stop --discard' or a restart")


def _asset(name: str) -> str:
    return files("hpkv_daemon").joinpath("assets", *name.split("/")).read_text()


def _contents(command: Path) -> Iterator[tuple[str, str]]:
    # What systemd would take for a specifier or a second word.
    escaped = str(command).replace("\\", "\\\\").replace("%", "%%").replace(" ", "\\x20")
    for name, place in _PLACES.items():
        yield place, _asset(name).replace(f"={_PACKAGED_COMMAND} ", f"={escaped} ")


def _own_command() -> Path:
    command = Path(sys.executable).with_name("hpkvd")
    if not command.exists():
        raise ConfigError(f"there is no {command} to run as a service", "install HPKV by pip into this environment")
    return command


def _require_reachable(command: Path) -> None:
    for path in (command, Path(sys.executable).resolve()):
        if any(path.is_relative_to(place) for place in _PRIVATE):
            raise ConfigError(
                f"the service's user cannot run {path}, which lies in a home directory",
                "install HPKV where all may read, as in 'python3 -m venv /opt/hpkv; /opt/hpkv/bin/pip install hpkv'",
            )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o644)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {command[0]}", "install systemd, or run 'hpkvd serve' under what you have"
        ) from None
    if done.returncode:
        said = done.stdout.strip().splitlines() or [f"exit status {done.returncode}"]
        raise HpkvError(f"'{' '.join(command)}' failed: {said[-1]}", "see 'journalctl -u hpkvd'")
