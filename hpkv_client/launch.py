"""Find the daemon on a socket, or start one that outlives the process which asked for it."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hpkv_client.errors import BY_CODE, Busy, ConfigError, HpkvError, NotPermitted, Unreachable
from hpkv_client.peer import PeerProcess, peer_of
from hpkv_client.settings import Settings

_PROBE_SECONDS = 1.0

_ENGINE_ONLY = (
    "VLLM_",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP",
    "KMP_",
    "GOMP_",
    "MKL_",
    "LD_PRELOAD",
    "GLIBC_TUNABLES",
    "MALLOC_",
)
"""Prefixes of variables that tune an engine and would hurt a daemon that serves all of them."""


def _is_something_else(path: Path) -> bool:
    """Whether what lies there, if anything does, is no socket: asked once, since it may come and go."""
    try:
        return not stat.S_ISSOCK(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def listener(socket_path: Path) -> PeerProcess | None:
    """Who accepts connections on the socket, or None if the path is missing or its process is gone.

    Raises ``NotPermitted`` (no access), ``Busy`` (so many connections wait that none is accepted) or
    ``ConfigError`` (not a stream socket).
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(os.fspath(socket_path))
            return peer_of(probe)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ConnectionRefusedError:
            # A daemon that starts just now may be replacing the file.
            if not _is_something_else(socket_path):
                return None
            raise ConfigError(f"{socket_path} is not a socket", "set HPKV_SOCKET to another path") from None
        except PermissionError:
            raise NotPermitted(
                f"no access to {socket_path}", "join the group of the socket, or run as its owner"
            ) from None
        except (TimeoutError, BlockingIOError):
            raise Busy(f"socket {socket_path} accepts no more connections", "see 'hpkvd status'") from None
        except OSError as problem:
            if problem.errno == errno.EPROTOTYPE:
                raise ConfigError(
                    f"{socket_path} is another kind of socket", "set HPKV_SOCKET to another path"
                ) from None
            raise


def require_trusted(socket_path: Path, serving: PeerProcess) -> None:
    """Raise ``NotPermitted`` if a stranger could have put his own socket at the path.

    Trusted are root, this user, and whoever owns the socket's directory if only root or this user could have
    given it to him.
    """
    ours = (0, os.geteuid())
    if serving.uid in ours:
        return
    directory, above = socket_path.parent.stat(), socket_path.parent.parent.stat()
    given_to_him = (
        directory.st_uid in (*ours, serving.uid)
        and not directory.st_mode & stat.S_IWOTH
        and above.st_uid in ours
        and not above.st_mode & stat.S_IWOTH
    )
    if not given_to_him:
        raise NotPermitted(
            f"socket {socket_path} is served by uid {serving.uid}, who may not be the hpkvd you expect",
            "put the socket into a directory that only root or you can write to",
        )


def daemon_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what tunes an engine."""
    return {name: value for name, value in environ.items() if not name.startswith(_ENGINE_ONLY)}


def ensure_daemon(settings: Settings, timeout: float) -> None:
    """Return when a daemon answers on ``settings.socket``; start one from the environment if none is there.

    Many processes may call this at once: one daemon comes of it, in a session of its own. Raises what the
    daemon said when it could not start, or ``Unreachable`` after ``timeout`` seconds; a daemon that is still
    allocating its pool then goes on with it.
    """
    serving = listener(settings.socket)
    if serving is not None:
        require_trusted(settings.socket, serving)
        return
    # -P: a file named like one of our modules in the engine's working directory must not be imported.
    command = [
        sys.executable,
        "-P",
        "-m",
        "hpkv_daemon",
        "start",
        "--if-needed",
        "--timeout",
        f"{timeout:.3f}",
    ]
    environment = daemon_environment(os.environ) | {"HPKV_SOCKET": str(settings.socket)}
    with tempfile.TemporaryFile() as said:
        starter = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            status = starter.wait(timeout + 1.0)
        except subprocess.TimeoutExpired:
            raise Unreachable(
                f"hpkvd on {settings.socket} was not ready after {timeout:g} s",
                "see its log beside the socket",
            ) from None
        if status:
            said.seek(0)
            raise _failure(status, said.read().decode(errors="replace"))


def _failure(status: int, said: str) -> HpkvError:
    """The error that ``hpkvd start`` ended with, from its exit status and the last line it wrote."""
    kinds = {kind.exit_code: kind for kind in BY_CODE.values() if kind.exit_code != HpkvError.exit_code}
    lines = said.strip().splitlines() or [f"hpkvd start ended with status {status}"]
    return kinds.get(status, HpkvError)(lines[-1].removeprefix("hpkvd: "))
