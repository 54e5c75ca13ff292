"""Who runs where: advisory locks on files that also tell who holds them, and the claim on a socket path."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hpkv_client.errors import Busy, ConfigError, NotPermitted
from hpkv_client.launch import listener
from hpkv_daemon.directories import ensure_directory

_CLAIM_RETRY_SECONDS = 0.01
_SETTLE_SECONDS = 0.25
"""A lock counts as held only after this long: readers test it by taking it for an instant."""

_RETRY_SECONDS = 0.01

_RECORD_BYTES = 1024


@dataclass(frozen=True)
class Holder:
    """What the holder of a lock wrote about itself. ``pid`` is None if it did not get to write."""

    pid: int | None
    started: float
    """Seconds since the Unix epoch."""
    socket: str
    pool: str
    here: bool
    """The pid counts in our PID namespace. If not, it may be that of an innocent process."""
    uid: int
    """Owner of the lock file, as whom the holder runs."""
    ready: bool
    """It serves; false while it starts."""


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _holder(fd: int) -> Holder:
    try:
        record = json.loads(os.pread(fd, 16 * _RECORD_BYTES, 0))
    except ValueError:
        record = {}
    uid = os.fstat(fd).st_uid
    if not isinstance(record, dict) or not isinstance(record.get("pid"), int):
        return Holder(_locking_pid(fd), 0.0, "", "", True, uid, False)
    return Holder(
        pid=record["pid"],
        started=float(record.get("started", 0.0)),
        socket=str(record.get("socket", "")),
        pool=str(record.get("pool", "")),
        here=record.get("pid_namespace") == _pid_namespace(),
        uid=uid,
        ready=record.get("ready") is True,
    )


def _locking_pid(fd: int) -> int | None:
    """The kernel's word on who holds the lock; None if he is in another PID namespace, or not there."""
    info = os.fstat(fd)
    file = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, access, pid, where, *_ = line.split()
            if (kind, access, where) == ("FLOCK", "WRITE", file):
                return int(pid)
    return None


def _open(path: Path, flags: int) -> int:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except PermissionError:
        raise NotPermitted(f"no access to lock file {path}", "run as its owner") from None
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise ConfigError(f"lock file {path} is not a regular file", "remove it") from None
        raise
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise ConfigError(f"lock file {path} is not a regular file", "remove it")
    if info.st_uid not in (0, os.geteuid()) and not _is_services(path, info.st_uid):
        os.close(fd)
        raise NotPermitted(f"lock file {path} belongs to uid {info.st_uid}", "act as that user")
    return fd


def _is_services(path: Path, uid: int) -> bool:
    """Whether root looks at the lock of a service in the directory that only root can have given to its user."""
    directory, above = path.parent.stat(), path.parent.parent.stat()
    return (
        os.geteuid() == 0
        and directory.st_uid == uid
        and not directory.st_mode & stat.S_IWOTH
        and above.st_uid == 0
        and not above.st_mode & stat.S_IWOTH
    )


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is still the one at the path: its last holder may have removed it."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


class FileLock:
    """An exclusive lock on a file of its own, until ``release``, which removes the file, or the end."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def acquire(cls, path: Path, what: str) -> FileLock:
        """Take the lock. Raises ``Busy`` that says who holds ``what``."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            fd = _open(path, os.O_RDWR | os.O_CREAT)
            try:
                if _try_lock(fd) and _is_at(fd, path):
                    os.ftruncate(fd, 0)
                    return cls(path, fd)
                holder = _holder(fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if time.monotonic() > deadline:
                raise Busy(f"{what} is in use by {_name(holder)}", "stop it, or use another one")
            time.sleep(_RETRY_SECONDS)

    def write(self, record: dict[str, Any]) -> None:
        """Say who holds the lock, for others to read."""
        started = time.time()  # noqa: TID251  (with the pid it names this process; nobody computes with it)
        whole = {"pid": os.getpid(), "pid_namespace": _pid_namespace(), "started": started} | record
        # One write over the old text, blanks included: a reader never sees half of each. On hugetlbfs, where
        # files cannot be written, readers have to do with the kernel's table of locks.
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, json.dumps(whole).encode().ljust(_RECORD_BYTES), 0)

    def release(self) -> None:
        """Remove the file and free the lock. May be called again."""
        if self._fd >= 0:
            if _is_at(self._fd, self.path):
                self.path.unlink()
            os.close(self._fd)
            self._fd = -1


def _name(holder: Holder) -> str:
    if holder.pid is None:
        return "a process that has not said its pid yet"
    return f"hpkvd, pid {holder.pid}{'' if holder.here else ' of another PID namespace'}"


def read_holder(lock_path: Path) -> Holder | None:
    """Who holds the lock, or None. Raises ``NotPermitted`` if the file belongs to someone else."""
    try:
        fd = _open(lock_path, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        # An instant of holding it ourselves is the test; FileLock.acquire outwaits that.
        return None if _try_lock(fd) else _holder(fd)
    finally:
        os.close(fd)


def lock_path_of(socket_path: Path) -> Path:
    """The lock that the daemon on this socket holds as long as it lives."""
    return socket_path.with_name(socket_path.name + ".lock")


def instance_holder(socket_path: Path) -> Holder | None:
    """The daemon that owns the socket path, starting and frozen ones included; None if there is none."""
    return read_holder(lock_path_of(socket_path))


def ensure_socket_directory(socket_path: Path) -> None:
    """Make the directory of the socket, or check the one that is there. Raises like ``ensure_directory``."""
    mode = 0o755 if socket_path.parent.parent == Path("/run") else 0o700
    ensure_directory(socket_path.parent, "socket directory", mode)


class InstanceLock:
    """The claim of one daemon on a socket path, as a context manager. The server binds the socket itself.

    ``passed``: the socket is a service manager's, who made it and keeps it; it is left alone.
    """

    def __init__(self, socket_path: Path, passed: bool = False) -> None:
        self.socket_path = socket_path
        self._passed = passed
        self._lock: FileLock | None = None

    def acquire(self) -> None:
        """Claim the path and clear a dead daemon's socket away.

        Raises ``Busy`` (another daemon or program serves it; it is left in peace), ``ConfigError`` (something
        that is not a socket lies there; it is left as it is) or ``NotPermitted``.
        """
        ensure_socket_directory(self.socket_path)
        lock = FileLock.acquire(lock_path_of(self.socket_path), f"socket {self.socket_path}")
        try:
            lock.write({"socket": str(self.socket_path), "pool": ""})
            if not self._passed:
                _clear_stale_socket(self.socket_path)
        except BaseException:
            lock.release()
            raise
        self._lock = lock

    def describe(self, pool_path: Path, ready: bool = False) -> None:
        """Add the pool to what the lock file tells, and that the daemon is ready once it is."""
        assert self._lock is not None
        self._lock.write({"socket": str(self.socket_path), "pool": str(pool_path), "ready": ready})

    def release(self) -> None:
        """Give the path up: lock file and our own socket are removed."""
        if self._lock is not None:
            if not self._passed and _is_socket(self.socket_path):
                self.socket_path.unlink()
            self._lock.release()
            self._lock = None

    def __enter__(self) -> InstanceLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _clear_stale_socket(path: Path) -> None:
    if not os.path.lexists(path):
        return
    if not _is_socket(path):
        raise ConfigError(
            f"{path} is in the way and is not a socket", "move it away, or set HPKV_SOCKET to another path"
        )
    serving = listener(path)
    if serving is not None:
        raise Busy(
            f"socket {path} is in use by another program{f', pid {serving.pid}' if serving.pid else ''}",
            "stop it, or set HPKV_SOCKET to another path",
        )
    path.unlink()


def claim(fd: int, seconds: float) -> bool:
    """Take the lock of an open file that others may hold by inheritance; whether they let go within so many seconds.

    Waits: not for the control loop. The lock ends with the last copy of the descriptor.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_CLAIM_RETRY_SECONDS)
        else:
            return True
