"""The script for a machine with a GPU, from end to end, on the driver made for tests: there is no second try there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu_engine import LAYOUTS
from tests.cuda.gpus import FIRST
from tests.support import ROOT

TORCH = Path(__file__).parent / "fake" / "python"


@pytest.fixture
def machine(fake_driver: Path) -> Iterator[dict[str, str]]:
    """The environment of one with room for the script."""
    directory = Path(tempfile.mkdtemp(prefix="hpkv-t-gpu-", dir="/dev/shm"))
    (directory / "devices").write_text(f"{FIRST} {512 << 20}")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FAKE_CUDA", "PYTORCH"))}
    yield inherited | {
        "FAKE_CUDA": str(directory),
        "FAKE_CUDA_DELAY_US": "1000",
        "LD_LIBRARY_PATH": str(fake_driver),
        "PYTHONPATH": str(TORCH),
    }
    shutil.rmtree(directory)


def test_it_checks_and_measures_everything(machine: dict[str, str], tmp_path: Path) -> None:
    told = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--seconds", "600", "--json", str(told)]
    done = subprocess.run(command, env=machine, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(told.read_text())
    assert found["checks"] == {
        "bytes": f"right in {len(LAYOUTS)} layouts",
        "order": "right in 5 stores",
        "another process": "cuda_ipc",
        "expandable segments": "cuda_fd",
    }
    assert [one["layout"] for one in found["layouts"]] == [layout.name for layout in LAYOUTS]
    assert found["layouts"][0]["store"]["ratio"] > 0
    assert found["decode"]["slowdown"] > 0
