"""``hpkvd`` as a user meets it: commands, output, exit codes. Real processes throughout."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time

from tests.daemons import HPKVD, DaemonFactory, DaemonHandle, hpkvd, refusal


def test_status_and_ping_as_json_are_one_line_with_the_promised_keys(running: DaemonHandle) -> None:
    for command in ("status", "ping"):
        done = hpkvd(command, "--json", env=running.env)
        assert done.returncode == 0
        assert done.stderr == ""
        assert done.stdout.count("\n") == 1
        facts = json.loads(done.stdout)
        assert facts["pid"] == running.pid
        assert len(bytes.fromhex(facts["epoch"])) >= 8
        assert facts["uptime_seconds"] >= 0
    status = json.loads(hpkvd("status", "--json", env=running.env).stdout)
    assert status["running"] is True
    assert status["socket"] == str(running.socket)


def test_output_in_a_pipe_is_plain_and_on_a_terminal_a_table(running: DaemonHandle) -> None:
    piped = hpkvd("info", env=running.env).stdout
    assert f"pool.size_bytes {64 << 20}\n" in piped
    ours, theirs = pty.openpty()
    subprocess.run([*HPKVD, "info"], env=running.env | {"TERM": "xterm"}, stdout=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert f"64 MiB ({64 << 20} bytes)" in shown
    assert "sessions: none" in shown


def test_stats_are_sorted_and_roll_with_what_changed(running: DaemonHandle) -> None:
    names = [line.split()[0] for line in hpkvd("stats", env=running.env).stdout.splitlines()]
    assert names == sorted(names)
    assert "requests" in names
    rolled = hpkvd("stats", "-i", "0.05", "-n", "3", env=running.env).stdout.splitlines()
    assert len(rolled) == 4
    assert "(+1)" in rolled[2]
    as_json = hpkvd("stats", "-i", "0.05", "-n", "2", "--json", env=running.env).stdout.splitlines()
    first, second = (json.loads(line)["requests"] for line in as_json)
    assert second == first + 1


def test_check_and_clear_and_version_answer(running: DaemonHandle) -> None:
    assert json.loads(hpkvd("check", "--json", env=running.env).stdout)["ok"] is True
    assert json.loads(hpkvd("clear", "--json", env=running.env).stdout)["cleared_blocks"] == 0
    assert "hexadecimal" in refusal("clear", "--namespace", "xyz", env=running.env, exit_code=2)
    assert json.loads(hpkvd("version", "--json", env={}).stdout)["protocol"].startswith("hpkv/")


def test_usage_errors_exit_with_2(daemon: DaemonFactory) -> None:
    env = daemon.environment()
    for arguments in (["strat"], ["serve", "--pool-szie", "1g"], ["stats", "-i", "x"], ["stats", "-n", "3"]):
        assert hpkvd(*arguments, env=env).returncode == 2


def test_commands_without_a_daemon_exit_with_3_at_once(daemon: DaemonFactory) -> None:
    env = daemon.environment()
    for command in ("ping", "stats", "info", "check", "clear", "stop"):
        started = time.monotonic()
        assert "no hpkvd on" in refusal(command, env=env, exit_code=3)
        assert time.monotonic() - started < 10
    status = hpkvd("status", "--json", env=env)
    assert status.returncode == 3
    assert json.loads(status.stdout)["running"] is False


def test_a_killed_daemons_socket_is_not_running_rather_than_unreachable(running: DaemonHandle) -> None:
    running.kill()
    assert running.socket.exists()
    refusal("ping", env=running.env, exit_code=3)
    assert hpkvd("status", env=running.env).returncode == 3


def test_a_frozen_daemon_is_unreachable_and_stops_only_by_force(running: DaemonHandle) -> None:
    running.process.send_signal(signal.SIGSTOP)
    status = hpkvd("status", "--json", "--timeout", "0.3", env=running.env)
    assert status.returncode == 69
    assert json.loads(status.stdout)["running"] is True
    assert json.loads(status.stdout)["pid"] == running.pid
    refusal("ping", "--timeout", "0.3", env=running.env, exit_code=69)
    refusal("start", "--timeout", "0.3", env=running.env, exit_code=69)
    assert "has not ended" in refusal("stop", "--timeout", "0.3", env=running.env, exit_code=1)
    assert hpkvd("stop", "--timeout", "0.1", "--force", env=running.env).returncode == 0
    assert running.process.wait(5) == -signal.SIGKILL
    assert not running.socket.exists()
