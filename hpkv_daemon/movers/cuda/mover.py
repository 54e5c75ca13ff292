"""The daemon's side of the mover of one GPU."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from pathlib import Path

from hpkv_client import descriptors
from hpkv_client.errors import NoSuchDevice
from hpkv_daemon.movers.parent import ProcessMover

log = logging.getLogger(__name__)

PREFIX = "cuda:"
"""Of the names of GPUs."""

_NAME = re.compile(r"cuda:((?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")


def uuid_of(device: str) -> str:
    """The UUID in ``cuda:GPU-...`` or ``cuda:MIG-...``.

    Raises ``NoSuchDevice`` for a number: each process counts on its own.
    """
    found = _NAME.fullmatch(device)
    if found is None:
        raise NoSuchDevice(
            f"device {device[:64]!r} names no GPU by its UUID", "register as cuda:GPU-..., as nvidia-smi -L writes it"
        )
    return found[1]


PROCESS = "hpkv_daemon.movers.cuda.process"


class CudaMover(ProcessMover):
    """A ``Mover`` for one GPU, which its process alone sees.

    Ranks hand it descriptors at a socket beside ``socket_path``, the daemon's, which those may use who may use that.
    """

    def __init__(
        self, device: str, pool_fd: int, pool_bytes: int, faults: str = "", socket_path: Path | None = None
    ) -> None:
        name = uuid_of(device)
        # Whatever an engine calls it, this process sees no other device; a MIG part can be had no other way.
        environment = {"CUDA_VISIBLE_DEVICES": name, "CUDA_MODULE_LOADING": "LAZY"}
        self._path = socket_path.with_name(f"{socket_path.name}.{name}") if socket_path else None
        listener = _listen(self._path, socket_path) if self._path and socket_path else None
        # From here on the process alone listens: when it is gone, whoever connects is told at once.
        with listener or contextlib.nullcontext():
            ours = [listener.fileno()] if listener else []
            first = (name, str(ours[0] if ours else -1))
            super().__init__(device, PROCESS, first, environment, pool_fd, pool_bytes, faults, ours)
        if listener and self._path:
            self.descriptor_socket = self._path.name

    def close(self) -> None:
        """See ``Mover``."""
        if self._path:
            self._path.unlink(missing_ok=True)
        super().close()


def _listen(path: Path, like: Path) -> socket.socket | None:
    try:
        return descriptors.listen(path, like)
    except OSError as problem:
        log.warning(
            "memory of a GPU that is mapped page by page cannot be taken: cannot listen on %s: %s", path, problem
        )
        return None
