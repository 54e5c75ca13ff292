"""A machine with the Debian package installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import Machine, why_not
from service_node import Node

from tests.support import ROOT


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, built from this tree."""
    if reason := why_not():
        pytest.skip(reason)
    command = [sys.executable, ROOT / "deb/build.py", tmp_path_factory.mktemp("deb")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def bare() -> Iterator[Node]:
    """A machine without HPKV, with the users engine and stranger."""
    if reason := why_not():
        pytest.skip(reason)
    machine = Machine()
    try:
        node = Node(machine)
        # A part of this machine's memory would be more than tests should take.
        node.change("Environment=HPKV_KV_MEM_POOL_SIZE=64m", "pool")
        for user in ("engine", "stranger"):
            node.run("useradd", user)
        yield node
    finally:
        machine.close()


@pytest.fixture(scope="module")
def installed(bare: Node, package: Path) -> Node:
    """The same with the package."""
    bare.install(package)
    bare.run("usermod", "--append", "--groups=hpkv", "engine")
    return bare


@pytest.fixture
def node(installed: Node) -> Iterator[Node]:
    """The same, and the service runs; what a test changed is undone."""
    installed.serving()
    yield installed
    installed.change("")
    installed.restart()
