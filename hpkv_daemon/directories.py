"""Directories of the daemon's files: made private, and refused when a stranger could swap what is in them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpkv_client.errors import ConfigError, NotPermitted


def ensure_directory(path: Path, purpose: str, mode: int = 0o700) -> None:
    """Create ``path`` with ``mode`` if it is missing, and check that this process alone rules over it.

    ``purpose`` names it in errors. Raises ``ConfigError`` (missing parent, not a directory, read-only) or
    ``NotPermitted`` (unwritable, or writable or owned by others).
    """
    try:
        info = path.stat()
    except FileNotFoundError:
        _create(path, purpose, mode)
        info = path.stat()
    except PermissionError:
        raise NotPermitted(f"no access to {purpose} {path}", "choose another, or run as its owner") from None
    except OSError as problem:
        raise ConfigError(f"{purpose} {path}: {problem.strerror}", "choose another path") from None
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"{purpose} {path} is not a directory", "move the file away, or choose another path")
    _check_owner(path, info, purpose)
    _check_writable(path, purpose)


@contextmanager
def acting_as_owner(directory: Path) -> Iterator[None]:
    """For root, who may do anything: do with a service's files what its user could do, and nothing more.

    Others act as themselves, and root does where the directory is missing. Not for processes with threads.
    """
    owner = directory.stat().st_uid if os.geteuid() == 0 and directory.exists() else os.geteuid()
    ours = os.geteuid()
    os.seteuid(owner)
    try:
        yield
    finally:
        os.seteuid(ours)


def _create(path: Path, purpose: str, mode: int) -> None:
    if path.is_symlink():
        raise ConfigError(f"{purpose} {path} is a link to nothing", "remove the link")
    if not path.parent.exists():
        raise ConfigError(f"{purpose} {path}: its parent {path.parent} does not exist", f"run 'mkdir -p {path.parent}'")
    try:
        path.mkdir(mode)
        path.chmod(mode)
    except FileExistsError:
        # Another process of ours was quicker; the checks that follow look at what it made.
        return
    except PermissionError:
        raise NotPermitted(
            f"cannot create {purpose} {path}", f"create it, or let uid {os.geteuid()} write to {path.parent}"
        ) from None
    except OSError as problem:
        raise ConfigError(f"cannot create {purpose} {path}: {problem.strerror}", "choose another path") from None


def _check_owner(path: Path, info: os.stat_result, purpose: str) -> None:
    if info.st_uid not in (0, os.geteuid()):
        raise NotPermitted(
            f"{purpose} {path} belongs to uid {info.st_uid}, who could replace the files in it",
            f"choose another path, or 'chown {os.geteuid()} {path}'",
        )
    if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        raise NotPermitted(
            f"{purpose} {path} is writable by everybody, who could replace the files in it",
            f"run 'chmod o-w {path}'",
        )


def _check_writable(path: Path, purpose: str) -> None:
    if os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        return
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise ConfigError(f"{purpose} {path} is on a read-only file system", "choose another path")
    raise NotPermitted(f"{purpose} {path} is not writable", f"let uid {os.geteuid()} write to it")
