"""KV memory on a GPU, as another process can open it; and where the engine's compute stream stands. Without torch."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import NamedTuple

from hpkv_client.cuda import CudaError, Driver
from hpkv_client.cuda_pages import DESCRIPTOR, FABRIC, Piece, descriptor_of, handle_types, pieces_under
from hpkv_client.descriptors import hand_over
from hpkv_client.errors import LayoutRefused
from hpkv_client.types import MemoryHandle


class PagedExport:
    """Memory that is mapped page by page: no handle of it fits into a message, its pieces travel as descriptors.

    They are opened when a mover wants them and closed at once: the engine alone decides how long the memory is there.
    """

    def __init__(self, driver: Driver, name: str, pieces: tuple[Piece, ...]) -> None:
        self._driver = driver
        self._context = driver.current
        self._name = name
        self._pieces = pieces

    def hand_over(self, path: Path) -> bool:
        """Send descriptors of all pieces to the mover at a socket, if it waits; from any thread. ``HpkvError``."""
        self._driver.use(self._context)
        return hand_over(path, self._name, [piece.size for piece in self._pieces], self._open)

    def _open(self, index: int) -> int:
        return descriptor_of(self._driver, self._pieces[index])


class Export(NamedTuple):
    """Memory on ``device`` (``cuda:UUID``) as a mover opens it; ``pages`` if it takes descriptors to do so."""

    device: str
    handle: MemoryHandle
    pages: PagedExport | None = None


def export(driver: Driver, pointer: int, size: int) -> Export:
    """How another process opens ``size`` bytes at a device pointer.

    Needs the context that the memory was made in. Raises ``LayoutRefused`` for memory that no other process can open.
    """
    device = driver.uuid_of(driver.device_of(pointer))
    if not driver.exports_by_handle(pointer):
        return Export(f"cuda:{device}", *_export_pages(driver, device, pointer, size))
    base, whole = driver.allocation(pointer)
    try:
        token = driver.export(base)
    except CudaError as problem:
        raise _not_shared(device, problem) from None
    if pointer + size > base + whole:
        raise LayoutRefused(f"{size} bytes at an allocation's byte {pointer - base} of {whole}")
    return Export(f"cuda:{device}", MemoryHandle("cuda_ipc", size, token=token, offset=pointer - base))


def _export_pages(driver: Driver, device: str, pointer: int, size: int) -> tuple[MemoryHandle, PagedExport]:
    try:
        pieces = pieces_under(driver, pointer, size)
        for piece in pieces:
            _require_shareable(device, handle_types(driver, piece))
        # Now, while somebody reads what is said: a driver that does not do it says so here.
        os.close(descriptor_of(driver, pieces[0]))
    except CudaError as problem:
        raise _not_shared(device, problem) from None
    name = secrets.token_hex(16)
    handle = MemoryHandle("cuda_fd", size, os.getpid(), name=name, offset=pointer - pieces[0].start)
    return handle, PagedExport(driver, name, pieces)


def _require_shareable(device: str, types: int) -> None:
    if types & DESCRIPTOR:
        return
    if types & FABRIC:
        raise LayoutRefused(
            f"the KV cache on {device} is mapped page by page, and made for sharing over a fabric alone",
            "start vLLM without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and without --enable-cumem-allocator",
        )
    raise LayoutRefused(
        f"the KV cache on {device} is mapped page by page, and was made for one process alone",
        "start vLLM without --enable-cumem-allocator, and with TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1 "
        "or without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )


def _not_shared(device: str, problem: CudaError) -> LayoutRefused:
    where = "a part of a GPU (MIG)" if device.startswith("MIG-") else "this GPU or container"
    return LayoutRefused(
        f"the KV cache on {device} cannot be shared with another process: {problem.message}",
        f"{where} may not allow CUDA IPC; the engine runs without HPKV",
    )


class ComputeStream:
    """Moments in the stream in which the engine computes. Asked, never waited for; the engine's main thread only."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._events: list[int] = []

    def mark(self, stream: int) -> int:
        """A moment: what was put into the stream until now is done when it has ``passed``."""
        moment = self._events.pop() if self._events else self._driver.event()
        self._driver.record(moment, stream)
        return moment

    def passed(self, moment: int) -> bool:
        """Whether all of that is done. Raises ``CudaError`` when the engine's context is lost."""
        return self._driver.passed(moment)

    def forget(self, moment: int) -> None:
        """The moment is not asked for any more."""
        self._events.append(moment)
