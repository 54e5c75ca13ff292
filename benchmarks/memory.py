"""Memory for benchmarks: how much there is to use, and shared pieces of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import Unfit
from hpkv_client.memory import SharedMemory

_STEADY_LOOKS = 5


def available_bytes() -> int:
    """What the kernel says can be taken without pushing anything out."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise Unfit("/proc/meminfo does not say how much memory is available")


def affordable(wanted: int, copies: int, smallest: int) -> int:
    """``wanted`` bytes, or less (a power of two) where ``copies`` times that is over half of what is available."""
    while wanted * copies > available_bytes() // 2:
        wanted //= 2
        if wanted < smallest:
            raise Unfit(f"{available_bytes() >> 20} MiB of memory are available, too little for cold copies")
    return wanted


def await_mapped(pid: int) -> None:
    """Return once a mover that has nothing to do has mapped the pages of its pool, or says no more of it."""
    before, same = -1, 0
    while same < _STEADY_LOOKS:
        mapped = resident_shared_bytes(pid)
        same = same + 1 if mapped == before else 0
        before = mapped
        time.sleep(0.1)


def resident_shared_bytes(pid: int) -> int:
    """Shared memory that a process has mapped and touched."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) << 10
    return 0


@contextmanager
def shared(size: int) -> Iterator[SharedMemory]:
    """A piece of shared memory, every page of it taken."""
    memory = SharedMemory(size)
    try:
        zeros = bytes(1 << 20)
        for offset in range(0, size, len(zeros)):
            length = min(len(zeros), size - offset)
            memory.mapping[offset : offset + length] = zeros[:length]
        yield memory
    finally:
        memory.mapping.close()
        memory.close()
