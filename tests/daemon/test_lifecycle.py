"""How daemons begin and end: races, signals, crashes, what they leave behind. Real processes throughout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpkv_client.errors import ConfigError
from hpkv_client.launch import daemon_environment, ensure_daemon, listener
from hpkv_client.settings import from_environment
from tests.daemons import HPKVD, DaemonFactory, DaemonHandle, hpkvd
from tests.support import wait_until

ENSURE = (
    "import os; from hpkv_client.launch import ensure_daemon\n"
    "from hpkv_client.settings import from_environment\n"
    "ensure_daemon(from_environment(os.environ), 30)"
)


def pid_on(env: dict[str, str]) -> int:
    """Of the daemon that answers on the socket."""
    pid = json.loads(hpkvd("ping", "--json", env=env).stdout)["pid"]
    assert isinstance(pid, int)
    return pid


KEPT = ["index", "pool"]
"""What a daemon that served leaves to the next one."""


def left_behind(env: dict[str, str]) -> list[str]:
    """What lies in the directories of socket and pool, beside configuration and logs."""
    socket, pool = Path(env["HPKV_SOCKET"]).parent, Path(env["HPKV_SHARE_MEM_FILE_PATH"])
    names = [path.name for directory in (socket, pool) for path in directory.iterdir()]
    return sorted(name for name in names if not name.endswith((".toml", ".out", ".log")))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_every_stop_signal_ends_it_cleanly(daemon: DaemonFactory, number: signal.Signals) -> None:
    handle = daemon()
    assert left_behind(handle.env) == ["hpkvd.sock", "hpkvd.sock.lock", *KEPT, "pool.lock"]
    handle.process.send_signal(number)
    assert handle.process.wait(10) == 0
    assert left_behind(handle.env) == KEPT


def test_stop_ends_it_cleanly_and_waits(daemon: DaemonFactory) -> None:
    handle = daemon()
    done = hpkvd("stop", env=handle.env)
    assert done.returncode == 0
    assert str(handle.pid) in done.stderr
    assert "--discard" in done.stderr
    assert left_behind(handle.env) == KEPT
    assert handle.process.wait(1) == 0


def test_signals_that_rain_down_until_the_end_change_nothing(daemon: DaemonFactory) -> None:
    handle = daemon()
    while handle.process.poll() is None:
        handle.process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    assert handle.process.wait() == 0
    assert left_behind(handle.env) == KEPT


@pytest.mark.parametrize("what", ["lock", "pool"])
def test_a_signal_while_it_starts_ends_it_cleanly(daemon: DaemonFactory, what: str) -> None:
    env = daemon.environment(HPKV_KV_MEM_POOL_SIZE="1g")
    watched = Path(env["HPKV_SOCKET"] + ".lock") if what == "lock" else Path(env["HPKV_SHARE_MEM_FILE_PATH"], "pool")
    process = subprocess.Popen([*HPKVD, "serve"], env=env, stderr=subprocess.PIPE, text=True)
    while not watched.exists():
        assert process.poll() is None
    process.terminate()
    said = process.communicate(timeout=10)[1]
    assert process.returncode == 0, said
    assert "Traceback" not in said
    # On a machine that was busy elsewhere it may have come further than we saw; then the next daemon has its pool.
    assert left_behind(env) == (KEPT if " ready: " in said else [])


def test_a_reload_while_it_starts_waits_until_it_serves(daemon: DaemonFactory) -> None:
    env = daemon.environment(HPKV_KV_MEM_POOL_SIZE="1g")
    log = Path(env["HPKV_SOCKET"]).with_name("reload.log")
    process = subprocess.Popen([*HPKVD, "serve"], env=env | {"HPKV_LOG_FILE": str(log)}, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: Path(env["HPKV_SHARE_MEM_FILE_PATH"], "pool").exists(), 20)
        Path(env["HPKV_CONFIG"]).write_text("lease_seconds = 12\n")
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: "read anew: lease_seconds" in log.read_text(), 30)
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_twenty_crashes_on_a_tmpfs_of_one_and_a_half_pools(daemon: DaemonFactory, tmpfs: Callable[[str], Path]) -> None:
    directory = tmpfs("96m")
    (directory / "foreign").write_text("mine")
    handle = daemon(HPKV_SHARE_MEM_FILE_PATH=directory)
    for _ in range(20):
        handle.kill()
        handle.restart()
        assert sorted(path.name for path in directory.iterdir()) == ["foreign", *KEPT, "pool.lock"]
    assert (directory / "foreign").read_text() == "mine"
    assert handle.stop() == 0
    assert hpkvd("stop", "--discard", env=handle.env).returncode == 0
    assert [path.name for path in directory.iterdir()] == ["foreign"]


def test_start_is_detached_waits_and_may_be_repeated(daemon: DaemonFactory) -> None:
    env = daemon.environment()
    first = json.loads(hpkvd("start", "--json", env=env).stdout)
    try:
        assert first["started"] is True
        assert first["pid"] == pid_on(env)
        assert os.getsid(first["pid"]) == first["pid"]
        assert os.readlink(f"/proc/{first['pid']}/cwd") == "/"
        again = hpkvd("start", "--json", env=env)
        assert (again.returncode, json.loads(again.stdout)["started"]) == (0, False)
        restarted = json.loads(hpkvd("restart", "--json", env=env).stdout)
        assert restarted["pid"] != first["pid"]
        assert restarted["epoch"] != first["epoch"]
        assert "ready" in Path(env["HPKV_SOCKET"]).with_suffix(".log").read_text()
    finally:
        assert hpkvd("stop", "--discard", env=env).returncode == 0
    assert left_behind(env) == []


def test_of_many_that_need_one_exactly_one_daemon_comes(daemon: DaemonFactory) -> None:
    env = daemon.environment(HPKV_KV_MEM_POOL_SIZE="256m")
    commands = [[*HPKVD, "start", "--if-needed"], [sys.executable, "-c", ENSURE]] * 4
    racers = [
        subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for command in commands
    ]
    said = [racer.communicate(timeout=60) for racer in racers]
    try:
        assert [racer.returncode for racer in racers] == [0] * 8, said
        assert said == [(b"", b"")] * 8
        pid = pid_on(env)
        log = Path(env["HPKV_SOCKET"]).with_suffix(".log").read_text()
        assert log.count(" ready: ") == 1
        assert f"pid {pid}," in log
    finally:
        assert hpkvd("stop", env=env).returncode == 0


def test_a_daemon_started_by_an_engine_outlives_it_and_is_not_tuned_like_it(daemon: DaemonFactory) -> None:
    env = daemon.environment(HPKV_LEASE_SECONDS="17")
    engine_env = env | {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_HPKV": "1", "CUDA_VISIBLE_DEVICES": "3"}
    code = f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})\n{ENSURE}\nos.killpg(0, 9)"
    engine = subprocess.Popen([sys.executable, "-c", code], env=engine_env, start_new_session=True)
    assert engine.wait(60) == -signal.SIGKILL
    pid = pid_on(env)
    try:
        assert os.getsid(pid) == pid
        assert os.sched_getaffinity(pid) >= os.sched_getaffinity(0)
        inherited = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"HPKV_LEASE_SECONDS=17" in inherited
        assert not [entry for entry in inherited if entry.startswith((b"OMP", b"VLLM", b"CUDA"))]
        assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    finally:
        assert hpkvd("stop", env=env).returncode == 0


def test_an_engine_is_told_why_no_daemon_starts(daemon: DaemonFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    env = daemon.environment()
    settings = from_environment(env)
    for name, value in (env | {"HPKV_POOL_SZIE": "1g"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="HPKV_POOL_SZIE; did you mean HPKV_KV_MEM_POOL_SIZE"):
        ensure_daemon(settings, 30)


def test_a_daemon_that_answers_is_left_as_it_is(daemon: DaemonFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = daemon()
    monkeypatch.setenv("PATH", "")
    started = time.monotonic()
    ensure_daemon(from_environment(handle.env), 30)
    assert time.monotonic() - started < 10
    assert listener(handle.socket) is not None


def test_an_engines_tuning_stays_out_of_the_daemons_environment() -> None:
    given = {
        "PATH": "/bin",
        "HPKV_SOCKET": "/s",
        "VLLM_X": "1",
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": "/x.so",
    }
    given |= {"GLIBC_TUNABLES": "x", "CUDA_VISIBLE_DEVICES": "0", "KMP_AFFINITY": "x"}
    assert daemon_environment(given) == {"PATH": "/bin", "HPKV_SOCKET": "/s"}


def test_modules_of_the_current_directory_are_not_imported(daemon: DaemonFactory, tmp_path: Path) -> None:
    env = daemon.environment()
    (tmp_path / "click.py").write_text("raise SystemExit('imported a stranger')")
    started = subprocess.run(
        [*HPKVD, "start", "--json"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    try:
        assert json.loads(started.stdout)["started"] is True
    finally:
        assert hpkvd("stop", env=env).returncode == 0


def test_a_daemon_with_clients_stops_as_fast_as_an_idle_one(daemon: DaemonFactory) -> None:
    handle: DaemonHandle = daemon()
    for _ in range(50):
        handle.client().call("ping", {}, 30.0)
    started = time.monotonic()
    assert handle.stop() == 0
    assert time.monotonic() - started < 10
