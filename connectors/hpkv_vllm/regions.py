"""The memories under a rank's KV tensors, as a mover opens them: shared memory of the CPU, allocations of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hpkv_client.cuda import Driver
from hpkv_client.memory import SharedMemory
from hpkv_client.types import MemoryHandle
from hpkv_vllm.cuda_export import PagedExport, export


class Region(Protocol):
    """One storage. ``device`` is that of its mover."""

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:UUID``."""

    @property
    def handle(self) -> MemoryHandle:
        """By which the mover opens it."""

    def read(self, start: int, length: int) -> npt.NDArray[np.uint8]:
        """The bytes as another process sees them, in a copy."""


class HostRegion:
    """Shared memory."""

    device = "cpu"

    def __init__(self, memory: SharedMemory) -> None:
        self.handle = memory.handle
        self._bytes = np.frombuffer(memory.mapping, np.uint8)

    def read(self, start: int, length: int) -> npt.NDArray[np.uint8]:
        """See ``Region``."""
        return self._bytes[start : start + length].copy()


@dataclass(frozen=True, eq=False)
class GpuRegion:
    """Memory of a GPU. ``settle`` waits for what the engine has put into its streams."""

    device: str
    handle: MemoryHandle
    pointer: int
    driver: Driver
    settle: Callable[[], None]
    pages: PagedExport | None = None

    def read(self, start: int, length: int) -> npt.NDArray[np.uint8]:
        """See ``Region``. Only while the engine starts: it waits for the device."""
        self.settle()
        return np.frombuffer(self.driver.read(self.pointer + start, length), np.uint8)


class GpuMemory:
    """The storages of a rank on its GPU, each exported once. Makes no context: it is the engine's that is current."""

    def __init__(self, driver: Driver, settle: Callable[[], None]) -> None:
        self.driver = driver
        self._settle = settle
        self._regions: dict[int, GpuRegion] = {}

    def find(self, tensor: Any) -> GpuRegion:
        """The storage of a tensor. Raises ``LayoutRefused`` for one that no other process can open, ``CudaError``."""
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        region = self._regions.get(pointer)
        if region is None:
            device, handle, pages = export(self.driver, pointer, storage.nbytes())
            region = self._regions[pointer] = GpuRegion(device, handle, pointer, self.driver, self._settle, pages)
        return region

    def hand_over(self, path: Path) -> None:
        """Send to the mover at a socket what it cannot open by handle, and does not have. From any thread.

        Raises ``HpkvError``.
        """
        for region in list(self._regions.values()):
            if region.pages is not None:
                region.pages.hand_over(path)
