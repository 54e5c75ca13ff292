"""What all tests share: real daemons that are gone when the test ends, and file systems of a given size."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.daemons import DaemonFactory, DaemonHandle, without_hpkv

__all__ = ["DaemonFactory", "DaemonHandle", "without_hpkv"]

# How long an example takes tells how busy the machine is, and nothing about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``tmpfs("16m")`` mounts one of that size and gives its path; needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        target = tmp_path / f"tmpfs-{len(mounted)}"
        target.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=0700,size={options}", "tmpfs", target], check=True)
        mounted.append(target)
        return target

    try:
        yield mount
    finally:
        for target in mounted:
            subprocess.run(["umount", "--lazy", target], check=True)


@pytest.fixture
def daemon() -> Iterator[DaemonFactory]:
    """Starts real daemons: ``handle = daemon(HPKV_POLICY="s3fifo")``."""
    factory = DaemonFactory()
    try:
        yield factory
    finally:
        factory.close()


@pytest.fixture
def running(daemon: DaemonFactory) -> DaemonHandle:
    """A daemon with default test settings."""
    return daemon()
