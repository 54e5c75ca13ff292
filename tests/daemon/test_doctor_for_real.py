"""``hpkvd doctor`` on this machine, beside daemons in every state."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import DaemonFactory, DaemonHandle, hpkvd
from tests.support import BlindDaemon, observed_daemon


def examined(env: dict[str, str], *arguments: str) -> dict[str, dict[str, Any]]:
    """The findings by check; the exit status fits them."""
    done = hpkvd("doctor", "--json", "--timeout", "1", *arguments, env=env)
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1)
    return {finding["check"]: finding for finding in found["findings"]}


@pytest.mark.parametrize("where", [(), ("--from-engine",)])
def test_a_block_goes_to_a_daemon_that_serves_and_comes_back(running: DaemonHandle, where: tuple[str, ...]) -> None:
    found = examined(running.env, *where)
    assert found["round trip"]["seen"] == "a block was stored and came back"
    assert found["socket"]["seen"].endswith(f"serving, pid {running.pid}")
    assert {found[check]["level"] for check in ("settings", "socket access", "namespaces", "kernel")} == {"ok"}
    info = running.client().call("info", {}, 30.0)
    assert sum(namespace["blocks"] for namespace in info["namespaces"]) == 0


def test_a_daemon_that_hangs_fails(running: DaemonHandle) -> None:
    running.process.send_signal(signal.SIGSTOP)
    found = examined(running.env)
    assert (found["socket"]["level"], found["round trip"]["level"]) == ("fail", "ok")
    assert "hanging" in found["socket"]["seen"]


def test_a_daemon_that_was_killed_leaves_a_stale_socket_and_lock(running: DaemonHandle) -> None:
    running.kill()
    found = examined(running.env)
    assert found["socket"]["level"] == found["stale lock"]["level"] == "warn"
    assert "hpkvd start" in found["socket"]["advice"]


def test_a_pool_that_does_not_fit_and_a_broken_file_fail(daemon: DaemonFactory) -> None:
    env = daemon.environment(HPKV_KV_MEM_POOL_SIZE="100t")
    found = examined(env)
    assert found["pool"]["level"] == "fail"
    Path(env["HPKV_CONFIG"]).write_text("pool_szie = 1\n")
    assert "did you mean pool_size?" in examined(env)["settings"]["seen"]


def test_storage_is_looked_at_where_it_is_named(daemon: DaemonFactory) -> None:
    env = daemon.environment()
    directory = Path(env["HPKV_SOCKET"]).parent
    found = examined(env, "--storage-path", str(directory), "--storage-size", "100t")
    assert found["storage"]["level"] == "fail"
    assert "HPKV_STORAGE_SIZE" in found["storage"]["advice"]
    assert not list(directory.glob(".hpkvd*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a PID namespace")
def test_a_daemon_in_another_pid_namespace_is_told() -> None:
    with observed_daemon(BlindDaemon) as live:
        found = examined(live.handle.env)
        assert found["namespaces"]["level"] == "fail"
        assert found["round trip"]["level"] == "fail"


def test_findings_for_people_have_what_to_do_below_them(running: DaemonHandle) -> None:
    done = hpkvd("doctor", "--from-engine", env=running.env)
    assert done.returncode == 0
    assert "warn  enabled: VLLM_ENABLE_HPKV is not 1\n      -> set it where the engine is started\n" in done.stdout
