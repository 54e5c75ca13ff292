"""The mover on a real GPU: two processes, real IPC, layouts of real models, every byte compared."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu_link import GpuLink
from hpkv_client.cuda import Driver
from hpkv_daemon.movers.base import Direction
from tests.support import is_gone, wait_until

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def torch() -> Any:
    """torch, with a GPU and a context on it."""
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("no GPU that torch can use")
    module.zeros(1, device="cuda")
    return module


@pytest.fixture(scope="module")
def driver(torch: Any) -> Driver:
    """The driver in this process, which is the engine."""
    del torch
    return Driver()


@pytest.fixture
def link(torch: Any, driver: Driver) -> Iterator[GpuLink]:
    """A mover of torch's device, with a pool."""
    device = driver.devices()[torch.cuda.current_device()]
    with GpuLink(f"cuda:{driver.uuid_of(device)}", gpu.POOL_BYTES) as link:
        yield link


@pytest.mark.parametrize("layout", gpu.LAYOUTS, ids=lambda layout: layout.name)
def test_blocks_of_real_models_come_back_byte_for_byte(
    torch: Any, driver: Driver, link: GpuLink, layout: gpu.Layout
) -> None:
    engine = gpu.Engine(torch, driver, link, layout)
    gpu.check_bytes(torch, link, engine)
    engine.close()


def test_a_store_after_its_event_has_what_the_kernel_wrote_every_time(
    torch: Any, driver: Driver, link: GpuLink
) -> None:
    from hpkv_vllm.cuda_export import ComputeStream
    from hpkv_vllm.order import StreamOrder

    engine = gpu.Engine(torch, driver, link, gpu.Layout("small", 4, 8, 16, 256))
    order: StreamOrder[int] = StreamOrder(ComputeStream(driver), lambda: torch.cuda.current_stream().cuda_stream)
    busy = torch.zeros((4096, 4096), device="cuda")
    block, slot = engine.order[0], engine.slots[0]
    for value in range(1, 201):
        busy = busy @ busy
        engine.memory.fill_(value)
        order.hold(value)
        assert wait_until(lambda: list(order.passed())) == [value]
        link.wait([link.submit(engine.attachment, Direction.STORE, [slot], [block])])
        assert set(link.pool.mapping[slot : slot + engine.layout.block_bytes]) == {value}
    engine.close()


def test_memory_that_a_dead_engine_had_is_free_again_while_the_mover_lives(
    torch: Any, driver: Driver, link: GpuLink
) -> None:
    del driver
    code = (
        "import sys, torch\n"
        "from hpkv_client.cuda import Driver\n"
        "from hpkv_vllm.cuda_export import export\n"
        "memory = torch.zeros(8 << 30, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize()\n"
        "handle = export(Driver(), memory.untyped_storage().data_ptr(), memory.numel())[1]\n"
        "print(handle.token.hex(), handle.offset, handle.size, flush=True); sys.stdin.read()\n"
    )
    path = [str(Path(__file__).parents[2] / folder) for folder in (".", "connectors")]
    code = f"import sys; sys.path[:0] = {path!r}\n" + code
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        token, offset, size = engine.stdout.readline().split()
        from hpkv_client.types import Layer, MemoryHandle, RankShard, Run

        handle = MemoryHandle("cuda_ipc", int(size), token=bytes.fromhex(token.decode()), offset=int(offset))
        shard = RankShard((Layer("layer.0", 1 << 20, (Run(0, 0, 1 << 20, 0, 1 << 20),)),), 8 << 10)
        attachment = link.attach(handle, [shard])
        while_mapped = torch.cuda.mem_get_info()[0]
        engine.kill()
    wait_until(lambda: is_gone(engine.pid))
    link.detach(attachment)
    wait_until(lambda: torch.cuda.mem_get_info()[0] > while_mapped + (7 << 30), 10, "the memory is still mapped")
    assert not is_gone(link.pid)
