"""The mover on a real GPU: two processes, real IPC, layouts of real models, every byte compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import gpu_checks
from benchmarks.gpu import SMALL, Sizes
from benchmarks.gpu_engine import LAYOUTS, Engine, Layout
from benchmarks.gpu_link import GpuLink, find_checkout
from hpkv_client.cuda import Driver

pytestmark = pytest.mark.gpu
SIZES = Sizes()


@pytest.fixture(scope="module")
def torch() -> Any:
    """torch, with a GPU and a context on it."""
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("no GPU that torch can use")
    find_checkout()
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
    with GpuLink(f"cuda:{driver.uuid_of(device)}", SIZES.pool) as link:
        yield link


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_blocks_of_real_models_come_back_byte_for_byte(
    torch: Any, driver: Driver, link: GpuLink, layout: Layout
) -> None:
    engine = Engine(torch, driver, link, layout, SIZES.sample)
    gpu_checks.check_bytes(torch, link, engine)
    engine.close()


def test_a_store_after_its_event_has_what_the_kernel_wrote_every_time(
    torch: Any, driver: Driver, link: GpuLink
) -> None:
    gpu_checks.check_order(torch, driver, link, SMALL.sample, SIZES.ordered_stores)


def test_another_process_memory_is_moved_and_free_again_while_the_mover_lives(torch: Any, link: GpuLink) -> None:
    assert gpu_checks.check_peer(torch, link, SIZES.peer, paged=False) == "cuda_ipc"


def test_memory_mapped_page_by_page_is_moved_and_free_again_while_the_mover_lives(torch: Any, link: GpuLink) -> None:
    kind = gpu_checks.check_peer(torch, link, SIZES.peer, paged=True)
    if kind.startswith("refused"):
        pytest.skip(kind)
    assert kind == "cuda_fd"
