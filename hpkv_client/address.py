"""Where a daemon is: a socket on this node, or a port of another node, which only holders of the cluster's key use."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from hpkv_client.errors import ConfigError, NotPermitted

KEY_CHARACTERS = 40
"""A CURVE key in Z85 text: 32 bytes."""


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """One CURVE key pair for all daemons and engines of a cluster, as Z85 text. Whoever has it may ask any daemon."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A daemon of another node. ``place`` is ``HOST:PORT``."""

    place: str
    key: ClusterKey

    def __str__(self) -> str:
        return f"tcp://{self.place}"


Address = Path | NodeAddress


def read_key(path: Path) -> ClusterKey:
    """The key in a file that ``hpkvd keygen`` made.

    Raises ``NotPermitted`` when it cannot be read or everyone can, ``ConfigError`` when it is not there or no key.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(4096).strip()
    except FileNotFoundError:
        raise ConfigError(
            f"key file {path} does not exist", f"make one with 'hpkvd keygen {path}' and copy it to every node"
        ) from None
    except OSError as problem:
        raise NotPermitted(f"cannot read key file {path}: {problem.strerror}", "check its owner and mode") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise NotPermitted(f"everyone may read key file {path}", f"run 'chmod o-rw {path}'")
    if len(text) != KEY_CHARACTERS:
        raise ConfigError(f"{path} is not a key file", "make one with 'hpkvd keygen'")
    try:
        return ClusterKey(zmq.curve_public(text), text)
    except (ValueError, zmq.ZMQError):
        raise ConfigError(f"{path} is not a key file", "make one with 'hpkvd keygen'") from None


def write_new_key(path: Path) -> ClusterKey:
    """Make a key and write it to a new file of mode 0600. Raises ``ConfigError`` if something is there already."""
    public, secret = zmq.curve_keypair()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} exists", "remove it first if no node needs it any more") from None
    except OSError as problem:
        raise ConfigError(f"cannot write {path}: {problem.strerror}", "choose a writable directory") from None
    with open(fd, "wb") as file:
        file.write(secret + b"\n")
    return ClusterKey(public, secret)
