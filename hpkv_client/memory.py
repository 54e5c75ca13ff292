"""Sealed shared memory that a mover can map: made by the owner, opened by pid and descriptor.

The name of a memfd is its proof: it holds 128 random bits that only a process of the same user can read, so a
peer cannot point the daemon at somebody else's descriptor. Seals forbid shrinking: no SIGBUS in the mover.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets

from hpkv_client.errors import LayoutRefused
from hpkv_client.types import MemoryHandle

_PREFIX = "hpkv-"
_PIDFD_GETFD = 438
"""asm/unistd.h, the same for every architecture."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedMemory:
    """``size`` zeroed bytes that this process owns and a mover may map; pages are taken on first touch."""

    def __init__(self, size: int) -> None:
        name = _PREFIX + secrets.token_hex(16)
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, size)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self.mapping = mmap.mmap(self._fd, size)
        self.handle = MemoryHandle("memfd", size, os.getpid(), self._fd, name)

    def close(self) -> None:
        """Free the memory, or leave that to the last view of ``mapping`` if there are any. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(BufferError):
            self.mapping.close()


def map_shared(handle: MemoryHandle) -> mmap.mmap:
    """Map a peer's memory, read and write. Raises ``LayoutRefused`` when the handle is not what it claims."""
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    expected = f"/memfd:{handle.name} (deleted)"
    try:
        if not handle.name.startswith(_PREFIX):
            raise LayoutRefused(f"{path} is not the memory {handle.name!r} of the peer")
        fd = _open(handle, path, expected)
    except OSError as problem:
        raise LayoutRefused(
            f"cannot open {path}: {problem.strerror}",
            "run hpkvd in the engine's PID namespace, as the engine's user, with CAP_SYS_PTRACE, or as root",
        ) from None
    try:
        if os.readlink(f"/proc/self/fd/{fd}") != expected:
            raise LayoutRefused(f"{path} is not the memory {handle.name!r} of the peer, or changed while it was opened")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size < handle.size:
            raise LayoutRefused(f"the memory {handle.name!r} is not sealed or smaller than {handle.size} bytes")
        return mmap.mmap(fd, handle.size)
    finally:
        os.close(fd)


def _open(handle: MemoryHandle, path: str, expected: str) -> int:
    try:
        if os.readlink(path) != expected:
            raise LayoutRefused(f"{path} is not the memory {handle.name!r} of the peer")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        # The directory is closed to other users, whatever else they may do; CAP_SYS_PTRACE opens this way instead.
        return _take(handle)


def _take(handle: MemoryHandle) -> int:
    """A copy of a peer's descriptor, by pidfd_getfd(2)."""
    pidfd = os.pidfd_open(handle.pid)
    try:
        fd = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, handle.fd, 0))
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return fd
    finally:
        os.close(pidfd)
