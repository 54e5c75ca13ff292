"""The worker connector of a rank on a GPU, with the real daemon and mover; driver and model alone are made up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from hpkv_client.errors import LayoutRefused
from hpkv_client.settings import from_environment
from hpkv_client.topology import ModelShape, Parallel, shard_of
from hpkv_client.types import KEY_BYTES, Keys, block_key, typed_digest
from hpkv_client.wire import handle_to_wire, shard_to_wire
from tests.cuda.gpus import FIRST, FakeCuda, GpuNode, gpu_tensor
from tests.support import hashes, wait_until

pytestmark = [
    pytest.mark.engine,
    # Of the engine's own imports.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LAYERS, HEADS, TOKENS, WIDTH, BLOCKS = 3, 2, 16, 32, 6
BLOCK = HEADS * TOKENS * WIDTH
LATE_SECONDS = 0.2
KEYS = Keys.of([block_key(typed_digest("gpu"), 0, prefix) for prefix in hashes(*range(BLOCKS))]).blob


@dataclass
class Engine:
    """A rank as its engine sees it. ``compute`` puts a kernel into its stream that fills a block of all layers."""

    worker: Any
    kv: Any
    compute: Callable[[int, int], None]

    def step(self, loads: Any = (), stores: Any = ()) -> None:
        """What vLLM calls in one step."""
        from hpkv_vllm.metadata import StepMetadata

        step = StepMetadata(loads=list(loads), stores=list(stores))
        self.worker.start_loads(step)
        self.worker.start_stores(step)
        self.worker.poll(idle=False)

    def stored(self) -> dict[int, int]:
        """Store jobs that ended since the last call."""
        from hpkv_vllm.metadata import StepMetadata

        self.worker.poll(idle=True)
        told = self.worker.metadata(StepMetadata())
        return told.stored if told else {}

    def loaded(self) -> tuple[set[str], set[str]]:
        """Loads that ended since the last call, and which of them failed."""
        self.worker.poll(idle=True)
        return self.worker.results()  # type: ignore[no-any-return]


def a_store(job: int, blocks: list[int]) -> Any:
    from hpkv_vllm.metadata import Store

    return Store("part", job, True, None, KEYS[: len(blocks) * KEY_BYTES], blocks)


@pytest.fixture
def start(node: GpuNode, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Engine]]:
    """Starts the only rank of an engine."""
    pytest.importorskip("vllm")
    from hpkv_vllm import compat, worker
    from hpkv_vllm.metadata import Part
    from hpkv_vllm.regions import GpuMemory
    from hpkv_vllm.shards import PartShard, prove_runs

    started: list[tuple[Any, int]] = []
    monkeypatch.setattr(compat, "gpu_memory", lambda: GpuMemory(cuda.driver, lambda: None))

    def shards_of(config: Any, groups: Any, caches: Any, memory: Any, control: Any, *rest: Any) -> list[PartShard]:
        del config, groups
        engine, gpu = rest[-2:]
        tensors, regions = compat.kv_tensors(caches, memory, gpu)
        shard = shard_of(ModelShape(HEADS), Parallel(), tensors, BLOCKS, TOKENS)
        for tensor, layer in zip(tensors, shard.layers, strict=True):
            prove_runs(tensor, layer, BLOCKS, caches[tensor.name], regions[tensor.region])
        registration = {
            "rank": 0,
            "world": 1,
            "model": "test",
            "strategy": "",
            "place": "tp0",
            "namespace": typed_digest("gpu"),
            "device": regions[0].device,
            "regions": [handle_to_wire(region.handle) for region in regions],
            "control": handle_to_wire(control.handle),
            **shard_to_wire(shard),
        }
        return [PartShard(Part("part", 0, TOKENS, 0, False, engine), shard, registration)]

    monkeypatch.setattr(worker, "shards_of", shards_of)

    def begin(name: str) -> Engine:
        settings = from_environment(node.observed.handle.env)
        pointer = cuda.allocate(LAYERS * BLOCKS * BLOCK)
        stream = cuda.driver.stream()
        monkeypatch.setattr(compat, "compute_stream", lambda: stream)
        whole = gpu_tensor(cuda, pointer, LAYERS * BLOCKS * BLOCK)
        kv = whole.view(LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)
        config = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))
        connector = worker.WorkerConnector(config, None, settings, name)
        started.append((connector, pointer))
        assert connector.memory_context() is None
        connector.register({f"model.layers.{layer}.attn": kv[layer] for layer in range(LAYERS)})
        for keeper in connector._keepers.values():
            assert keeper.wait(10.0, lambda link: link.usable).usable

        def compute(block: int, value: int) -> None:
            cuda.driver.enter(cuda.devices[FIRST])
            for layer in range(LAYERS):
                cuda.fill_later(pointer + (layer * BLOCKS + block) * BLOCK, value, BLOCK, stream)

        return Engine(connector, kv, compute)

    yield begin
    for connector, _ in started:
        connector.shutdown()
    for _, pointer in started:
        cuda.free(pointer)


@contextmanager
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of the engine take their time."""
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_CUDA_DELAY_US", str(int(LATE_SECONDS * 1e6)))
        yield


@pytest.mark.parametrize("paged", [False, True])
def test_a_block_is_stored_as_the_step_leaves_it_and_loaded_whole(
    node: GpuNode, start: Callable[[str], Engine], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, paged: bool
) -> None:
    from hpkv_vllm.metadata import Load, Piece

    if paged:
        monkeypatch.setattr(cuda, "allocate", cuda.map_pages)

    writer = start("writer")
    with late(monkeypatch):
        for block in range(4):
            writer.compute(block, 10 + block)
        began = time.monotonic()
        writer.step(stores=[a_store(1, [0, 1, 2, 3])])
        assert time.monotonic() - began < LATE_SECONDS / 2, "the engine's step waited for its stream"
        assert wait_until(writer.stored) == {1: 1}
        assert time.monotonic() - began > LATE_SECONDS / 2
    assert node.observed.stats()["pool_resident_blocks"] == 4
    reader = start("reader")
    session = reader.worker._keepers["part"].link.session
    channel = node.observed.handle.client()
    channel.session = session
    found = channel.call("match", {"keys": KEYS[: 4 * KEY_BYTES]}, 30.0)
    assert found["hit"] == 4
    reader.step(loads=[Load("request", [Piece("part", 7, found["lease"], 0, [5, 4, 3, 2])])])
    loaded, failed = wait_until(lambda: next((ended for ended in [reader.loaded()] if ended[0]), None))
    # At once: whatever comes later comes too late.
    values = [set(reader.kv[:, block].flatten().tolist()) for block in (5, 4, 3, 2)]
    assert (loaded, failed) == ({"request"}, set())
    assert values == [{10}, {11}, {12}, {13}]


def test_an_engine_that_loses_its_gpu_loses_its_stores_and_not_its_step(
    node: GpuNode, cuda: FakeCuda, start: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = start("writer")
    with late(monkeypatch):
        writer.compute(0, 1)
        with cuda.failing(monkeypatch, "cuEventQuery 0 700"):
            writer.step(stores=[a_store(1, [0])])
            assert wait_until(writer.stored) == {1: 1}
        writer.step(stores=[a_store(2, [0])])
        assert wait_until(writer.stored) == {2: 1}
    assert node.observed.stats()["pool_resident_blocks"] == 0


def test_a_store_whose_step_takes_too_long_is_not_sent_and_its_blocks_are_free(
    node: GpuNode, start: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = start("writer")
    before = node.observed.stats()["offered_blocks"]
    object.__setattr__(writer.worker._settings, "load_deadline_seconds", 0.05)
    with late(monkeypatch):
        writer.compute(0, 1)
        writer.step(stores=[a_store(1, [0])])
        assert wait_until(writer.stored) == {1: 1}
    assert node.observed.stats()["offered_blocks"] == before
    assert writer.worker._keepers["part"].link.usable


def test_memory_that_cannot_be_shared_turns_caching_off(
    start: Callable[[str], Engine], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "allocate", lambda size: cuda.map_pages(size, handle_types=0))
    engine = start("writer")
    assert engine.worker.parts() is None
    engine.step(stores=[a_store(1, [0])])
    assert engine.stored() == {1: 1}


def test_an_engine_that_may_sleep_runs_without(start: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    from hpkv_vllm import compat

    refuse = compat.refuse_sleep
    asleep = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
    monkeypatch.setattr(compat, "refuse_sleep", lambda _: refuse(asleep))
    engine = start("writer")
    assert engine.worker.parts() is None
    with pytest.raises(LayoutRefused, match="without --enable-sleep-mode"):
        refuse(asleep)


def test_kernels_that_may_order_elements_differently_share_nothing() -> None:
    from hpkv_vllm.identity import element_encoding

    def encoding(device: str, backend: str | None) -> str:
        attention = SimpleNamespace(backend=backend, backend_per_kind={}, use_trtllm_attention=None)
        return element_encoding(
            SimpleNamespace(device_config=SimpleNamespace(device_type=device), attention_config=attention)
        )

    found = [
        encoding("cuda", None),
        encoding("cuda", "FLASHINFER"),
        encoding("cuda", "FLASH_ATTN"),
        encoding("cpu", None),
    ]
    assert len(set(found)) == len(found)
    assert encoding("cuda", None) == found[0]
