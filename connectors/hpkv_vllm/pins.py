"""Source blocks of stores, kept from being used again until every rank is through with them."""

from __future__ import annotations

from typing import Any

from hpkv_vllm import compat

_MAX_PINNED_SHARE = 4
"""At most one part in this many of the engine's blocks is pinned at any time."""


class Pins:
    """By store job. ``bind`` before use; engine core's thread only. ``world``: ranks that report each job."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._pool: Any = None
        self._jobs: dict[int, tuple[list[int], int]] = {}
        """Job -> its blocks, and how many ranks are through."""
        self._blocks = 0

    def bind(self, block_pool: Any) -> None:
        """The engine's blocks."""
        self._pool = block_pool

    def __bool__(self) -> bool:
        return bool(self._jobs)

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return int(self._pool.num_gpu_blocks) // _MAX_PINNED_SHARE - self._blocks

    @property
    def engine_is_empty(self) -> bool:
        """Whether neither a request nor a store holds any block of the engine."""
        return self._pool is not None and compat.nothing_is_held(self._pool)

    def pin(self, job: int, blocks: list[int]) -> None:
        """The job reads these blocks."""
        compat.touch(self._pool, blocks)
        self._jobs[job] = (blocks, 0)
        self._blocks += len(blocks)

    def through(self, job: int, ranks: int) -> None:
        """So many more ranks need the job's blocks no longer; the last one frees them."""
        blocks, before = self._jobs[job]
        if before + ranks < self._world:
            self._jobs[job] = (blocks, before + ranks)
            return
        compat.untouch(self._pool, blocks)
        self._blocks -= len(blocks)
        del self._jobs[job]
