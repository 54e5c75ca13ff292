"""How an engine shows its GPU memory to the daemon; nothing is read or written before its stream is through."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from hpkv_vllm import compat
from hpkv_vllm.cuda_export import ComputeStream, export
from hpkv_vllm.order import StreamOrder
from hpkv_vllm.regions import GpuMemory

from hpkv_client.cuda import CudaError
from hpkv_client.errors import LayoutRefused
from tests.cuda.gpus import FIRST, PART, FakeCuda, GpuNode, GpuRank, gpu_tensor
from tests.support import hashes, plain_shard, wait_until

LATE_SECONDS = 0.2
PREFIX = hashes("a")
SIZE = 8192


@pytest.fixture
def memory(cuda: FakeCuda) -> Iterator[int]:
    """An allocation of 4 MiB on the first GPU."""
    pointer = cuda.allocate(4 << 20)
    yield pointer
    cuda.free(pointer)


def test_a_handle_names_the_allocation_the_place_in_it_and_the_device(cuda: FakeCuda, memory: int) -> None:
    device, handle, _ = export(cuda.driver, memory + 4096, SIZE)
    assert device == f"cuda:{FIRST}"
    assert (handle.kind, handle.offset, handle.size, len(handle.token)) == ("cuda_ipc", 4096, SIZE, 64)
    assert export(cuda.driver, memory, SIZE)[1].token == handle.token


def test_a_part_of_a_gpu_is_named_as_such(cuda: FakeCuda) -> None:
    pointer = cuda.allocate(SIZE, PART)
    assert export(cuda.driver, pointer, SIZE)[0] == f"cuda:{PART}"
    cuda.free(pointer)


def test_what_leaves_its_allocation_is_refused(cuda: FakeCuda, memory: int) -> None:
    with pytest.raises(LayoutRefused, match="at an allocation's byte 4096 of 4194304"):
        export(cuda.driver, memory + 4096, 4 << 20)


@pytest.mark.parametrize("gpu", [FIRST, PART])
def test_an_export_that_the_driver_refuses_says_where_to_look(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, gpu: str
) -> None:
    pointer = cuda.allocate(SIZE, gpu)
    with cuda.failing(monkeypatch, "cuIpcGetMemHandle 1 801"), pytest.raises(LayoutRefused) as caught:
        export(cuda.driver, pointer, SIZE)
    assert "cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED (801)" in str(caught.value)
    assert ("MIG" in caught.value.hint) == (gpu == PART)
    cuda.free(pointer)


def test_tensors_of_one_storage_are_one_region(cuda: FakeCuda, memory: int) -> None:
    whole = gpu_tensor(cuda, memory, 4 << 20)
    caches = {f"layer.{n}": whole[n << 20 : (n + 1) << 20].view(4, 2, 16, 8192) for n in range(3)}
    gpu = GpuMemory(cuda.driver, lambda: None)
    tensors, regions = compat.kv_tensors(caches, compat.KvMemory(), lambda: gpu)
    (region,) = regions
    assert region.device == f"cuda:{FIRST}"
    assert region.handle.size == 4 << 20
    assert [tensor.offset for tensor in tensors] == [0, 1 << 20, 2 << 20]
    whole[5:8] = 7
    assert region.read(4, 5).tolist() == [0, 7, 7, 7, 0]


def test_rocm_calls_its_devices_cuda_and_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(LayoutRefused, match="built for ROCm"):
        compat.gpu_memory()


# -- order --------------------------------------------------------------------------------------------------


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's kernels take their time."""
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", str(int(LATE_SECONDS * 1e6)))


@pytest.fixture
def pair(node: GpuNode) -> Iterator[tuple[GpuRank, GpuRank]]:
    """Two engines of one block."""
    with (
        node.rank(plain_shard(SIZE, 1), engine="writer").register().ready() as writer,
        node.rank(plain_shard(SIZE, 1), engine="reader").register().ready() as reader,
    ):
        yield writer, reader


def stored(pair: tuple[GpuRank, GpuRank], order: StreamOrder[str] | None, stream: int) -> set[int]:
    """The bytes of a block that a kernel was filling with 7 when its store was given."""
    writer, reader = pair
    writer.memory[:] = 3
    writer.cuda.driver.enter(writer.cuda.devices[FIRST])
    writer.cuda.fill_later(writer.pointer, 7, SIZE, stream)
    if order is not None:
        order.hold("store")
        started = time.monotonic()
        assert wait_until(lambda: list(order.passed())) == ["store"]
        assert time.monotonic() - started > LATE_SECONDS / 2
    assert writer.store(PREFIX, [0]) == 1
    _, lease = reader.match(PREFIX)
    assert reader.load(lease, [0]) == 1
    assert reader.call("release", lease=lease)["released"]
    return set(reader.memory.tolist())


def test_what_waits_for_the_stream_is_what_the_kernel_wrote(pair: tuple[GpuRank, GpuRank], late: None) -> None:
    del late
    driver = pair[0].cuda.driver
    stream = driver.stream()
    assert stored(pair, StreamOrder(ComputeStream(driver), lambda: stream), stream) == {7}


def test_what_does_not_wait_is_something_else(pair: tuple[GpuRank, GpuRank], late: None) -> None:
    # If this held the new bytes, the test above would show nothing.
    del late
    assert stored(pair, None, pair[0].cuda.driver.stream()) == {3}


def test_messages_leave_in_order_each_after_its_own_moment(cuda: FakeCuda, memory: int, late: None) -> None:
    del late
    stream = cuda.driver.stream()
    order: StreamOrder[int] = StreamOrder(ComputeStream(cuda.driver), lambda: stream)
    seen = []
    for value in (1, 2, 3):
        cuda.fill_later(memory, value, SIZE, stream)
        order.hold(value)
    assert list(order.passed()) == []
    assert order.take(lambda value: value == 2) == [2]
    deadline = time.monotonic() + 5
    while len(seen) < 2 and time.monotonic() < deadline:
        for value in order.passed():
            assert cuda.bytes_at(memory, 1)[0] >= value
            seen.append(value)
    assert seen == [1, 3]
    assert len(order) == 0


def test_a_lost_context_is_told(cuda: FakeCuda, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    del memory
    stream = cuda.driver.stream()
    order: StreamOrder[int] = StreamOrder(ComputeStream(cuda.driver), lambda: stream)
    order.hold(1)
    with cuda.failing(monkeypatch, "cuEventQuery 0 700"), pytest.raises(CudaError) as caught:
        list(order.passed())
    assert caught.value.lost
    assert order.take(lambda _: True) == [1]
