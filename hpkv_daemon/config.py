"""Settings as the daemon reads them, and whether this machine can do what they ask."""

from __future__ import annotations

import grp
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpkv_client.address import read_key
from hpkv_client.errors import ConfigError, NotPermitted
from hpkv_client.settings import Settings, check_environment, config_path, load, read_file
from hpkv_client.values import format_size, ram_bytes
from hpkv_daemon.core.quotas import reserved_bytes
from hpkv_daemon.directories import ensure_directory
from hpkv_daemon.locks import ensure_socket_directory
from hpkv_daemon.pool.file import FILE_NAME, INDEX_NAME, available_bytes, no_room
from hpkv_daemon.tiers.remote.opening import require_packages
from hpkv_daemon.tiers.remote.sealing import Seal, read_secret

MIN_POOL_BYTES = 1 << 20
_MEMORY_FILE_SYSTEMS = ("tmpfs", "hugetlbfs", "ramfs")


def load_settings(
    environ: Mapping[str, str], flags: Mapping[str, object] | None = None
) -> tuple[Settings, dict[str, str]]:
    """Settings and their origins from flags, environment, file and defaults.

    Raises ``ConfigError`` for a malformed value, an unknown name, or a file that was named and is missing.
    """
    check_environment(environ)
    path, named = config_path(environ, flags)
    return load(environ, flags, read_file(path, named), path)


def reread(running: Settings, flags: Mapping[str, object]) -> tuple[Settings, dict[str, str]]:
    """The settings anew, checked, for a daemon that was started with these flags. Raises like ``load_settings``."""
    settings, origins = load_settings(os.environ, flags)
    _check_quotas(replace(settings, pool_size=running.pool_size))
    return settings, origins


def summary(settings: Settings, origins: Mapping[str, str]) -> str:
    """One line that tells which configuration file was read and what overrides it."""
    there = "" if settings.config.exists() else " (not there)"
    overrides = sorted(origin for origin in origins.values() if origin.startswith(("flag", "environment")))
    return f"configuration {settings.config}{there}; overridden by: {', '.join(overrides) or 'nothing'}"


def verify(settings: Settings) -> None:
    """Check what can be checked without touching anything. Raises like ``prepare``."""
    _check_group(settings.socket_group)
    _check_size(settings.pool_size)
    _check_quotas(settings)
    if settings.key_file is not None:
        read_key(settings.key_file)


def prepare(settings: Settings) -> list[str]:
    """Check the settings against this machine and make the directories they name; warnings to pass on.

    Raises ``ConfigError`` or ``NotPermitted`` with what to do about it.
    """
    verify(settings)
    ensure_socket_directory(settings.socket)
    if settings.log_file is not None:
        ensure_directory(settings.log_file.parent, "log directory")
        _check_log_file(settings.log_file)
    ensure_directory(settings.pool_path, "pool directory")
    _check_room(settings)
    if settings.storage_path is not None:
        ensure_directory(settings.storage_path, "storage directory")
    if settings.remote is not None:
        require_packages(settings.remote)
    if settings.remote_key_file is not None:
        Seal(read_secret(settings.remote_key_file))
    return _warnings(settings)


def _check_group(name: str | None) -> None:
    if name is None:
        return
    try:
        group = grp.getgrnam(name)
    except KeyError:
        raise ConfigError(f"group {name!r} does not exist", "set HPKV_SOCKET_GROUP to another") from None
    if os.geteuid() != 0 and group.gr_gid not in (os.getegid(), *os.getgroups()):
        raise NotPermitted(f"this user is not in group {name!r}", "join the group, or set HPKV_SOCKET_GROUP to another")


def _check_log_file(path: Path) -> None:
    if path.exists() and not path.is_file() and not path.is_char_device():
        raise ConfigError(f"log file {path} is not a file", "set HPKV_LOG_FILE to another path")
    if path.exists() and not os.access(path, os.W_OK, effective_ids=True):
        raise NotPermitted(f"log file {path} is not writable", "set HPKV_LOG_FILE to another path")


def _check_size(size: int) -> None:
    if size < MIN_POOL_BYTES:
        raise ConfigError(
            f"a pool of {format_size(size)} holds no blocks",
            f"set HPKV_KV_MEM_POOL_SIZE to at least {format_size(MIN_POOL_BYTES)}",
        )
    ram = ram_bytes()
    if size > ram:
        raise ConfigError(
            f"a pool of {format_size(size)} is larger than the memory of {format_size(ram)}",
            "set HPKV_KV_MEM_POOL_SIZE to less, for instance 25%",
        )


def _check_quotas(settings: Settings) -> None:
    reserved = reserved_bytes(settings.quotas, settings.pool_size)
    if reserved > settings.pool_size:
        raise ConfigError(
            f"{format_size(reserved)} are reserved of a pool of {format_size(settings.pool_size)}",
            "set HPKV_QUOTAS to less, or HPKV_KV_MEM_POOL_SIZE to more",
        )


def _check_room(settings: Settings) -> None:
    held = sum(held_by_us(settings.pool_path / name) for name in (FILE_NAME, INDEX_NAME))
    available = available_bytes(settings.pool_path) + held
    if settings.pool_size > available:
        raise no_room(settings.pool_path, settings.pool_size, available)
    free = _free_memory_bytes() + held
    if settings.pool_size > free and file_system(settings.pool_path) == "tmpfs":
        # Allocating it all the same would have the kernel kill someone.
        needed = format_size(settings.pool_size)
        raise ConfigError(
            f"a pool of {needed} does not fit into the free memory of {format_size(free)}",
            "set HPKV_KV_MEM_POOL_SIZE to less, or end what uses the memory",
        )


def _free_memory_bytes() -> int:
    fields = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(field[1]) * 1024 for field in fields if field[0] in ("MemAvailable:", "SwapFree:"))


def held_by_us(path: Path) -> int:
    """Bytes that a file of an earlier daemon occupies: the next one takes them over."""
    try:
        info = path.lstat()
    except OSError:
        return 0
    return info.st_blocks * 512 if info.st_uid == os.geteuid() else 0


def _warnings(settings: Settings) -> list[str]:
    found = []
    kind = file_system(settings.pool_path)
    if kind not in _MEMORY_FILE_SYSTEMS:
        found.append(
            f"pool directory {settings.pool_path} is on {kind}, not tmpfs or hugetlbfs, so blocks go to its "
            "disk; set HPKV_SHARE_MEM_FILE_PATH to a directory under /dev/shm"
        )
    return found


def file_system(directory: Path) -> str:
    """The kind of file system that a directory is on: ``tmpfs``, ``ext4`` and so on."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == number:
            return right.split()[0]
    return "an unknown file system"
