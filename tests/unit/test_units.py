"""The unit files, by systemd's own judgement."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.daemons import without_hpkv

UNITS = Path(__file__).parents[2] / "systemd"
WORST_EXPOSURE = 25
"""In tenths, as 'systemd-analyze security' counts: 100 is a service that may do anything."""


def analyze(*arguments: object) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["systemd-analyze", *map(str, arguments)], env=without_hpkv(os.environ), capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("no systemd-analyze on this machine")


def test_the_unit_file_passes_systemds_own_check(tmp_path: Path) -> None:
    for unit in ("hpkvd.service", "hpkvd.socket"):
        text = (UNITS / unit).read_text()
        # It says where the package puts the command, which need not be installed here.
        (tmp_path / unit).write_text(text.replace("/usr/bin/hpkvd", shutil.which("true") or "/bin/true"))
    done = analyze("verify", "--man=no", tmp_path / "hpkvd.service", tmp_path / "hpkvd.socket")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_service_may_do_little() -> None:
    done = analyze("security", "--offline=true", f"--threshold={WORST_EXPOSURE}", UNITS / "hpkvd.service")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_service_does_nothing_that_would_lose_the_pool_or_the_devices() -> None:
    lines = (UNITS / "hpkvd.service").read_text().splitlines()
    settings = {line.partition("=")[0] for line in lines if "=" in line and not line.startswith("#")}
    assert not settings & {"DynamicUser", "RemoveIPC", "PrivateDevices", "MemoryDenyWriteExecute", "PrivateIPC"}
    assert {"LimitMEMLOCK", "LimitNOFILE", "OOMScoreAdjust", "WatchdogSec", "TimeoutStopSec"} <= settings
