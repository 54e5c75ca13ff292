"""All that the daemon counts, at one moment: what the control loop hands over to whoever reports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpkv_client.wire import Body
from hpkv_daemon.core.blocks import Usage
from hpkv_daemon.core.counts import BlockCounts, Histogram
from hpkv_daemon.service.report import Identity


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies, which nothing changes any more. Times in seconds."""

    identity: Identity
    uptime: float
    counters: Mapping[str, int]
    """As in ``stats``; what never happened is left out."""
    namespaces: Sequence[BlockCounts]
    """The first one is of all that are not counted apart."""
    engines: Mapping[str, Mapping[str, int]]
    """By model: what engines count themselves."""
    durations: Mapping[tuple[str, str], Histogram]
    """By tier and direction."""
    pool: Usage
    slots: tuple[int, int, int]
    """Extents, those of them that are free, and the bytes of one."""
    accounts: Sequence[tuple[str, int, int, int | None]]
    """Name, bytes held, bytes reserved, and at most (None: all), of each quota."""
    sessions: int
    engines_ready: Sequence[bool]
    """Of each engine, whether all its ranks are registered and mapped."""
    leases: int
    movers: Sequence[Mapping[str, object]]
    storage: Body
    remote: Body
