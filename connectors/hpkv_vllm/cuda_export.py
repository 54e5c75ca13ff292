"""KV memory on a GPU, as another process can open it; and where the engine's compute stream stands. Without torch."""

from __future__ import annotations

from hpkv_client.cuda import CudaError, Driver
from hpkv_client.errors import LayoutRefused
from hpkv_client.types import MemoryHandle


def export(driver: Driver, pointer: int, size: int) -> tuple[str, MemoryHandle]:
    """The device of ``size`` bytes at a device pointer, ``cuda:UUID``, and the handle for them.

    Needs the context that the memory was made in. Raises ``LayoutRefused`` for memory that no other process can open.
    """
    device = driver.uuid_of(driver.device_of(pointer))
    if not driver.exports_by_handle(pointer):
        raise LayoutRefused(
            f"the KV cache on {device} is mapped page by page, and has no handle for other processes",
            "start vLLM without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and without --enable-sleep-mode",
        )
    base, whole = driver.allocation(pointer)
    try:
        token = driver.export(base)
    except CudaError as problem:
        where = "a part of a GPU (MIG)" if device.startswith("MIG-") else "this GPU or container"
        raise LayoutRefused(
            f"the KV cache on {device} cannot be shared with another process: {problem.message}",
            f"{where} may not allow CUDA IPC; the engine runs without HPKV",
        ) from None
    if pointer + size > base + whole:
        raise LayoutRefused(f"{size} bytes at an allocation's byte {pointer - base} of {whole}")
    return f"cuda:{device}", MemoryHandle("cuda_ipc", size, token=token, offset=pointer - base)


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
