"""What the doctor knows, and what it says. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """It works, and could be better or safer."""
    FAIL = "fail"
    """It does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was seen, and what to do about it (empty for OK)."""

    check: str
    level: Level
    seen: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class SocketFacts:
    """The daemon's socket. ``state``: missing, stale, not a socket, denied, hanging, untrusted or serving."""

    path: str
    state: str
    problem: str = ""
    uid: int = 0
    gid: int = 0
    group: str = ""
    mode: int = 0o660
    daemon_pid: int | None = None
    """Who holds the instance lock; None for nobody, or for somebody who cannot be told."""
    same_pid_namespace: bool = True
    stale_lock: bool = False
    """The lock file is there, and nobody holds it."""


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """The directory of the disk tier. ``write_bytes_per_second`` None: it could not be tried."""

    path: str
    file_system: str
    free_bytes: int
    wanted_bytes: int | None
    direct: bool
    problem: str = ""
    write_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The NVIDIA driver. ``version`` empty: no driver; ``cuda_version`` empty: libcuda cannot be loaded."""

    version: str = ""
    cuda_version: str = ""
    devices: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen of this machine, this process and the daemon. Sizes are bytes."""

    kernel: tuple[int, int]
    uid: int
    groups: frozenset[int]
    ram_bytes: int
    pool_path: str
    pool_bytes: int
    pool_file_system: str
    pool_available_bytes: int
    """What can be allocated there, with what an earlier pool of ours takes."""
    shmem_huge_pages: str
    """``never``, ``advise`` and the like; empty if the kernel does not say."""
    memlock_bytes: int | None
    """None: no limit."""
    open_files: int
    numa_nodes: int
    clock_source: str
    clock_behind: bool
    """The wall clock shows a time before this program was installed."""
    container: bool
    socket: SocketFacts
    round_trip: str | None
    """Why a block did not come back from the daemon; empty if it did, None if it was not tried."""
    storage: StorageFacts | None
    gpu: GpuFacts
    vllm: str
    """Its version; empty if it is not installed here."""
    vllm_least: tuple[int, int]
    enabled: bool
    """``VLLM_ENABLE_HPKV``"""
    hash_seed: str
    """``PYTHONHASHSEED``"""
    allocator: str
    """``PYTORCH_CUDA_ALLOC_CONF``"""
    settings_problem: str
