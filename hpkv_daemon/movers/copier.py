"""The copying itself: strided numpy assignments between an engine's mapping and the pool's."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hpkv_client.control import PAGE_BYTES, ControlPage
from hpkv_client.errors import LayoutRefused
from hpkv_client.memory import map_shared
from hpkv_client.types import MemoryHandle, Run

Bytes = npt.NDArray[np.uint8]


class _Piece(NamedTuple):
    """One run, ready to be indexed by block id: ``blocks[b]`` is ``(count, fragment)`` or ``(fragment,)``.

    ``offset``, ``shape`` and ``strides`` make a view of the same bytes in a slot of the pool.
    """

    blocks: Bytes
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class AttachedRank:
    """One rank's mapped memory. ``close`` unmaps it at once."""

    def __init__(
        self, regions: Sequence[MemoryHandle], control: MemoryHandle | None, runs: Sequence[Run], blocks: int
    ) -> None:
        self._mappings: list[mmap.mmap] = []
        self._pieces: list[_Piece] = []
        self.control: ControlPage | None = None
        self.block_bytes = sum(run.size for run in runs)
        try:
            self._map(regions, control)
            for run in runs:
                self._pieces.append(self._piece(run, blocks))
        except BaseException:
            self.close()
            raise

    def _map(self, regions: Sequence[MemoryHandle], control: MemoryHandle | None) -> None:
        for handle in regions:
            self._mappings.append(map_shared(handle))
        if control is not None:
            if control.size < PAGE_BYTES:
                raise LayoutRefused(f"a control page of {control.size} bytes; {PAGE_BYTES} are needed")
            self._mappings.append(map_shared(control))
            self.control = ControlPage(self._mappings[-1])

    def _piece(self, run: Run, blocks: int) -> _Piece:
        shape: tuple[int, ...]
        local: tuple[int, ...]
        canonical: tuple[int, ...]
        if run.count == 1:
            shape, local, canonical = (run.fragment,), (1,), (1,)
        else:
            shape = (run.count, run.fragment)
            local, canonical = (run.local_step, 1), (run.canonical_step, 1)
        # numpy checks that the view lies inside the mapping.
        view = np.ndarray(
            (blocks, *shape),
            np.uint8,
            self._mappings[run.region],
            run.local_offset,
            (run.block_stride, *local),
        )
        return _Piece(view, run.canonical_offset, shape, canonical)

    def store(self, pool: mmap.mmap, offset: int, block: int) -> None:
        """Copy the engine's ``block`` into the pool at byte ``offset``."""
        for blocks, start, shape, strides in self._pieces:
            np.ndarray(shape, np.uint8, pool, offset + start, strides)[...] = blocks[block]

    def load(self, pool: mmap.mmap, offset: int, block: int) -> None:
        """Fill the engine's ``block`` from the pool at byte ``offset``."""
        for blocks, start, shape, strides in self._pieces:
            blocks[block] = np.ndarray(shape, np.uint8, pool, offset + start, strides)

    def close(self) -> None:
        """Unmap everything; no copy may run."""
        self._pieces.clear()
        if self.control is not None:
            self.control.close()
            self.control = None
        for mapping in self._mappings:
            mapping.close()
        self._mappings.clear()
