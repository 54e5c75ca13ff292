"""As much of torch as the script for GPUs calls, on the fake driver: memory of the device is the driver's.

Kernels are done when they are called, but for ``fill_``, which waits for its turn in the stream.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from tests.cuda.gpus import FIRST, FakeCuda

__version__ = "fake"
version = SimpleNamespace(cuda="fake", hip=None)
uint8, bfloat16, float32 = np.uint8, np.float32, np.float32

_cuda = FakeCuda(Path(os.environ["LD_LIBRARY_PATH"]), Path(os.environ["FAKE_CUDA"]))
_cuda.driver.enter(_cuda.devices[FIRST])
_stream = _cuda.driver.stream()
_paged = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


class _Storage:
    """Memory of the device, as long as somebody has it."""

    def __init__(self, size: int) -> None:
        self.pointer = _cuda.map_pages(size, pieces=5) if _paged else _cuda.allocate(size)
        self.bytes = _cuda.bytes_at(self.pointer, size)

    def data_ptr(self) -> int:
        return self.pointer

    def __del__(self) -> None:
        _cuda.free(self.pointer)


class Tensor:
    """An array; ``storage`` if it is the whole of some memory of the device."""

    def __init__(self, array: Any, storage: _Storage | None = None) -> None:
        self.array, self.storage = array, storage

    def untyped_storage(self) -> _Storage:
        assert self.storage is not None
        return self.storage

    def numel(self) -> int:
        return int(self.array.size)

    def random_(self, low: int, high: int, generator: Any = None) -> Self:
        del generator
        self.array[...] = np.random.default_rng(3).integers(low, high, self.array.shape, self.array.dtype)
        return self

    def zero_(self) -> Self:
        self.array[...] = 0
        return self

    def fill_(self, value: int) -> Self:
        _cuda.fill_later(self.untyped_storage().pointer, value, self.numel(), _stream)
        return self

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Self:
        del non_blocking
        self.array[...] = source.array
        return self

    def clone(self) -> Tensor:
        return Tensor(self.array.copy())

    def view(self, *shape: int) -> Tensor:
        return Tensor(self.array.reshape(shape))

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> Any:
        return self.array

    def __getitem__(self, index: Any) -> Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        return Tensor(self.array[tuple(part.array if isinstance(part, Tensor) else part for part in parts)])

    def __matmul__(self, other: Tensor) -> Tensor:
        return Tensor(self.array @ other.array)


def zeros(shape: Any, dtype: Any = float32, device: str = "cpu", pin_memory: bool = False) -> Tensor:
    del pin_memory
    if device == "cuda" and dtype is uint8:
        storage = _Storage(shape)
        storage.bytes[:] = 0
        return Tensor(storage.bytes, storage)
    return Tensor(np.zeros(shape, dtype))


empty = zeros


def tensor(values: list[int], device: str = "cpu") -> Tensor:
    del device
    return Tensor(np.array(values))


def equal(one: Tensor, other: Tensor) -> bool:
    return bool(np.array_equal(one.array, other.array))


class Generator:
    def __init__(self, device: str) -> None:
        del device

    def manual_seed(self, seed: int) -> Self:
        del seed
        return self


class _Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3


_nothing: Callable[[], None] = lambda: None  # noqa: E731
cuda = SimpleNamespace(
    is_available=lambda: True,
    current_device=lambda: 0,
    get_device_name=lambda: "fake",
    synchronize=_nothing,
    empty_cache=_nothing,
    mem_get_info=lambda: (_cuda.free_bytes(), 0),
    current_stream=lambda: SimpleNamespace(cuda_stream=_stream),
    Event=_Event,
)
