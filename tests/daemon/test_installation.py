"""'hpkvd install-service' into another root, and what the command line says about itself to shells and people."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpkv_client.settings import SETTINGS
from hpkv_daemon.cli import hpkvd as commands
from tests.daemons import hpkvd, refusal, without_hpkv

ROOT = Path(__file__).resolve().parents[2]
ENV = without_hpkv(os.environ)
FILES = [
    "etc/hpkv/hpkvd.toml",
    "etc/systemd/system/hpkvd.service",
    "etc/systemd/system/hpkvd.socket",
    "etc/sysusers.d/hpkv.conf",
    "etc/tmpfiles.d/hpkv.conf",
]
needs_systemctl = pytest.mark.skipif(shutil.which("systemctl") is None, reason="no systemctl on this machine")


def files_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and not path.is_symlink())


@needs_systemctl
def test_the_service_of_another_system_is_installed_enabled_and_removed(tmp_path: Path) -> None:
    assert hpkvd("install-service", "--root", str(tmp_path), env=ENV).returncode == 0
    assert files_in(tmp_path) == FILES
    unit = tmp_path / "etc/systemd/system/hpkvd.service"
    assert f"ExecStart={Path(sys.executable).with_name('hpkvd')} serve\n" in unit.read_text()
    wanted = tmp_path / "etc/systemd/system/sockets.target.wants/hpkvd.socket"
    assert wanted.is_symlink()
    settings = tmp_path / FILES[0]
    assert hpkvd("config", "show", "--config", str(settings), env=ENV).returncode == 0
    settings.write_text("# mine\n")
    assert hpkvd("install-service", "--root", str(tmp_path), env=ENV).returncode == 0
    assert hpkvd("install-service", "--root", str(tmp_path), "--remove", env=ENV).returncode == 0
    assert files_in(tmp_path) == FILES[:1]
    assert settings.read_text() == "# mine\n"
    assert not wanted.is_symlink()
    assert "nothing to remove" in refusal("install-service", "--root", str(tmp_path), "--remove", env=ENV, exit_code=3)


def test_the_packages_service_is_left_alone(tmp_path: Path) -> None:
    packaged = tmp_path / "usr/lib/systemd/system/hpkvd.service"
    packaged.parent.mkdir(parents=True)
    packaged.touch()
    assert str(packaged) in refusal("install-service", "--root", str(tmp_path), env=ENV, exit_code=75)


def test_a_service_of_another_system_cannot_be_started(tmp_path: Path) -> None:
    assert "--root" in refusal("install-service", "--now", "--root", str(tmp_path), env=ENV, exit_code=2)


def test_bash_completes_commands_and_flags() -> None:
    assert "complete" in hpkvd("completion", "bash", env=ENV).stdout
    typed = ENV | {"_HPKVD_COMPLETE": "bash_complete", "COMP_WORDS": "hpkvd st", "COMP_CWORD": "1"}
    assert {"plain,start", "plain,stop", "plain,status"} <= set(hpkvd(env=typed).stdout.split())


def test_the_manual_tells_of_every_command_and_setting() -> None:
    done = subprocess.run([sys.executable, ROOT / "deb/man_page.py"], env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = done.stdout.replace("\\-", "-")
    for name in commands.list_commands(None):  # type: ignore[arg-type]
        assert f".SS hpkvd {name}" in page
    for setting in SETTINGS.values():
        assert setting.name == "faults" or setting.env in page
    # A line that starts so is a request: roff knows no other ones of ours.
    requests = {line.split()[0] for line in page.splitlines() if line.startswith((".", "'"))}
    assert requests == {".TH", ".SH", ".SS", ".TP", ".B", ".BR", ".I"}
