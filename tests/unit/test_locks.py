"""Claims on socket paths: one owner who is named, stale ones cleared, foreign ones left in peace."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpkv_client.errors import Busy, ConfigError, HpkvError, NotPermitted
from hpkv_client.launch import listener, require_trusted
from hpkv_client.peer import PeerProcess
from hpkv_daemon.directories import ensure_directory
from hpkv_daemon.locks import InstanceLock, ensure_socket_directory, instance_holder, lock_path_of

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")


@pytest.fixture
def run() -> Iterator[Path]:
    """A short private directory, as sockets need it."""
    directory = Path(tempfile.mkdtemp(prefix="hpkv-t-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def holding(run: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the claim on ``run/s`` and has bound the socket."""
    code = (
        "import socket, sys; from pathlib import Path; from hpkv_daemon.locks import InstanceLock\n"
        "lock = InstanceLock(Path(sys.argv[1])); lock.acquire(); lock.describe(Path('/somewhere/pool'))\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print('held', flush=True)\n"
        "sys.stdin.read(); lock.release()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run / "s")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_lock_file_tells_who_holds_it(run: Path) -> None:
    with InstanceLock(run / "s") as lock:
        lock.describe(Path("/somewhere/pool"))
        record = json.loads((run / "s.lock").read_text())
        assert (record["pid"], record["socket"], record["pool"]) == (
            os.getpid(),
            str(run / "s"),
            "/somewhere/pool",
        )
        assert stat.S_IMODE((run / "s.lock").stat().st_mode) == 0o600
        holder = instance_holder(run / "s")
        assert holder is not None
        assert (holder.pid, holder.pool, holder.here) == (os.getpid(), "/somewhere/pool", True)
    assert list(run.iterdir()) == []
    assert instance_holder(run / "s") is None


def test_a_second_owner_is_told_the_pid_and_disturbs_nothing(run: Path, holding: subprocess.Popen[str]) -> None:
    before = (run / "s").stat().st_ino
    with pytest.raises(Busy, match=f"pid {holding.pid}"):
        InstanceLock(run / "s").acquire()
    assert (run / "s").stat().st_ino == before
    assert listener(run / "s") == PeerProcess(holding.pid, os.geteuid())


def test_a_killed_owner_leaves_nothing_that_stops_the_next(run: Path, holding: subprocess.Popen[str]) -> None:
    holding.send_signal(signal.SIGKILL)
    holding.wait()
    assert stat.S_ISSOCK((run / "s").stat().st_mode)
    assert instance_holder(run / "s") is None
    with InstanceLock(run / "s"):
        assert not (run / "s").exists()


def test_a_frozen_owner_still_owns(run: Path, holding: subprocess.Popen[str]) -> None:
    holding.send_signal(signal.SIGSTOP)
    with pytest.raises(Busy, match=f"pid {holding.pid}"):
        InstanceLock(run / "s").acquire()
    holding.send_signal(signal.SIGCONT)


def test_asking_who_holds_it_never_keeps_an_owner_out(run: Path) -> None:
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            instance_holder(run / "s")

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    try:
        for _ in range(100):
            with InstanceLock(run / "s"):
                pass
    finally:
        done.set()
        for asker in askers:
            asker.join()


def test_of_many_that_race_one_owns_at_a_time(run: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from hpkv_daemon.locks import InstanceLock\n"
        "from hpkv_client.errors import Busy\n"
        "path = Path(sys.argv[1])\n"
        "for _ in range(50):\n"
        "    try:\n"
        "        with InstanceLock(path):\n"
        "            os.close(os.open(path.with_name('owner'), os.O_CREAT | os.O_EXCL))\n"
        "            path.with_name('owner').unlink()\n"
        "    except Busy: pass\n"
    )
    racers = [subprocess.Popen([sys.executable, "-c", code, str(run / "s")]) for _ in range(4)]
    assert [racer.wait() for racer in racers] == [0] * 4


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_what_is_not_a_socket_is_refused_and_left(run: Path, make: Callable[[Path], None]) -> None:
    make(run / "s")
    before = (run / "s").lstat()
    with pytest.raises(ConfigError, match="is not a socket"):
        InstanceLock(run / "s").acquire()
    assert (run / "s").lstat().st_ino == before.st_ino
    assert [path.name for path in run.iterdir()] == ["s"]


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_live_foreign_socket_is_refused_and_left(run: Path, kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_UNIX, kind) as foreign:
        foreign.bind(str(run / "s"))
        if kind == socket.SOCK_STREAM:
            foreign.listen()
        with pytest.raises(HpkvError, match=f"pid {os.getpid()}|another kind of socket"):
            InstanceLock(run / "s").acquire()
        assert [path.name for path in run.iterdir()] == ["s"]


def test_a_link_or_directory_in_the_place_of_the_lock_is_refused(run: Path) -> None:
    victim = run / "victim"
    victim.write_text("precious")
    (run / "s.lock").symlink_to(victim)
    with pytest.raises(ConfigError, match="not a regular file"):
        InstanceLock(run / "s").acquire()
    assert victim.read_text() == "precious"
    (run / "d.lock").mkdir()
    with pytest.raises(ConfigError, match="not a regular file"):
        InstanceLock(run / "d").acquire()


def test_a_lock_file_of_rubbish_is_no_obstacle(run: Path) -> None:
    lock_path_of(run / "s").write_bytes(b"\xff[" * 5000)
    with InstanceLock(run / "s"):
        holder = instance_holder(run / "s")
        assert holder is not None
        assert holder.pid == os.getpid()


def test_a_pid_of_another_namespace_is_not_taken_for_ours(run: Path) -> None:
    with InstanceLock(run / "s"):
        record = json.loads((run / "s.lock").read_text())
        (run / "s.lock").write_text(json.dumps(record | {"pid_namespace": 1}))
        holder = instance_holder(run / "s")
        assert holder is not None
        assert not holder.here


def test_a_holder_that_could_not_write_is_known_to_the_kernel(run: Path) -> None:
    with InstanceLock(run / "s"):
        os.truncate(run / "s.lock", 0)
        holder = instance_holder(run / "s")
        assert holder is not None
        assert (holder.pid, holder.here) == (os.getpid(), True)


def test_the_directory_of_a_socket_is_made_private(run: Path) -> None:
    old = os.umask(0)
    try:
        ensure_socket_directory(run / "new" / "s")
    finally:
        os.umask(old)
    assert stat.S_IMODE((run / "new").stat().st_mode) == 0o700


@needs_root
def test_a_directory_under_run_can_be_entered_by_others(tmp_path: Path) -> None:
    directory = Path("/run") / tmp_path.name
    old = os.umask(0o077)
    try:
        ensure_socket_directory(directory / "s")
        assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    finally:
        os.umask(old)
        directory.rmdir()


def test_directories_are_made_or_refused_at_once(run: Path) -> None:
    (run / "file").touch()
    (run / "nowhere").symlink_to(run / "missing")
    for path, complaint in (
        (run / "missing" / "x", "its parent .* does not exist"),
        (run / "file", "is not a directory"),
        (run / "file" / "x", "Not a directory"),
        (run / "nowhere", "a link to nothing"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            ensure_directory(path, "pool directory")
    ensure_directory(run / "ü x", "pool directory")
    assert stat.S_IMODE((run / "ü x").stat().st_mode) == 0o700


@needs_root
def test_a_directory_that_a_stranger_rules_is_refused(run: Path) -> None:
    ensure_directory(Path("/tmp"), "pool directory")
    os.chown(run, NOBODY, NOBODY)
    with pytest.raises(NotPermitted, match="belongs to uid 65534"):
        ensure_directory(run, "pool directory")
    os.chown(run, 0, 0)
    run.chmod(0o777)
    with pytest.raises(NotPermitted, match="writable by everybody"):
        ensure_directory(run, "pool directory")
    run.chmod(0o1777)
    ensure_directory(run, "pool directory")


@needs_root
def test_a_read_only_directory_is_refused(tmpfs: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="read-only"):
        ensure_directory(tmpfs("1m,ro"), "pool directory")


@needs_root
def test_a_client_trusts_a_stranger_only_where_he_was_put(run: Path) -> None:
    stranger = PeerProcess(1, NOBODY)
    require_trusted(run / "s", PeerProcess(1, os.geteuid()))
    with pytest.raises(NotPermitted, match="uid 65534"):
        require_trusted(Path("/tmp/s"), stranger)
    os.chown(run, NOBODY, NOBODY)
    with pytest.raises(NotPermitted, match="uid 65534"):
        require_trusted(run / "s", stranger)
    (run / "service").mkdir()
    os.chown(run, 0, 0)
    os.chown(run / "service", NOBODY, NOBODY)
    require_trusted(run / "service" / "s", stranger)
