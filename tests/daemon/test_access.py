"""Who may connect, and what lies in a daemon's way. Real processes throughout."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpkv_client.launch import listener
from tests.daemons import HPKVD, DaemonFactory, DaemonHandle, hpkvd, refusal

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acting as another user needs root")


def as_user(uid: int, gid: int, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command as another user. Imports come first: he may have no access to this Python."""
    code = (
        "import json, os, sys, tomllib, hpkv_client.transport, hpkv_client.launch\n"
        "import hpkv_daemon.cli.query, hpkv_daemon.cli.lifecycle, hpkv_daemon.cli.launching\n"
        "from hpkv_daemon.cli import run\n"
        f"os.setgroups([]); os.setresgid({gid}, {gid}, {gid}); os.setresuid({uid}, {uid}, {uid})\n"
        "sys.exit(run(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_umask_changes_no_permission(daemon: DaemonFactory, umask: int) -> None:
    before = os.umask(umask)
    try:
        handle = daemon()
    finally:
        os.umask(before)
    assert stat.S_IMODE(handle.socket.stat().st_mode) == 0o660
    assert stat.S_IMODE((handle.pool_directory / "pool").stat().st_mode) == 0o600


@needs_root
def test_a_user_outside_the_group_is_told_so_at_once(daemon: DaemonFactory) -> None:
    handle = daemon()
    handle.socket.parent.chmod(0o755)
    started = time.monotonic()
    done = as_user(NOBODY, NOBODY, "ping", env=handle.env)
    assert done.returncode == 77
    assert "no access to" in done.stderr
    assert time.monotonic() - started < 10


@needs_root
def test_a_user_in_the_group_may_connect_but_not_stop(daemon: DaemonFactory) -> None:
    handle = daemon(HPKV_SOCKET_GROUP="nogroup")
    handle.socket.parent.chmod(0o755)
    done = as_user(NOBODY, NOBODY, "ping", "--json", env=handle.env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pid"] == handle.pid
    assert as_user(NOBODY, NOBODY, "status", env=handle.env).returncode == 0
    assert as_user(NOBODY, NOBODY, "stop", env=handle.env).returncode == 77
    assert handle.process.poll() is None


@needs_root
def test_a_socket_directory_of_a_stranger_is_refused_by_both_sides(daemon: DaemonFactory) -> None:
    env = daemon.environment()
    path = Path(env["HPKV_SOCKET"])
    os.chown(path.parent, NOBODY, NOBODY)
    assert "belongs to uid 65534" in refusal("serve", env=env, exit_code=77)
    code = (
        f"import os, socket, sys; os.setresuid({NOBODY}, {NOBODY}, {NOBODY})\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); os.chmod(sys.argv[1], 0o666)\n"
        "print(flush=True); sys.stdin.read()"
    )
    impostor = subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert impostor.stdout is not None
    assert impostor.stdout.readline() == b"\n"
    try:
        assert "uid 65534" in refusal("ping", env=env, exit_code=77)
    finally:
        impostor.communicate()


def test_a_second_daemon_names_the_first_and_leaves_it_alone(running: DaemonHandle) -> None:
    client = running.client()
    before = running.socket.stat().st_ino
    for _ in range(2):
        complaint = refusal("serve", "--pool-size", "512t", env=running.env, exit_code=75)
        assert f"pid {running.pid}" in complaint
        assert client.call("ping", {}, 30.0)["pid"] == running.pid
    assert running.socket.stat().st_ino == before


def test_one_pool_serves_one_daemon(running: DaemonHandle, daemon: DaemonFactory) -> None:
    env = daemon.environment(HPKV_SHARE_MEM_FILE_PATH=running.pool_directory)
    assert f"pid {running.pid}" in refusal("serve", env=env, exit_code=75)
    assert f"pid {running.pid}" in refusal("start", env=env, exit_code=75)
    assert running.client().call("check", {}, 30.0)["ok"] is True


def test_a_killed_daemon_leaves_nothing_that_stops_the_next(running: DaemonHandle) -> None:
    running.kill()
    running.restart()
    assert json.loads(hpkvd("ping", "--json", env=running.env).stdout)["pid"] == running.pid


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_what_is_not_a_socket_is_refused_and_left(daemon: DaemonFactory, make: Callable[[Path], None]) -> None:
    env = daemon.environment()
    path = Path(env["HPKV_SOCKET"])
    make(path)
    before = path.lstat().st_ino
    assert "not a socket" in refusal("serve", env=env, exit_code=78)
    assert path.lstat().st_ino == before


def test_without_the_right_to_go_first_a_refusal_is_still_one_line(
    running: DaemonHandle, daemon: DaemonFactory
) -> None:
    env = daemon.environment(HPKV_SHARE_MEM_FILE_PATH=running.pool_directory)
    powers = ["setpriv", "--bounding-set=-sys_nice"] if os.geteuid() == 0 else []
    limits = ["prlimit", "--nice=0"]
    done = subprocess.run([*powers, *limits, *HPKVD, "serve"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_live_foreign_socket_is_refused_and_left(daemon: DaemonFactory) -> None:
    env = daemon.environment()
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(env["HPKV_SOCKET"])
        foreign.listen()
        assert f"pid {os.getpid()}" in refusal("serve", env=env, exit_code=75)
        assert listener(Path(env["HPKV_SOCKET"])) is not None


@needs_root
def test_directories_of_others_and_read_only_ones_are_refused(
    daemon: DaemonFactory, tmpfs: Callable[[str], Path]
) -> None:
    assert "read-only" in refusal(
        "serve", env=daemon.environment(HPKV_SHARE_MEM_FILE_PATH=tmpfs("80m,ro")), exit_code=78
    )
    theirs = tmpfs("80m")
    os.chown(theirs, NOBODY, NOBODY)
    assert "belongs to uid" in refusal("serve", env=daemon.environment(HPKV_SHARE_MEM_FILE_PATH=theirs), exit_code=77)
