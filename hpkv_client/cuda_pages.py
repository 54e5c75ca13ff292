"""Memory of a GPU that is mapped page by page: its physical pieces, out of one process and into another as descriptors.

A descriptor holds its piece's memory as a mapping does: whoever keeps one keeps the memory from being freed. So they
live as short as they can, in the engine, on their way and in the mover.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from typing import NamedTuple

from hpkv_client.cuda import Driver, Location
from hpkv_client.errors import LayoutRefused

DESCRIPTOR = 1
"""CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: a bit of what a piece was made for, and a way to pass it on."""
FABRIC = 8
"""CU_MEM_HANDLE_TYPE_FABRIC: another of those bits."""

_ON_DEVICE = 1
_READ_WRITE = 3


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("metadata", c_void_p),
        ("flags", c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class Piece(NamedTuple):
    """One physical allocation, the whole of it, and where it is mapped."""

    start: int
    size: int


def pieces_under(driver: Driver, pointer: int, size: int) -> tuple[Piece, ...]:
    """The pieces under a range, in its order; the first may begin before it, the last may end behind it.

    Raises ``LayoutRefused`` where the driver's answers contradict each other, ``CudaError``.
    """
    pieces: list[Piece] = []
    reached = pointer
    while reached < pointer + size:
        piece = Piece(*driver.allocation(reached))
        if not piece.start <= reached < piece.start + piece.size or (pieces and piece.start != reached):
            raise LayoutRefused(
                f"the driver places address {reached:#x} in {piece.size} bytes from {piece.start:#x} on"
            )
        pieces.append(piece)
        reached = piece.start + piece.size
    return tuple(pieces)


@contextmanager
def _handle_at(driver: Driver, address: int) -> Iterator[int]:
    handle = c_uint64()
    driver.call("cuMemRetainAllocationHandle", byref(handle), address)
    try:
        yield handle.value
    finally:
        driver.call("cuMemRelease", handle.value)


def handle_types(driver: Driver, piece: Piece) -> int:
    """The ways of passing it on for which it was made, a bit each. Raises ``LayoutRefused`` if it is not one piece."""
    properties = _Properties()
    with _handle_at(driver, piece.start) as handle, _handle_at(driver, piece.start + piece.size - 1) as last:
        if handle != last:
            raise LayoutRefused(f"the {piece.size} bytes of memory at {piece.start:#x} are several pieces")
        driver.call("cuMemGetAllocationPropertiesFromHandle", byref(properties), handle)
    return int(properties.handle_types)


def descriptor_of(driver: Driver, piece: Piece) -> int:
    """A descriptor of the piece. The caller's, to be closed soon."""
    descriptor = c_int(-1)
    with _handle_at(driver, piece.start) as handle:
        driver.call("cuMemExportToShareableHandle", byref(descriptor), handle, DESCRIPTOR, 0)
    return descriptor.value


class MappedPieces:
    """Another process' pieces, mapped here one behind the other at ``address``. ``close`` it.

    Needs a current context on ``device``, whose memory it is.
    """

    def __init__(self, driver: Driver, device: int, size: int) -> None:
        self._driver = driver
        self._device = device
        self._pieces: list[Piece] = []
        self.size = size
        self.filled = 0
        """Bytes under which there is memory."""
        address = c_uint64()
        driver.call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        self.address = address.value

    def add(self, descriptor: int, size: int) -> None:
        """Map the next piece. The descriptor stays the caller's, and is not needed afterwards."""
        if size > self.size - self.filled:
            raise LayoutRefused(f"more than {self.size} bytes of memory in pieces")
        handle = c_uint64()
        self._driver.call("cuMemImportFromShareableHandle", byref(handle), descriptor, DESCRIPTOR)
        try:
            piece = Piece(self.address + self.filled, size)
            self._driver.call("cuMemMap", piece.start, size, 0, handle.value, 0)
            self._pieces.append(piece)
            self.filled += size
        finally:
            # The mapping holds the memory.
            self._driver.give_back("cuMemRelease", handle.value)

    def open(self) -> None:
        """Let the device read and write all of it."""
        access = _Access(Location(_ON_DEVICE, self._device), _READ_WRITE)
        self._driver.call("cuMemSetAccess", self.address, self.size, byref(access), c_size_t(1))

    def close(self) -> None:
        """Unmap it: no copy may touch it any more. The memory is free when its owner has let go of it, too."""
        while self._pieces:
            piece = self._pieces.pop()
            self._driver.give_back("cuMemUnmap", piece.start, piece.size)
        if self.address:
            address, self.address = self.address, 0
            self._driver.give_back("cuMemAddressFree", address, self.size)
