"""Ranks with memory on the fake driver's GPUs, and what goes wrong there on demand."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from hpkv_vllm.cuda_export import export

from hpkv_client.cuda import Driver
from hpkv_client.cuda_pages import DESCRIPTOR
from hpkv_client.errors import Unreachable
from hpkv_client.wire import Body, handle_to_wire
from tests.support import ROOT, Bytes, Child, ImpatientDaemon, KvRank, Observed, Rank, wait_until

FIRST, SECOND = (f"GPU-00000000-0000-4000-8000-00000000000{n}" for n in (1, 2))
PART = "MIG-00000000-0000-4000-8000-00000000000a"
WHOLE_OF_PART = "GPU-00000000-0000-4000-8000-000000000003"
DEVICE_BYTES = 64 << 20
PAGE_BYTES = 2 << 20
_TAG = 1 << 60


class ImpatientGpuDaemon(ImpatientDaemon):
    """Its movers work in small pieces."""

    PATCH = ImpatientDaemon.PATCH + (
        "from hpkv_daemon.movers.cuda import mover\nmover.PROCESS = 'tests.cuda.small_mover'\n"
    )


class FakeCuda:
    """The fake driver as an engine's process uses it. One ``directory`` is one machine."""

    def __init__(self, driver_directory: Path, directory: Path | None = None) -> None:
        self.directory = directory or Path(tempfile.mkdtemp(prefix="hpkv-t-gpu-", dir="/dev/shm"))
        self.driver_directory = driver_directory
        self.faults_path = self.directory / "faults"
        if directory is None:
            lines = [f"{FIRST} {DEVICE_BYTES}", f"{SECOND} {DEVICE_BYTES}", f"{WHOLE_OF_PART} {PART} {DEVICE_BYTES}"]
            (self.directory / "devices").write_text("\n".join(lines))
        # The engine's side of the driver: no faults, the daemon has those.
        os.environ["FAKE_CUDA"] = str(self.directory)
        os.environ.pop("FAKE_CUDA_FAULTS", None)
        self.driver = Driver(str(driver_directory / "libcuda.so.1"))
        self.raw = ctypes.CDLL(str(driver_directory / "libcuda.so.1"))
        self._reserved: dict[int, tuple[int, int]] = {}
        """Address -> bytes reserved there, bytes mapped."""
        self.devices = {self.driver.uuid_of(device): device for device in self.driver.devices()}

    def environment(self, **more: Any) -> dict[str, Any]:
        """Of a daemon on this machine."""
        return {
            "FAKE_CUDA": self.directory,
            "FAKE_CUDA_FAULTS": self.faults_path,
            "FAKE_CUDA_DELAY_US": 2000,
            "LD_LIBRARY_PATH": self.driver_directory,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            **more,
        }

    def allocate(self, size: int, device: str = FIRST) -> int:
        """Device memory; its pointer. Raises ``MemoryError`` when the device has not that much."""
        self.driver.enter(self.devices[device])
        pointer = ctypes.c_uint64()
        result = self.raw.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
        if result == 2:
            raise MemoryError(f"no {size} bytes left on {device}")
        assert not result
        return pointer.value

    def map_pages(self, size: int, handle_types: int = DESCRIPTOR, device: str = FIRST, pieces: int = 2) -> int:
        """Device memory that is mapped page by page, in so many pieces with some space behind them; its pointer."""
        self.driver.enter(self.devices[device])
        pages = -(-size // PAGE_BYTES)
        address = ctypes.c_uint64()
        self.driver.call("cuMemAddressReserve", ctypes.byref(address), (pages + 4) * PAGE_BYTES, 0, 0, 0)
        self._reserved[address.value] = ((pages + 4) * PAGE_BYTES, pages * PAGE_BYTES)
        sizes = [(pages // pieces + (n < pages % pieces)) * PAGE_BYTES for n in range(min(pieces, pages))]
        at = address.value
        for piece in sizes:
            handle = ctypes.c_uint64()
            properties = struct.pack("=4i16x", 1, handle_types, 1, self.devices[device])
            arguments = (ctypes.byref(handle), ctypes.c_size_t(piece), properties, ctypes.c_uint64(0))
            result = self.raw.cuMemCreate(*arguments)
            if result == 2:
                raise MemoryError(f"no {size} bytes left on {device}")
            assert not result
            self.driver.call("cuMemMap", at, piece, 0, handle.value, 0)
            # As torch does: the mapping holds the memory.
            self.driver.call("cuMemRelease", handle.value)
            at += piece
        access = struct.pack("=3i", 1, self.devices[device], 3)
        self.driver.call("cuMemSetAccess", address.value, pages * PAGE_BYTES, access, 1)
        return address.value

    def unmap_pages(self, pointer: int) -> None:
        """Take the memory from under its addresses, as sleep does; they stay reserved."""
        reserved, mapped = self._reserved[pointer]
        self.driver.call("cuMemUnmap", pointer, mapped)
        self._reserved[pointer] = (reserved, 0)

    def free(self, pointer: int) -> None:
        """Free it."""
        if pointer in self._reserved:
            reserved, mapped = self._reserved.pop(pointer)
            if mapped:
                self.driver.call("cuMemUnmap", pointer, mapped)
            self.driver.call("cuMemAddressFree", pointer, reserved)
        else:
            assert not self.raw.cuMemFree_v2(ctypes.c_uint64(pointer))

    def free_bytes(self, device: str = FIRST) -> int:
        """What nobody holds of a device."""
        self.driver.enter(self.devices[device])
        left, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert not self.raw.cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(total))
        return left.value

    def bytes_at(self, pointer: int, size: int) -> Bytes:
        """The memory itself."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer & ~_TAG))

    @contextmanager
    def failing(self, monkeypatch: pytest.MonkeyPatch, rule: str) -> Iterator[None]:
        """A call of the engine's own that fails."""
        rules = self.directory / "engine-faults"
        rules.write_text(f"{rule}\n")
        with monkeypatch.context() as patch:
            patch.setenv("FAKE_CUDA_FAULTS", str(rules))
            yield
        rules.unlink()

    def fill_later(self, pointer: int, value: int, size: int, stream: int) -> None:
        """Put a kernel into a stream that writes the memory when its time has come."""
        arguments = (ctypes.c_uint64(pointer), ctypes.c_ubyte(value), ctypes.c_size_t(size), ctypes.c_void_p(stream))
        assert not self.raw.cuMemsetD8Async(*arguments)


class _Storage:
    def __init__(self, pointer: int, size: int) -> None:
        self._pointer, self._size = pointer, size

    def data_ptr(self) -> int:
        return self._pointer

    def nbytes(self) -> int:
        return self._size


def gpu_tensor(cuda: FakeCuda, pointer: int, size: int) -> Any:
    """Device memory as a tensor of bytes that says, as all of its views do, that it lies on a GPU."""
    import torch

    class OnGpu(torch.Tensor):
        device = torch.device("cuda:0")  # type: ignore[assignment]

        def untyped_storage(self) -> Any:
            return _Storage(pointer, size)

    return torch.from_numpy(cuda.bytes_at(pointer, size)).as_subclass(OnGpu)


class _OnGpu(Rank):
    """Its memory lies on a GPU, at byte ``AT`` of an allocation; with ``paged`` in so many pieces page by page."""

    AT = 4096
    cuda: FakeCuda
    gpu = FIRST
    paged = 0

    def __init__(self, socket: Path, *arguments: Any, **more: Any) -> None:
        self.socket = socket
        super().__init__(socket, *arguments, **more)

    def _allocate(self, size: int) -> Bytes:
        self.size = size
        whole = size + self.AT
        pages = self.cuda.map_pages(whole, device=self.gpu, pieces=self.paged) if self.paged else 0
        self._allocation = pages or self.cuda.allocate(whole, self.gpu)
        self.pointer = self._allocation + self.AT
        return self.cuda.bytes_at(self.pointer, size)

    def _free(self) -> None:
        if self._allocation:
            self.cuda.driver.enter(self.cuda.devices[self.gpu])
            self.cuda.free(self._allocation)
            self._allocation = 0

    def _where(self) -> Body:
        self.cuda.driver.enter(self.cuda.devices[self.gpu])
        device, handle, self.pages = export(self.cuda.driver, self.pointer, self.size)
        return {"device": device, "regions": [handle_to_wire(handle)]}

    def hand_over(self, within: float = 10.0) -> Self:
        """Send the descriptors as soon as the mover waits for them."""

        def handed_over() -> bool:
            name = self.call("heartbeat")["descriptors"]
            with suppress(Unreachable):
                return bool(name) and self.pages.hand_over(self.socket.with_name(name))
            return False

        wait_until(handed_over, within)
        return self


class GpuRank(_OnGpu):
    """A bare rank on a GPU."""


class GpuKvRank(_OnGpu, KvRank):
    """A rank laid out as an attention backend would, on a GPU."""


class GpuNode:
    """A daemon on a machine with GPUs."""

    def __init__(self, observed: Observed, cuda: FakeCuda) -> None:
        self.observed = observed
        self.cuda = cuda
        self.socket = observed.socket

    def rank(self, *arguments: Any, gpu: str = FIRST, paged: int = 0, **more: Any) -> GpuRank:
        """A bare rank, not registered yet."""
        here = {"cuda": self.cuda, "gpu": gpu, "paged": paged}
        return type("GpuRankHere", (GpuRank,), here)(self.socket, *arguments, **more)

    def kv_rank(self, gpu: str = FIRST, paged: int = 0, **more: Any) -> GpuKvRank:
        """A rank with a layout, not registered yet."""
        here = {"cuda": self.cuda, "gpu": gpu, "paged": paged}
        return type("GpuKvRankHere", (GpuKvRank,), here)(self.socket, **more)

    def child(self, code: str) -> Child:
        """A process that plays an engine on the first GPU: ``rank(...)`` in its code makes one."""
        prelude = (
            "from tests.cuda.gpus import FakeCuda, GpuRank\n"
            f"cuda = FakeCuda(Path({str(self.cuda.driver_directory)!r}), Path({str(self.cuda.directory)!r}))\n"
            "class Here(GpuRank): cuda = cuda\n"
            "def rank(*shard, paged=0, **more):\n"
            "    Here.paged = paged\n"
            "    return Here(socket, *shard, **more)\n"
        )
        return Child(self.observed.handle, prelude + code)

    def fail(self, *rules: str) -> None:
        """Calls of movers that fail from now on: ``cuEventQuery 2 700``."""
        fresh = self.cuda.faults_path.with_suffix(".new")
        fresh.write_text("".join(f"{rule}\n" for rule in rules))
        fresh.rename(self.cuda.faults_path)

    def calm(self) -> None:
        """Nothing fails any more."""
        self.cuda.faults_path.unlink(missing_ok=True)
