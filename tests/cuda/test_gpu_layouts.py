"""Layouts of real models, a few blocks of each, through the mover as hpkvd starts it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hpkv_vllm.cuda_export import export

from benchmarks.gpu_engine import LAYOUTS, Layout
from benchmarks.gpu_link import GpuLink
from hpkv_client.topology import canonical_layout, place
from hpkv_daemon.movers.base import Direction
from tests.cuda.gpus import FIRST, FakeCuda
from tests.support import Bytes

BLOCKS, POOL_BYTES = 6, 160 << 20
ORDER, SLOTS = [4, 0, 3, 1], [2, 0, 3, 1]


@pytest.fixture
def link(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuLink]:
    """A mover of the first GPU."""
    for name, value in cuda.environment(FAKE_CUDA_DELAY_US=500).items():
        monkeypatch.setenv(name, str(value))
    with GpuLink(f"cuda:{FIRST}", POOL_BYTES) as link:
        yield link


@pytest.fixture
def memory(cuda: FakeCuda) -> Iterator[int]:
    """Device memory for the blocks of any of the layouts."""
    pointer = cuda.allocate(40 << 20)
    yield pointer
    cuda.free(pointer)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_blocks_of_real_models_come_back_byte_for_byte(
    cuda: FakeCuda, link: GpuLink, memory: int, layout: Layout
) -> None:
    size = BLOCKS * layout.block_bytes
    shards = layout.shards(BLOCKS)
    attachment = link.attach(export(cuda.driver, memory, size)[1], shards)
    offsets = [slot * layout.canonical_bytes for slot in SLOTS]
    kv: Bytes = cuda.bytes_at(memory, size)
    kv[:] = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    before = kv.copy()
    link.wait([link.submit(attachment, Direction.STORE, offsets, ORDER)])
    pool: Bytes = np.frombuffer(link.pool.mapping, np.uint8)
    for run in place(shards[0], canonical_layout(shards)):
        for block, offset in zip(ORDER, offsets, strict=True):
            for i in range(run.count):
                here = run.local_offset + block * run.block_stride + i * run.local_step
                there = offset + run.canonical_offset + i * run.canonical_step
                assert np.array_equal(pool[there : there + run.fragment], before[here : here + run.fragment])
    kv[:] = 0
    link.wait([link.submit(attachment, Direction.LOAD, offsets, ORDER)])
    planes = (layout.layers, BLOCKS, layout.block_bytes // layout.layers)
    assert np.array_equal(kv.reshape(planes)[:, ORDER], before.reshape(planes)[:, ORDER])
    assert not kv.reshape(planes)[:, [2, 5]].any()
    del pool, kv
    link.detach(attachment)
