"""The daemon's side of the mover of one GPU."""

from __future__ import annotations

import re

from hpkv_client.errors import NoSuchDevice
from hpkv_daemon.movers.parent import ProcessMover

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
    """A ``Mover`` for one GPU, which its process alone sees."""

    def __init__(self, device: str, pool_fd: int, pool_bytes: int, faults: str = "") -> None:
        name = uuid_of(device)
        # Whatever an engine calls it, this process sees no other device; a MIG part can be had no other way.
        environment = {"CUDA_VISIBLE_DEVICES": name, "CUDA_MODULE_LOADING": "LAZY"}
        super().__init__(device, PROCESS, (name,), environment, pool_fd, pool_bytes, faults)
