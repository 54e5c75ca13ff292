"""A GPU for tests: the driver of ``fake/libcuda.c``, compiled once, and daemons whose movers find it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda.gpus import FakeCuda, GpuNode, ImpatientGpuDaemon
from tests.support import observed_daemon

SOURCE = Path(__file__).parent / "fake" / "libcuda.c"


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the library."""
    if shutil.which("gcc") is None:
        pytest.skip("the fake driver needs gcc")
    directory = tmp_path_factory.mktemp("libcuda")
    library = directory / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE, "-lpthread"],
        check=True,
    )
    return directory


@pytest.fixture(scope="session")
def cuda(fake_driver: Path) -> Iterator[FakeCuda]:
    """The driver in this process, which plays the engines: loaded once, like the real one."""
    cuda = FakeCuda(fake_driver)
    yield cuda
    shutil.rmtree(cuda.directory)


@pytest.fixture(scope="module")
def shared(cuda: FakeCuda) -> Iterator[GpuNode]:
    """The daemon of this module."""
    with observed_daemon(ImpatientGpuDaemon, **cuda.environment()) as observed:
        yield GpuNode(observed, cuda)


@pytest.fixture
def node(shared: GpuNode) -> Iterator[GpuNode]:
    """The shared daemon, empty before the test and clean after it."""
    shared.observed.ask("clear")
    yield shared
    shared.calm()
    shared.observed.assert_sound()
