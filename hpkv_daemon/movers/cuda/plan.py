"""Which bytes a copy takes from where: runs and block ids become arrays of addresses. Pure numpy, no driver."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hpkv_client.types import Run

Integers = npt.NDArray[np.int64]

SHORT_BYTES = 32 << 10
"""Copies of fewer bytes cost a GPU as much time as this many: they are worth a detour."""

_MOST_STEP = (1 << 31) - 1
"""Of a strided copy (CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU)."""


class Rows(NamedTuple):
    """A run: ``device`` is the address of its first byte in block 0, ``host`` its offset in the copy on the host."""

    device: int
    block_stride: int
    host: int
    width: int
    pieces: int
    device_step: int
    host_step: int


class Batch(NamedTuple):
    """Copies, one per entry: addresses on the device and in page-locked host memory, and bytes."""

    device: Integers
    host: Integers
    size: Integers


class CopyPlan:
    """How blocks of one rank travel. ``bases``: device address of each region.

    A *staged* rank's blocks pass through a buffer in host memory, ``staged_bytes`` for each: there a block lies as on
    the device, in few long pieces, and the CPU brings it into its canonical order. Other blocks go straight to and from
    their slot. Pieces that are shorter than ``short`` and lie at equal steps, layer by layer for instance, travel
    ``by_rows``: the device gathers them, in one strided copy for each of ``rows``. ``short_bytes`` is the size of
    pieces that are short for the link and cannot be helped; 0 if none is.
    """

    def __init__(
        self, runs: Sequence[Run], bases: Sequence[int], most_staged_bytes: int, short: int = SHORT_BYTES
    ) -> None:
        self.block_bytes = sum(run.size for run in runs)
        straight = [
            Rows(
                bases[run.region] + run.local_offset,
                run.block_stride,
                run.canonical_offset,
                run.fragment,
                run.count,
                run.local_step,
                run.canonical_step,
            )
            for run in runs
        ]
        spans = _spans(straight)
        worthwhile = 2 * len(spans) <= sum(rows.pieces for rows in straight)
        self.staged = _shortest(straight) < short and worthwhile and self.block_bytes <= most_staged_bytes
        self.rows = spans if self.staged else straight
        self.staged_bytes = self.block_bytes if self.staged else 0
        shortest = _shortest(self.rows)
        stacks = _stacked(self.rows)
        few = 2 * len(stacks) <= sum(rows.pieces for rows in self.rows)
        # A call takes the mover some microseconds, in which the link moves about as much.
        self.by_rows = shortest < short and few and self.block_bytes >= short * len(stacks)
        if self.by_rows:
            self.rows = stacks
        self.short_bytes = shortest if shortest < short and not self.by_rows else 0
        self._order = [placed for rows in straight for placed in _placed(rows, spans)] if self.staged else []
        self.pieces = sum(rows.pieces for rows in self.rows)
        """Copies for each block."""
        self.reach = max((row.host + (row.pieces - 1) * row.host_step + row.width for row in self.rows), default=1)
        """End of what a block's copies touch on the host."""
        self._device = _each(self.rows, lambda rows, i: rows.device + i * rows.device_step)
        self._stride = _each(self.rows, lambda rows, _: rows.block_stride)
        self._host = _each(self.rows, lambda rows, i: rows.host + i * rows.host_step)
        self._size = _each(self.rows, lambda rows, _: rows.width)

    def batch(self, blocks: Integers, hosts: Integers) -> Batch:
        """The copies of some blocks; ``hosts`` has the host address of each block's copy."""
        shape = (len(blocks), self.pieces)
        device = self._device + blocks[:, None] * self._stride
        host = hosts[:, None] + self._host
        size = np.broadcast_to(self._size, shape)
        whole = Batch(device.reshape(-1), host.reshape(-1), np.ascontiguousarray(size).reshape(-1))
        return _joined(whole) if self.pieces == 1 else whole

    def gather(self, pool: npt.NDArray[np.uint8], offset: int, staging: npt.NDArray[np.uint8]) -> None:
        """Bring the block at ``offset`` of the pool into the order of the device; ``staging`` is its buffer."""
        for at, rows in self._order:
            _view(staging, at, rows.device_step, rows)[...] = _view(pool, offset + rows.host, rows.host_step, rows)

    def scatter(self, staging: npt.NDArray[np.uint8], pool: npt.NDArray[np.uint8], offset: int) -> None:
        """Undo ``gather``."""
        for at, rows in self._order:
            _view(pool, offset + rows.host, rows.host_step, rows)[...] = _view(staging, at, rows.device_step, rows)


def _shortest(rows: Sequence[Rows]) -> int:
    return min((row.width for row in rows), default=SHORT_BYTES)


def _stacked(rows: Sequence[Rows]) -> list[Rows]:
    """The same pieces, neighbours that lie at equal steps on both sides as the rows of one copy."""
    stacks: list[Rows] = []
    for row in rows:
        last = stacks[-1] if stacks else None
        if row.pieces > 1 or last is None or (last.width, last.block_stride) != (row.width, row.block_stride):
            stacks.append(row)
            continue
        device_step = (row.device - last.device) // last.pieces
        host_step = (row.host - last.host) // last.pieces
        grown = last._replace(pieces=last.pieces + 1, device_step=device_step, host_step=host_step)
        steps = (last.device_step, last.host_step) if last.pieces > 1 else (device_step, host_step)
        lies_there = (row.device - last.device, row.host - last.host) == tuple(last.pieces * step for step in steps)
        if lies_there and all(row.width <= step <= _MOST_STEP for step in steps):
            stacks[-1] = grown
        else:
            stacks.append(row)
    return stacks


def _each(rows: Sequence[Rows], value: Callable[[Rows, int], int]) -> Integers:
    return np.array([value(row, i) for row in rows for i in range(row.pieces)], np.int64)


def _view(memory: npt.NDArray[np.uint8], offset: int, step: int, rows: Rows) -> npt.NDArray[np.uint8]:
    # numpy checks that it lies inside.
    shape, strides = ((rows.width,), (1,)) if rows.pieces == 1 else ((rows.pieces, rows.width), (step, 1))
    return np.ndarray(shape, np.uint8, memory, offset, strides)


def _spans(straight: Sequence[Rows]) -> list[Rows]:
    """The same bytes in pieces that are as long as they can be on the device, and dense on the host."""
    # Layers that share their memory name it twice.
    pieces = {
        (rows.block_stride, rows.device + i * rows.device_step, rows.width)
        for rows in straight
        for i in range(rows.pieces)
    }
    spans: list[Rows] = []
    host = 0
    for stride, device, width in sorted(pieces):
        last = spans[-1] if spans else None
        if last and last.block_stride == stride and last.device + last.width == device:
            spans[-1] = last._replace(width=last.width + width)
        else:
            spans.append(Rows(device, stride, host, width, 1, 0, 0))
        host += width
    return spans


def _placed(rows: Rows, spans: Sequence[Rows]) -> Iterator[tuple[int, Rows]]:
    """Where the run's bytes lie in the staged block, and which they are; its pieces one by one if they lie apart."""
    at = bisect_right(spans, (rows.block_stride, rows.device), key=lambda span: (span.block_stride, span.device)) - 1
    span = spans[at]
    if rows.device + (rows.pieces - 1) * rows.device_step + rows.width <= span.device + span.width:
        yield span.host + rows.device - span.device, rows
        return
    for i in range(rows.pieces):
        device, host = rows.device + i * rows.device_step, rows.host + i * rows.host_step
        yield from _placed(Rows(device, rows.block_stride, host, rows.width, 1, 0, 0), spans)


def _joined(batch: Batch) -> Batch:
    """Neighbours that continue each other on both sides as one copy."""
    device, host, size = batch
    apart = (device[:-1] + size[:-1] != device[1:]) | (host[:-1] + size[:-1] != host[1:])
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    if len(starts) == len(size):
        return batch
    return Batch(device[starts], host[starts], np.add.reduceat(size, starts))


def cut(batch: Batch, origin: int, extent: int) -> Batch:
    """The same copies, none of them over a border between two extents of host memory that begin at ``origin``."""
    while True:
        device, host, size = batch
        room = extent - (host - origin) % extent
        over = np.flatnonzero(size > room)
        if not len(over):
            return batch
        first = size.copy()
        first[over] = room[over]
        batch = Batch(
            np.concatenate((device, device[over] + room[over])),
            np.concatenate((host, host[over] + room[over])),
            np.concatenate((first, size[over] - room[over])),
        )


def rows_of(plan: CopyPlan, block: int, host: int, origin: int, extent: int) -> Iterator[Rows]:
    """The copies of one block, those of a run together, with addresses instead of offsets; none over a border."""
    for rows in plan.rows:
        start, device = host + rows.host, rows.device + block * rows.block_stride
        end = start + (rows.pieces - 1) * rows.host_step + rows.width - 1
        if (start - origin) // extent == (end - origin) // extent:
            yield rows._replace(device=device, host=start)
            continue
        steps = np.arange(rows.pieces, dtype=np.int64)
        pieces = Batch(
            device + steps * rows.device_step, start + steps * rows.host_step, np.full(rows.pieces, rows.width)
        )
        for one_device, one_host, width in zip(*(array.tolist() for array in cut(pieces, origin, extent)), strict=True):
            yield Rows(one_device, 0, one_host, width, 1, 0, 0)
