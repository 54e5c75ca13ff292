"""No daemon started by hand: engines that race for it start exactly one, it outlives them, and they share it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_server import Topology, Vllm, full_hit, prompt

from tests.conftest import DaemonFactory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def hpkvd(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The CLI, as an operator of the node would run it."""
    command = [sys.executable, "-m", "hpkv_daemon", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def daemons_on(socket: str) -> list[int]:
    """Control processes that were started for this socket."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in command and b"hpkv_daemon" in command and f"HPKV_SOCKET={socket}".encode() in environment:
            found.append(int(process.name))
    return found


@pytest.fixture(scope="module")
def environment(daemons: DaemonFactory) -> Iterator[dict[str, str]]:
    """The user's variables, and nothing running yet."""
    variables = daemons.environment(HPKV_KV_MEM_POOL_SIZE="128m", HPKV_SUBMIT_DEADLINE_MS=5000)
    variables["HPKV_KV_STORAGE_PATH"] = str(Path(variables["HPKV_SOCKET"]).parent / "storage")
    variables["VLLM_ENABLE_HPKV"] = "1"
    yield variables
    hpkvd(variables, "stop", "--discard")


@pytest.fixture(scope="module")
def pair(environment: dict[str, str], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Vllm]]:
    """Two engines started at the same moment. Their environment is checked by vLLM, which must know our switch."""
    logs = tmp_path_factory.mktemp("pair")
    flags = ["--fail-on-environ-validation", "--gpu-memory-utilization=0.3"]
    engines = [Vllm(model, Topology("tp1"), environment, logs / f"{i}.log", *flags) for i in range(2)]
    yield [engine.wait_ready() for engine in engines]
    for engine in engines:
        engine.kill()


def test_racing_engines_start_exactly_one_daemon_and_share_its_blocks(
    environment: dict[str, str], pair: list[Vllm]
) -> None:
    status = json.loads(hpkvd(environment, "status", "--json").stdout)
    assert daemons_on(environment["HPKV_SOCKET"]) == [status["pid"]]
    tokens = prompt(7, 700)
    assert pair[0].ask(tokens).cached == 0
    deadline = time.monotonic() + 20
    while pair[1].ask(tokens).cached != full_hit(700):
        pair[1].reset_local()
        assert time.monotonic() < deadline, "the second engine never hits what the first one stored"


def test_the_users_variables_reach_the_daemon(environment: dict[str, str], pair: list[Vllm]) -> None:
    assert pair
    info = json.loads(hpkvd(environment, "info", "--json").stdout)
    assert info["pool"]["size_bytes"] == 128 << 20
    assert Path(info["pool"]["path"]).parent == Path(environment["HPKV_SHARE_MEM_FILE_PATH"])
    assert Path(environment["HPKV_KV_STORAGE_PATH"]).stat().st_mode & 0o777 == 0o700


def test_the_daemon_outlives_the_engines_and_forgets_them_within_two_seconds(
    environment: dict[str, str], pair: list[Vllm]
) -> None:
    before = json.loads(hpkvd(environment, "status", "--json").stdout)
    for engine in pair:
        engine.kill()
    deadline = time.monotonic() + 2
    while (info := json.loads(hpkvd(environment, "info", "--json").stdout))["engines"] or info["movers"]:
        assert time.monotonic() < deadline, info
    after = json.loads(hpkvd(environment, "status", "--json").stdout)
    assert (after["running"], after["pid"], after["epoch"]) == (True, before["pid"], before["epoch"])
    assert info["pool"]["resident_blocks"] > 0
    assert info["sessions"] == []


def test_an_operator_stops_it_with_the_cli(environment: dict[str, str]) -> None:
    assert hpkvd(environment, "stop").returncode == 0
    assert hpkvd(environment, "status", "--json").returncode == 3
    assert daemons_on(environment["HPKV_SOCKET"]) == []
