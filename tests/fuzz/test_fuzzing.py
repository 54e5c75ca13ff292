"""The fuzz targets: on their seeds in every run, and for a while under a fuzzing engine that looks for new code."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemons import without_hpkv
from tests.fuzz.entropy import Entropy

TARGETS = ("codec", "service")
SECONDS = float(os.environ.get("HPKV_FUZZ_SECONDS", "60"))
"""How long each target is fuzzed."""

_ROOT = Path(__file__).parents[2]
_LEAST_RUNS = {"codec": 1000, "service": 50}
"""In any time at all; fewer and the target is broken."""


@pytest.mark.parametrize("name", TARGETS)
def test_no_seed_breaks_its_target(name: str) -> None:
    target = importlib.import_module(f"tests.fuzz.{name}")
    for seed in target.seeds():
        try:
            target.run(seed)
        except BaseException as problem:
            problem.add_note(f"python -m tests.fuzz.{name} --replay {seed.hex()}")
            raise


def test_an_input_that_ends_early_is_read_as_zeros() -> None:
    entropy = Entropy(b"\x07")
    assert [entropy.below(4), entropy.below(4), entropy.number(8), entropy.bytes(3)] == [3, 0, 0, b""]
    assert entropy.value() is None


@pytest.mark.fuzz
@pytest.mark.timeout(max(300, 3 * SECONDS))
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="there is no atheris for this Python")
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_that_can_be_found_breaks_the_target(name: str, tmp_path: Path) -> None:
    corpus, found = tmp_path / "corpus", tmp_path / "found"
    found.mkdir()
    command = [sys.executable, "-m", f"tests.fuzz.{name}", str(corpus), f"-artifact_prefix={found}/"]
    command += [f"-max_total_time={max(1, round(SECONDS))}", "-timeout=20", "-print_final_stats=1"]
    fuzzer = subprocess.run(
        command,
        cwd=_ROOT,
        env=without_hpkv(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=SECONDS + 200,
    )
    inputs = "".join(f"python -m tests.fuzz.{name} --replay {path.read_bytes().hex()}\n" for path in found.iterdir())
    assert fuzzer.returncode == 0, f"{fuzzer.stdout[-6000:]}\n{inputs}"
    runs = re.search(r"number_of_executed_units: ([0-9]+)", fuzzer.stdout)
    assert runs is not None, fuzzer.stdout[-6000:]
    assert int(runs[1]) >= _LEAST_RUNS[name], fuzzer.stdout[-6000:]
