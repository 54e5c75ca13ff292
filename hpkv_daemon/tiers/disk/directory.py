"""The directory of a disk tier: one daemon at a time, an identity of its own, and how much of the disk it may take."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from pathlib import Path

from hpkv_client.errors import Busy, ConfigError, NotPermitted
from hpkv_client.values import format_size
from hpkv_daemon.directories import ensure_directory
from hpkv_daemon.locks import FileLock, claim
from hpkv_daemon.tiers.disk.format import IDENTITY_BYTES, VERSION
from hpkv_daemon.tiers.disk.index import MIN_SEGMENTS

IDENTITY_NAME = "hpkv-storage"
LOCK_NAME = "hpkv-storage.lock"
FREE_SHARE = 0.8
"""Of what is free, and of what is ours already, if no size is given."""
MIN_SEGMENT_BYTES = 16 << 20
MAX_SEGMENT_BYTES = 4 << 30
_SEGMENTS = 64
_LEAVE_SECONDS = 5.0


class StorageDirectory:
    """A directory that is ours until ``close``.

    ``fileno`` is to be inherited by the disk process: the directory stays locked until that is gone, too, so a later
    daemon never writes beside an orphan.
    """

    def __init__(self, path: Path, identity: bytes, fd: int, lock: FileLock) -> None:
        self.path = path
        self.identity = identity
        """16 random bytes that every header in its files repeats."""
        self._fd = fd
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> StorageDirectory:
        """Claim a directory, made if it is missing. Files of others in it are left alone.

        Raises ``Busy`` (another daemon has it), ``ConfigError`` or ``NotPermitted``.
        """
        ensure_directory(path, "storage directory")
        lock = FileLock.acquire(path / LOCK_NAME, f"storage {path}")
        fd = -1
        try:
            lock.write({"pool": str(path)})
            fd = _open_identity(path)
            _wait_for_orphan(fd, path)
            return cls(path, _identity(fd, path), fd, lock)
        except OSError as problem:
            if fd >= 0:
                os.close(fd)
            lock.release()
            raise ConfigError(f"storage directory {path}: {problem.strerror}", "choose another path") from None
        except BaseException:
            if fd >= 0:
                os.close(fd)
            lock.release()
            raise

    def fileno(self) -> int:
        """See the class."""
        return self._fd

    def own_bytes(self) -> int:
        """What the segment files here take already."""
        total = 0
        for file in self.path.glob("segment-*.hpkv"):
            with contextlib.suppress(OSError):
                total += file.lstat().st_blocks * 512
        return total

    def budget(self, wanted: int | None) -> int:
        """Bytes that may be taken: ``wanted``, or a share of what is free.

        Raises ``ConfigError`` when that much is not free, or too little for the smallest tier.
        """
        usage = os.statvfs(self.path)
        free = usage.f_frsize * (usage.f_bfree if os.geteuid() == 0 else usage.f_bavail) + self.own_bytes()
        budget = int(free * FREE_SHARE) if wanted is None else wanted
        least = MIN_SEGMENTS * MIN_SEGMENT_BYTES
        if budget < least:
            raise ConfigError(
                f"storage of {format_size(budget)} in {self.path} is less than {format_size(least)}",
                "choose another path" if wanted is None else "set HPKV_STORAGE_SIZE to more",
            )
        if budget > free:
            raise ConfigError(
                f"storage of {format_size(budget)} does not fit into {self.path}: {format_size(free)} available",
                "set HPKV_STORAGE_SIZE to less, or leave it out for 80 % of what is free",
            )
        return budget

    def close(self) -> None:
        """Give it up. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._lock.release()


def segment_bytes(budget: int) -> int:
    """Size of the segments for a budget: a power of two, about a 64th of it."""
    wanted = 1 << max(0, (budget // _SEGMENTS).bit_length() - 1)
    return min(MAX_SEGMENT_BYTES, max(MIN_SEGMENT_BYTES, wanted))


def _open_identity(path: Path) -> int:
    try:
        return os.open(path / IDENTITY_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except PermissionError:
        raise NotPermitted(f"no access to {path / IDENTITY_NAME}", "choose another directory") from None
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.EISDIR):
            raise ConfigError(f"{path / IDENTITY_NAME} is not a file", "remove it") from None
        raise


def _wait_for_orphan(fd: int, path: Path) -> None:
    """The disk process of a killed daemon ends within a moment, unless its disk does not answer."""
    if not claim(fd, _LEAVE_SECONDS):
        raise Busy(
            f"storage {path} is still used by the disk process of an earlier hpkvd",
            f"end it ('fuser -k {path / IDENTITY_NAME}'), or choose another directory",
        )


def _identity(fd: int, path: Path) -> bytes:
    """The identity that the file holds, or a new one if it is empty: it never got to hold one."""
    text = os.pread(fd, 4096, 0)
    if text.strip(b"\0 \n"):
        try:
            record = json.loads(text)
            identity = bytes.fromhex(record["identity"])
            version = record["version"]
        except (ValueError, KeyError, TypeError):
            identity, version = b"", 0
        if len(identity) != IDENTITY_BYTES:
            raise ConfigError(f"{path / IDENTITY_NAME} is damaged", "remove it and the segment files beside it")
        if version != VERSION:
            raise ConfigError(
                f"{path} holds blocks in format {version}, not {VERSION}", "choose another directory, or empty it"
            )
        return identity
    identity = secrets.token_bytes(IDENTITY_BYTES)
    os.pwrite(fd, json.dumps({"version": VERSION, "identity": identity.hex()}).encode() + b"\n", 0)
    os.fsync(fd)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return identity
