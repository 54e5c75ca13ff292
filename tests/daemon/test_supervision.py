"""The daemon under a service manager: what it tells it, the listener it is passed, its lines in the journal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpkv_client.transport import Channel
from tests.daemons import HPKVD, DaemonFactory, DaemonHandle, hpkvd, refusal
from tests.support import wait_until

_PASS = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3)\n"
    "os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid())); os.execv(sys.argv[2], sys.argv[2:])"
)
"""What systemd does to a process that it passes a listener."""


class ActivatedDaemon(DaemonHandle):
    """Serves a listener that outlives it."""

    def __init__(self, env: dict[str, str], log: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(env["HPKV_SOCKET"])
        self.listener.listen()
        super().__init__(env, log)

    def _spawn(self) -> subprocess.Popen[bytes]:
        process = self.spawn_only()
        try:
            self._await_answer(process)
        except BaseException:
            process.kill()
            process.wait()
            self.listener.close()
            raise
        return process

    def spawn_only(self) -> subprocess.Popen[bytes]:
        """Start it without waiting."""
        fd = self.listener.fileno()
        command = [sys.executable, "-c", _PASS, str(fd), *HPKVD, "serve"]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=self.env, stdout=log, stderr=log, pass_fds=(fd,))

    def close(self) -> None:
        super().close()
        self.listener.close()


@pytest.fixture
def activated(daemon: DaemonFactory) -> Iterator[ActivatedDaemon]:
    env = daemon.environment()
    handle = ActivatedDaemon(env, Path(env["HPKV_CONFIG"]).with_suffix(".out"))
    yield handle
    handle.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "notify"))
        bound.settimeout(20)
        yield bound


def told(manager: socket.socket, what: str) -> list[str]:
    """Messages up to the first that starts so."""
    messages: list[str] = []
    while not messages or not messages[-1].startswith(what):
        messages.append(manager.recv(4096).decode())
    return messages


def test_a_service_manager_hears_of_start_life_and_end(daemon: DaemonFactory, manager: socket.socket) -> None:
    handle = daemon(NOTIFY_SOCKET=manager.getsockname(), WATCHDOG_USEC="1500000")
    before = told(manager, "READY=1")
    assert before[0].startswith("STATUS=allocating the pool: ")
    assert all(re.search(r"^EXTEND_TIMEOUT_USEC=\d{8}$", message, re.M) for message in before[:-1])
    for _ in range(3):
        told(manager, "WATCHDOG=1")
    environ = Path(f"/proc/{handle.pid}/environ").read_bytes()
    assert b"NOTIFY_SOCKET" in environ
    assert handle.stop() == 0
    assert told(manager, "STOPPING=1")


def test_a_frozen_daemon_gives_no_sign_of_life(daemon: DaemonFactory, manager: socket.socket) -> None:
    handle = daemon(NOTIFY_SOCKET=manager.getsockname(), WATCHDOG_USEC="1500000")
    told(manager, "WATCHDOG=1")
    handle.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: ") T " in Path(f"/proc/{handle.pid}/stat").read_text())
    manager.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while manager.recv(4096):
            continue
    manager.settimeout(1.5)
    with pytest.raises(TimeoutError):
        manager.recv(4096)


def test_a_hung_loop_says_where_it_hangs_when_it_is_aborted(running: DaemonHandle) -> None:
    running.process.send_signal(signal.SIGABRT)
    assert running.process.wait(20) == -signal.SIGABRT
    assert "app.py" in running.text()


def test_a_passed_listener_is_served_and_stays(activated: ActivatedDaemon) -> None:
    inode = activated.socket.stat().st_ino
    for command in ("ping", "status"):
        found = json.loads(hpkvd(command, "--json", env=activated.env).stdout)
        assert found["pid"] == activated.pid
    assert hpkvd("stop", env=activated.env).returncode == 0
    assert activated.process.wait(10) == 0
    assert activated.socket.stat().st_ino == inode
    assert not Path(f"{activated.socket}.lock").exists()


def test_a_request_waits_for_the_next_daemon_on_a_passed_listener(activated: ActivatedDaemon) -> None:
    first = activated.pid
    client = Channel(activated.socket)
    try:
        assert client.call("ping", {}, 20)["pid"] == first
        activated.kill()
        request = client.send("ping", {})
        activated.process = activated.spawn_only()
        answer = wait_until(lambda: list(client.replies(0.1)), 20)[0]
        assert answer.id == request
        assert answer.result()["pid"] == activated.pid != first
    finally:
        client.close()


def test_who_connects_is_told_by_the_kernel_on_a_passed_listener_too(activated: ActivatedDaemon) -> None:
    client = activated.client()
    body = {"major": 1, "minor": 0, "name": "test"}
    client.session = client.call("hello", body, 20)["session"]
    sessions = client.call("info", {}, 20)["sessions"]
    assert [session["pid"] for session in sessions] == [os.getpid()]


def test_a_second_daemon_is_refused_and_leaves_a_passed_listener_alone(activated: ActivatedDaemon) -> None:
    inode = activated.socket.stat().st_ino
    assert f"pid {activated.pid}" in refusal("serve", env=activated.env, exit_code=75)
    assert activated.client().call("ping", {}, 20)["pid"] == activated.pid
    activated.kill()
    # Nobody serves it, but it is not ours to replace.
    assert f"pid {os.getpid()}" in refusal("serve", env=activated.env, exit_code=75)
    assert activated.socket.stat().st_ino == inode


def test_a_daemon_that_starts_behind_a_passed_listener_does_not_hang(activated: ActivatedDaemon) -> None:
    activated.kill()
    activated.process = activated.spawn_only()
    lock = Path(f"{activated.socket}.lock")
    wait_until(lambda: f'"pid": {activated.pid}' in lock.read_text(), 20)
    activated.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: ") T " in Path(f"/proc/{activated.pid}/stat").read_text())
    done = hpkvd("status", "--json", "--timeout", "0.2", env=activated.env)
    activated.process.send_signal(signal.SIGCONT)
    starting = '"ready": true' not in lock.read_text()
    assert json.loads(done.stdout)["state"] == ("starting" if starting else "hanging")
    assert done.returncode == (3 if starting else 69)


def test_force_kills_a_frozen_daemon_on_a_passed_listener(activated: ActivatedDaemon) -> None:
    activated.process.send_signal(signal.SIGSTOP)
    done = hpkvd("stop", "--force", "--timeout", "0.2", env=activated.env)
    assert done.returncode == 0, done.stderr
    assert activated.process.wait(10) == -signal.SIGKILL
    assert activated.socket.exists()


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_passed_socket_that_cannot_be_served_is_a_wrong_setting(daemon: DaemonFactory, elsewhere: bool) -> None:
    env = daemon.environment()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(env["HPKV_SOCKET"] + ("2" if elsewhere else ""))
        if elsewhere:
            other.listen()
        fd = other.fileno()
        command = [sys.executable, "-c", _PASS, str(fd), *HPKVD, "serve"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, pass_fds=(fd,), timeout=60)
    assert done.returncode == 78, done.stderr
    assert "ListenStream=" in done.stderr


def as_journal(env: dict[str, str], *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """A command whose stderr is said to be the journal; it, and the descriptor to read from."""
    reads, writes = os.pipe()
    info = os.fstat(writes)
    env = env | {"JOURNAL_STREAM": f"{info.st_dev}:{info.st_ino}"}
    process = subprocess.Popen([*HPKVD, *arguments], env=env, stderr=writes)
    os.close(writes)
    return process, reads


def lines_of(fd: int) -> list[str]:
    """All until its end."""
    with open(fd) as stream:
        return stream.read().splitlines()


def test_lines_in_the_journal_have_priorities_and_no_time(daemon: DaemonFactory) -> None:
    env = daemon.environment(HPKV_SHARE_MEM_FILE_PATH=Path(daemon.environment()["HPKV_SOCKET"]).parent / "pool")
    process, log = as_journal(env, "serve")
    wait_until(lambda: hpkvd("ping", env=env).returncode == 0, 20)
    process.terminate()
    assert process.wait(20) == 0
    lines = lines_of(log)
    assert [line for line in lines if not re.match(r"<[346]>[a-z]", line)] == []
    assert any(line.startswith("<4>pool directory") for line in lines)
    assert "<6>stopping" in lines
    process, log = as_journal(env | {"HPKV_POLICY": "none"}, "serve")
    assert process.wait(20) == 78
    assert [line[:3] for line in lines_of(log)] == ["<3>"]


def test_a_log_in_json_is_one_object_a_line(daemon: DaemonFactory) -> None:
    handle = daemon(HPKV_LOG_FORMAT="json")
    assert handle.stop() == 0
    entries = [json.loads(line) for line in handle.text().splitlines()]
    assert {"time", "level", "pid", "logger", "message"} == set(entries[0])
    assert entries[-1]["message"] == "stopping"
    assert entries[-1]["pid"] == handle.pid
    assert abs(entries[-1]["time"] - time.time()) < 60
