"""One GPU as a mover uses it: its context, its link to the pool, and what keeps the process near it."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hpkv_client.control import PAGE_BYTES, ControlPage
from hpkv_client.cuda import IPC_BYTES, CudaError, Driver
from hpkv_client.cuda_pages import MappedPieces
from hpkv_client.errors import LayoutRefused, NoSuchDevice
from hpkv_client.memory import map_shared
from hpkv_client.types import MemoryHandle, Run
from hpkv_daemon.movers.cuda.plan import SHORT_BYTES, CopyPlan


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a mover does at once."""

    extent_bytes: int = 256 << 20
    """The pool is page-locked in pieces of so many bytes, about 25 ms each: one call for all of it can be refused, and
    nobody waits long for the piece that a copy needs."""
    staging_bytes: int = 16 << 20
    """Of each of the two buffers for one direction. They are taken when the first rank needs them."""
    short_bytes: int = SHORT_BYTES
    """Pieces of fewer bytes are gathered, where that is possible."""
    slice_bytes: int = 64 << 20
    """One slice is 1 to 3 ms, after which the next job has its turn."""
    slice_pieces: int = 1 << 16
    """Copies of one batch."""
    slice_calls: int = 1 << 10
    """Calls for one slice of strided copies, or on a driver without batches: they take some 2 ms of the process."""


Bytes = npt.NDArray[np.uint8]
_SYSTEM = Path("/sys")


def open_device(driver: Driver, name: str) -> int:
    """The device of this UUID, with its context current in this thread. Raises ``NoSuchDevice``, ``CudaError``."""
    there = {driver.uuid_of(device): device for device in driver.devices()}
    if name not in there:
        raise NoSuchDevice(
            f"no GPU {name} here (there is: {', '.join(sorted(there))})", "run hpkvd where nvidia-smi -L lists it"
        )
    driver.enter(there[name])
    return there[name]


def stay_near(bus: str) -> None:
    """Run on the processors of the device's NUMA node, if it has one."""
    with contextlib.suppress(OSError, ValueError):
        node = int((_SYSTEM / "bus/pci/devices" / bus / "numa_node").read_text())
        if node < 0:
            return
        listed = (_SYSTEM / f"devices/system/node/node{node}/cpulist").read_text().strip()
        near: set[int] = set()
        for part in listed.split(","):
            first, _, last = part.partition("-")
            near.update(range(int(first), int(last or first) + 1))
        if near & os.sched_getaffinity(0):
            os.sched_setaffinity(0, near & os.sched_getaffinity(0))


class PinnedMemory:
    """Host memory that becomes page-locked extent by extent. It stays so until the process ends."""

    def __init__(self, driver: Driver, memory: mmap.mmap, extent_bytes: int) -> None:
        self._driver = driver
        self.bytes: Bytes = np.frombuffer(memory, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.extent_bytes = extent_bytes
        self._missing = set(range(-(-len(self.bytes) // extent_bytes)))

    @property
    def locked_bytes(self) -> int:
        """Bytes in page-locked extents."""
        return len(self.bytes) - sum(self._size(extent) for extent in self._missing)

    def _size(self, extent: int) -> int:
        return min(self.extent_bytes, len(self.bytes) - extent * self.extent_bytes)

    def lacks(self, offsets: npt.NDArray[np.int64], size: int) -> int | None:
        """An extent that is not page-locked yet under one of the pieces of ``size`` bytes."""
        if not self._missing:
            return None
        under = set((offsets // self.extent_bytes).tolist()) | set(((offsets + size - 1) // self.extent_bytes).tolist())
        if size > self.extent_bytes and under:
            under = set(range(min(under), max(under) + 1))
        return min(under & self._missing, default=None)

    @property
    def next_missing(self) -> int | None:
        """The first extent that is not page-locked."""
        return min(self._missing, default=None)

    def lock(self, extent: int) -> None:
        """Page-lock one extent. Raises ``CudaError``; it can be tried again."""
        self._driver.page_lock(self.address + extent * self.extent_bytes, self._size(extent))
        self._missing.discard(extent)


class AttachedRank:
    """One rank's memory on the device, opened. ``close`` it when no copy touches it any more.

    ``paged`` is asked for memory that is mapped already; it is not this object's.
    """

    def __init__(
        self,
        driver: Driver,
        regions: Sequence[MemoryHandle],
        control: MemoryHandle | None,
        runs: Sequence[Run],
        blocks: int,
        limits: Limits,
        paged: Callable[[MemoryHandle], MappedPieces],
    ) -> None:
        self._driver = driver
        self._paged = paged
        self._opened: list[int] = []
        self._page: mmap.mmap | None = None
        self.control: ControlPage | None = None
        self.in_flight = 0
        """Slices of its jobs that the device may be working at."""
        self.leaving = False
        try:
            bases = [self._open(handle) for handle in regions]
            if control is not None:
                if control.size < PAGE_BYTES:
                    raise LayoutRefused(f"a control page of {control.size} bytes; {PAGE_BYTES} are needed")
                self._page = map_shared(control)
                self.control = ControlPage(self._page)
            for run in runs:
                if run.last_local_byte(blocks) > regions[run.region].size:
                    raise LayoutRefused("a run leaves its region")
            self.plan = CopyPlan(runs, bases, limits.staging_bytes, limits.short_bytes)
        except BaseException:
            self.close()
            raise

    def _open(self, handle: MemoryHandle) -> int:
        if handle.kind == "cuda_fd":
            memory = self._paged(handle)
            _require_inside(handle, memory.size)
            return memory.address + handle.offset
        if handle.kind != "cuda_ipc" or len(handle.token) != IPC_BYTES:
            raise LayoutRefused(f"a GPU has no memory of kind {handle.kind} with a token of {len(handle.token)} bytes")
        base = self._driver.open(handle.token)
        self._opened.append(base)
        try:
            _, size = self._driver.allocation(base)
        except CudaError as problem:
            if problem.lost:
                raise
            # A driver that does not tell the size of foreign memory: a handle that lies ends this process, no more.
            size = handle.offset + handle.size
        _require_inside(handle, size)
        return base + handle.offset

    def close(self) -> None:
        """Let go of all of it."""
        if self.control is not None:
            self.control.close()
            self.control = None
        if self._page is not None:
            self._page.close()
            self._page = None
        while self._opened:
            self._driver.close(self._opened.pop())


def _require_inside(handle: MemoryHandle, size: int) -> None:
    end = handle.offset + handle.size
    if end > size:
        raise LayoutRefused(f"a region that ends at {end} in an allocation of {size} bytes")
