"""The pool file: private, owned by one daemon at a time, allocated to the last page before anyone maps it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from hpkv_client.errors import Busy, ConfigError, NotPermitted
from hpkv_client.values import MAX_SIZE, format_size
from hpkv_daemon.directories import ensure_directory
from hpkv_daemon.locks import FileLock, claim

FILE_NAME = "pool"
INDEX_NAME = "index"
"""Written by ``PoolLedger``. It is removed before its pool changes, and made after it."""
STEP_BYTES = 256 << 20
"""Allocated at a time: progress is seen and a stop signal heard in between."""

_MOVERS_LEAVE_SECONDS = 10.0

Progress = Callable[[int, int], None]
"""Called with (bytes allocated, bytes in all)."""


class Pool:
    """An allocated pool file. Owns the file and its lock; ``close`` it.

    ``cold``: why the bytes in it are nobody's; empty if they may be those of an earlier daemon.

    The lock of the file itself is inherited with ``fileno``: it lasts as long as any mover has the pool
    mapped, so a later daemon never reuses a file that an orphaned mover may still write to.
    """

    def __init__(self, path: Path, size: int, cold: str, fd: int, lock: FileLock) -> None:
        self.path = path
        self.size = size
        self.cold = cold
        self._fd = fd
        self._lock = lock

    @classmethod
    def open(cls, directory: Path, size: int, progress: Progress) -> Pool:
        """Make the pool in ``directory``, or take over the one that an earlier daemon left there.

        ``size`` in bytes, rounded down to whole pages. Raises ``Busy`` (another daemon has it),
        ``ConfigError`` (does not fit, or something else has its name) or ``NotPermitted``; then nothing is
        left behind but what an earlier daemon can be continued with.
        """
        ensure_directory(directory, "pool directory")
        size = _whole_pages(directory, size)
        lock = FileLock.acquire(directory / f"{FILE_NAME}.lock", f"pool {directory}")
        path = directory / FILE_NAME
        fd, cold = -1, ""
        try:
            lock.write({"pool": str(path)})
            fd = open_private(path, "pool file")
            cold = "" if os.fstat(fd).st_size else "there was none"
            _wait_for_movers(fd, path)
            cold = _fit(fd, path, size)
            _allocate(fd, path, size, progress)
        except BaseException as problem:
            if fd >= 0:
                if cold and not isinstance(problem, Busy):
                    path.unlink(missing_ok=True)
                os.close(fd)
            lock.release()
            raise
        return cls(path, size, cold, fd, lock)

    def fileno(self) -> int:
        """The descriptor for movers to map and inherit; it stays owned by the pool."""
        return self._fd

    @property
    def identity(self) -> int:
        """Number of the file: another one means other bytes."""
        return os.fstat(self._fd).st_ino

    def close(self, unlink: bool) -> None:
        """Let the pool go; with ``unlink`` its memory is freed once no mover maps it. May be called again."""
        if self._fd < 0:
            return
        if unlink:
            _remove(self.path)
        os.close(self._fd)
        self._fd = -1
        self._lock.release()


def discard(directory: Path) -> int:
    """Remove the pool and the index that a daemon left in ``directory``; the bytes that this frees.

    0: there is nothing. Raises ``Busy`` while a process has the pool, ``NotPermitted`` or ``ConfigError`` as
    ``Pool.open`` does.
    """
    path = directory / FILE_NAME
    if not path.exists() and not path.with_name(INDEX_NAME).exists():
        return 0
    ensure_directory(directory, "pool directory")
    lock = FileLock.acquire(directory / f"{FILE_NAME}.lock", f"pool {directory}")
    try:
        # Opening makes what is missing, so that both are looked at alike; it goes at once.
        found = [open_private(path, "pool file")]
        try:
            _wait_for_movers(found[0], path)
            found.append(open_private(path.with_name(INDEX_NAME), "index"))
            freed = sum(os.fstat(fd).st_blocks * 512 for fd in found)
            _remove(path)
        finally:
            for fd in found:
                os.close(fd)
    finally:
        lock.release()
    return freed


def _remove(path: Path) -> None:
    """In this order: an index is never alone with another pool."""
    _remove_index(path.with_name(INDEX_NAME))
    path.unlink(missing_ok=True)


def _remove_index(index: Path) -> None:
    try:
        index.unlink(missing_ok=True)
    except OSError as problem:
        raise ConfigError(f"index {index}: {problem.strerror}", "remove it, or choose another directory") from None


def open_private(path: Path, purpose: str) -> int:
    """Open a file of the daemon's own, made if it is missing, for reading and writing by nobody else.

    ``purpose`` names it in errors. Raises ``ConfigError`` (not a plain file) or ``NotPermitted`` (another user's).
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
    except PermissionError:
        raise NotPermitted(f"no access to {purpose} {path}", "choose another directory") from None
    except OSError as problem:
        reason = "is a link" if problem.errno == errno.ELOOP else problem.strerror
        raise ConfigError(f"{purpose} {path}: {reason}", "remove it, or choose another directory") from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
        os.close(fd)
        raise ConfigError(f"{purpose} {path} is not a plain file of its own", "remove it, or choose another directory")
    if info.st_uid != os.geteuid():
        os.close(fd)
        raise NotPermitted(f"{purpose} {path} belongs to uid {info.st_uid}", "choose another directory")
    os.fchmod(fd, 0o600)
    return fd


def _fit(fd: int, path: Path, size: int) -> str:
    """Why the pool has to be begun anew, with its index out of the way; empty if it has exactly this size."""
    found, index = os.fstat(fd).st_size, path.with_name(INDEX_NAME)
    if found == size and index.exists():
        return ""
    if found == 0:
        reason = "the index there has no pool" if index.exists() else "there was none"
    elif found != size:
        reason = f"the pool there has {found} bytes, not {size}"
    else:
        reason = "the pool there has no index"
    _remove_index(index)
    return reason


def _whole_pages(directory: Path, size: int) -> int:
    page = os.statvfs(directory).f_bsize
    if size < page:
        raise ConfigError(
            f"a pool of {format_size(size)} is less than one page of {format_size(page)}",
            "set HPKV_KV_MEM_POOL_SIZE to more",
        )
    return size - size % page


def _wait_for_movers(fd: int, path: Path) -> None:
    """Movers of a killed daemon end by themselves within a moment; until then they may write to the file."""
    if not claim(fd, _MOVERS_LEAVE_SECONDS):
        raise Busy(
            f"pool {path} is still mapped by a mover of an earlier hpkvd",
            f"end it ('fuser -k {path}'), or choose another directory",
        )


def _allocate(fd: int, path: Path, size: int, progress: Progress) -> None:
    try:
        os.ftruncate(fd, size)
        if os.fstat(fd).st_blocks * 512 >= size:
            # All of it is there already; to ask for every page again takes time that grows with the pool.
            progress(size, size)
            return
        for start in range(0, size, STEP_BYTES):
            progress(start, size)
            os.posix_fallocate(fd, start, min(STEP_BYTES, size - start))
        progress(size, size)
    except OSError as problem:
        available = os.fstat(fd).st_blocks * 512 + available_bytes(path.parent)
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise no_room(path.parent, size, available) from None
        raise ConfigError(f"cannot allocate pool {path}: {problem.strerror}", "choose another directory") from None


def available_bytes(directory: Path) -> int:
    """Bytes that can still be allocated in the file system of ``directory``."""
    usage = os.statvfs(directory)
    if usage.f_blocks:
        return usage.f_frsize * (usage.f_bfree if os.geteuid() == 0 else usage.f_bavail)
    # Mounted without a limit: hugetlbfs ends with the machine's reserved pages, tmpfs with its memory.
    reserve = _huge_page_reserve(usage.f_bsize) / "free_hugepages"
    return int(reserve.read_text()) * usage.f_bsize if reserve.exists() else MAX_SIZE


def _huge_page_reserve(page_bytes: int) -> Path:
    return Path(f"/sys/kernel/mm/hugepages/hugepages-{page_bytes >> 10}kB")


def no_room(directory: Path, needed: int, available: int) -> ConfigError:
    """The error for a pool that the file system cannot hold; sizes in bytes."""
    reserve = _huge_page_reserve(os.statvfs(directory).f_bsize)
    if reserve.exists():
        larger = f"write a larger number to {reserve}/nr_hugepages"
    else:
        larger = f"enlarge the file system ('mount -o remount,size={needed} {directory}' if it is a tmpfs)"
    return ConfigError(
        f"a pool of {format_size(needed)} does not fit into {directory}: {format_size(available)} available",
        f"set HPKV_KV_MEM_POOL_SIZE to less, or {larger}",
    )
