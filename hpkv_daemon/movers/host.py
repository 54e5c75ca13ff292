"""The daemon's side of the CPU mover."""

from __future__ import annotations

from hpkv_daemon.movers.parent import ProcessMover


class HostMover(ProcessMover):
    """A ``Mover`` for memory of the CPU."""

    def __init__(self, pool_fd: int, pool_bytes: int, faults: str = "") -> None:
        super().__init__("cpu", "hpkv_daemon.movers.process", (), {}, pool_fd, pool_bytes, faults)
