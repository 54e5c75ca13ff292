"""The few entry points of NVIDIA's driver that HPKV calls, typed. Imported only where there is a GPU to talk to.

ctypes on ``libcuda.so.1``: nothing to install, nothing to load beside the driver in an engine's process, and arrays go
to the batch copy by address. Pointers, streams and events are plain integers. ctypes lets go of the interpreter lock
during a call. Calls act on the context that is current in the calling thread.
"""

from __future__ import annotations

import ctypes
import uuid
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from hpkv_client.errors import HpkvError, NoSuchDevice

LIBRARY = "libcuda.so.1"

NOT_READY = 600
NOT_SUPPORTED = 801
MISSING = 500
"""CUDA_ERROR_NOT_FOUND: also what is raised for an entry point that the driver does not have."""

IPC_BYTES = 64
_BATCH_SINCE = 12080
"""The CUDA version whose signature of cuMemcpyBatchAsync is called; later drivers keep it."""

_HINTS = {
    1: "report this",
    2: "free memory of the GPU or of this machine: a mover needs some 500 MiB beside the engine",
    3: "report this",
    34: "LD_LIBRARY_PATH leads to the toolkit's stub of libcuda; remove that directory from it",
    46: "the GPU is held by another process in exclusive mode; nvidia-smi -c 0",
    100: "give the daemon access to the engine's GPU: nvidia-smi must list it where hpkvd runs",
    101: "give the daemon access to the engine's GPU: nvidia-smi must list it where hpkvd runs",
    201: "run hpkvd in the engine's PID and IPC namespaces, and the engine without expandable segments",
    205: "run hpkvd in the engine's PID and IPC namespaces",
    214: "the GPU has a memory error; see nvidia-smi -q, replace or reset it",
    304: "run hpkvd in the engine's PID and IPC namespaces, with access to the same /dev/nvidia*",
    400: "run hpkvd in the engine's PID and IPC namespaces",
    500: "install a newer NVIDIA driver",
    712: "report this",
    800: "run hpkvd as the engine's user or as root",
    801: "this GPU or driver cannot do that; the engine runs without HPKV",
    802: "wait until nvidia-fabricmanager is up",
    803: "the driver in the kernel and libcuda differ: restart the machine, or the container with its driver",
    804: "this GPU is too old for the driver's library; in a container use the host's libcuda",
    999: "see dmesg for Xid errors; reset the GPU",
}

_LOST = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 802, 807, 810, 999})


class CudaError(HpkvError):
    """A call of the driver failed. ``lost``: the context is of no use any more, only a new process helps."""

    def __init__(self, call: str, result: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({result})", _HINTS.get(result, "see dmesg and nvidia-smi"))
        self.result = result
        self.lost = result in _LOST


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("source_order", c_int), ("source", Location), ("destination", Location), ("flags", c_uint))


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D; memory type 4 leaves it to the driver to tell host from device by address."""

    _fields_ = (
        ("source_x", c_size_t),
        ("source_y", c_size_t),
        ("source_type", c_uint),
        ("source_host", c_void_p),
        ("source", c_uint64),
        ("source_array", c_void_p),
        ("source_pitch", c_size_t),
        ("destination_x", c_size_t),
        ("destination_y", c_size_t),
        ("destination_type", c_uint),
        ("destination_host", c_void_p),
        ("destination", c_uint64),
        ("destination_array", c_void_p),
        ("destination_pitch", c_size_t),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("bytes", c_char * IPC_BYTES),)


_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid": (c_void_p, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetPCIBusId": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuIpcGetMemHandle": (POINTER(_Handle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemRetainAllocationHandle": (POINTER(c_uint64), c_void_p),
    "cuMemGetAllocationPropertiesFromHandle": (c_void_p, c_uint64),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemRelease": (c_uint64,),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (POINTER(_Copy2D), c_void_p),
    "cuGetProcAddress_v2": (ctypes.c_char_p, POINTER(c_void_p), c_int, c_uint64, c_void_p),
}

_BATCH = ctypes.CFUNCTYPE(
    c_int,
    c_void_p,
    c_void_p,
    c_void_p,
    c_size_t,
    POINTER(_CopyAttributes),
    POINTER(c_size_t),
    c_size_t,
    POINTER(c_size_t),
    c_void_p,
)

_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_REGISTER_PORTABLE = 1
_IPC_LAZY_PEER_ACCESS = 1
_SOURCE_IN_STREAM_ORDER = 1
_PREFER_OVERLAP = 1
_UNIFIED = 4
_DEVICE_ORDINAL = 9
_LEGACY_IPC_CAPABLE = 10


class Driver:
    """The driver, initialised. Raises ``NoSuchDevice`` where there is none, ``CudaError`` for whatever fails."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as problem:
            raise NoSuchDevice(
                f"no NVIDIA driver here: {problem}", "run hpkvd where nvidia-smi works; in a container with its GPUs"
            ) from None
        self._functions: dict[str, Any] = {}
        self._attributes = _CopyAttributes(_SOURCE_IN_STREAM_ORDER, Location(0, 0), Location(0, 0), _PREFER_OVERLAP)
        self._first = c_size_t(0)
        self.call("cuInit", 0)
        self._batch = self._find_batch()

    def _function(self, name: str) -> Any:
        found = self._functions.get(name)
        if found is None:
            try:
                found = getattr(self._library, name)
            except AttributeError:
                raise CudaError(name, MISSING, "the driver does not have it") from None
            found.argtypes, found.restype = _PROTOTYPES[name], c_int
            self._functions[name] = found
        return found

    def call(self, name: str, *arguments: Any) -> None:
        """Call an entry point of ``_PROTOTYPES``. Raises ``CudaError`` unless it says that all went well."""
        result = self._function(name)(*arguments)
        if result:
            raise self._error(name, result)

    def give_back(self, name: str, *arguments: Any) -> None:
        """Call what undoes something. If that fails only the end of the process undoes it: it counts as ``lost``."""
        try:
            self.call(name, *arguments)
        except CudaError as problem:
            problem.lost = True
            raise

    def _error(self, name: str, result: int) -> CudaError:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorName(c_int(result), byref(text)) or text.value is None:
            return CudaError(name, result, "an error that the driver does not name")
        return CudaError(name, result, text.value.decode())

    # -- devices ------------------------------------------------------------------------------------------

    def devices(self) -> list[int]:
        """Devices that this process may use, by the driver's numbers."""
        count, device = c_int(), c_int()
        self.call("cuDeviceGetCount", byref(count))
        found = []
        for ordinal in range(count.value):
            self.call("cuDeviceGet", byref(device), ordinal)
            found.append(device.value)
        return found

    def uuid_of(self, device: int) -> str:
        """``GPU-...``, or ``MIG-...`` for a part of one, as nvidia-smi and CUDA_VISIBLE_DEVICES write it."""
        whole, part = ctypes.create_string_buffer(16), ctypes.create_string_buffer(16)
        self.call("cuDeviceGetUuid", whole, device)
        self.call("cuDeviceGetUuid_v2", part, device)
        return f"{'GPU' if whole.raw == part.raw else 'MIG'}-{uuid.UUID(bytes=part.raw)}"

    def bus_of(self, device: int) -> str:
        """Its address on the PCI bus, as under /sys/bus/pci/devices."""
        text = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", text, len(text), device)
        return text.value.decode().lower()

    def enter(self, device: int) -> None:
        """Make the device's primary context current in this thread, and create it if nobody has."""
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.use(context.value or 0)

    @property
    def current(self) -> int:
        """The context of this thread, 0 if it has none."""
        context = c_void_p()
        self.call("cuCtxGetCurrent", byref(context))
        return context.value or 0

    def use(self, context: int) -> None:
        """Make another thread's context current in this one as well."""
        self.call("cuCtxSetCurrent", context)

    # -- order --------------------------------------------------------------------------------------------

    def stream(self) -> int:
        """A new stream that waits for no other."""
        stream = c_void_p()
        self.call("cuStreamCreate", byref(stream), _STREAM_NON_BLOCKING)
        return stream.value or 0

    def event(self) -> int:
        """A new event, for ``record``."""
        event = c_void_p()
        self.call("cuEventCreate", byref(event), _EVENT_DISABLE_TIMING)
        return event.value or 0

    def record(self, event: int, stream: int) -> None:
        """The event passes when everything that is in the stream now is done."""
        self.call("cuEventRecord", event, stream)

    def passed(self, event: int) -> bool:
        """Whether it has passed. An event that was never recorded has."""
        result = self._function("cuEventQuery")(event)
        if result == NOT_READY:
            return False
        if result:
            raise self._error("cuEventQuery", result)
        return True

    # -- memory -------------------------------------------------------------------------------------------

    def page_lock(self, address: int, size: int) -> None:
        """Pin host memory for DMA; some 0.1 s a GiB. It ends with the process."""
        self.call("cuMemHostRegister_v2", address, size, _REGISTER_PORTABLE)

    def allocation(self, pointer: int) -> tuple[int, int]:
        """Start and size of the allocation that a device pointer lies in."""
        base, size = c_uint64(), c_size_t()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(size), pointer)
        return base.value, size.value

    def device_of(self, pointer: int) -> int:
        """The device that the memory lies on."""
        return self._attribute(_DEVICE_ORDINAL, pointer)

    def exports_by_handle(self, pointer: int) -> bool:
        """Whether ``export`` can work: memory that is mapped page by page has no such handle."""
        return bool(self._attribute(_LEGACY_IPC_CAPABLE, pointer))

    def _attribute(self, number: int, pointer: int) -> int:
        # The driver writes as many bytes as the attribute has: an int, or a bool of one byte.
        value = c_uint64(0)
        self.call("cuPointerGetAttribute", byref(value), number, pointer)
        return value.value & 0xFFFFFFFF

    def export(self, pointer: int) -> bytes:
        """The handle by which another process opens the allocation that starts at ``pointer``."""
        handle = _Handle()
        self.call("cuIpcGetMemHandle", byref(handle), pointer)
        return bytes(handle)

    def open(self, token: bytes) -> int:
        """Map another process' allocation; its start here. The same handle again counts up. ``close`` it as often."""
        pointer = c_uint64()
        self.call("cuIpcOpenMemHandle_v2", byref(pointer), _Handle.from_buffer_copy(token), _IPC_LAZY_PEER_ACCESS)
        return pointer.value

    def close(self, pointer: int) -> None:
        """Undo one ``open``. No copy may touch the memory any more."""
        self.give_back("cuIpcCloseMemHandle", pointer)

    def read(self, pointer: int, size: int) -> bytes:
        """A copy of device memory. It waits for the device."""
        copy = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", copy, pointer, size)
        return copy.raw

    # -- copies -------------------------------------------------------------------------------------------

    def _find_batch(self) -> Any:
        """The batch copy, or None on a driver from before CUDA 12.8."""
        pointer = c_void_p()
        try:
            self.call("cuGetProcAddress_v2", b"cuMemcpyBatchAsync", byref(pointer), _BATCH_SINCE, 0, None)
        except CudaError as problem:
            if problem.result == MISSING or problem.result == 1:
                return None
            raise
        return _BATCH(pointer.value) if pointer.value else None

    @property
    def batches(self) -> bool:
        """Whether ``copy_batch`` can be tried."""
        return self._batch is not None

    def copy_batch(self, destinations: int, sources: int, sizes: int, count: int, stream: int) -> None:
        """Queue ``count`` copies in no particular order; three addresses of arrays of 64-bit integers.

        The arrays may go when it returns.
        """
        failed = c_size_t(0)
        result = self._batch(
            destinations,
            sources,
            sizes,
            count,
            byref(self._attributes),
            byref(self._first),
            1,
            byref(failed),
            stream,
        )
        if result:
            raise self._error("cuMemcpyBatchAsync", result)

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        """Queue one copy."""
        self.call("cuMemcpyAsync", destination, source, size, stream)

    def copy_rows(
        self, destination: int, destination_step: int, source: int, source_step: int, width: int, rows: int, stream: int
    ) -> None:
        """Queue one copy of ``rows`` pieces of ``width`` bytes, each so many bytes after the one before."""
        what = _Copy2D(
            source_type=_UNIFIED,
            source=source,
            source_pitch=source_step,
            destination_type=_UNIFIED,
            destination=destination,
            destination_pitch=destination_step,
            width=width,
            height=rows,
        )
        self.call("cuMemcpy2DAsync_v2", byref(what), stream)
