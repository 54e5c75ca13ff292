"""Stores and loads of a GPU's KV through a real mover process: right to the byte, and how fast beside one plain copy.

    python -m benchmarks.gpu [--seconds 480] [--json FILE]

One script of at most eight minutes. It needs an NVIDIA GPU, its driver, torch with CUDA, numpy and msgpack, and this
checkout; no daemon, no installation. The engine is this process, its memory torch's; the mover is the one that hpkvd
starts. Speeds are ratios to one large copy between page-locked memory and the GPU, done right before and after.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu_link import GpuLink
from hpkv_client.cuda import Driver
from hpkv_client.topology import KvTensor, ModelShape, Parallel, shard_of
from hpkv_client.types import RankShard
from hpkv_daemon.movers.base import Direction

POOL_BYTES = 8 << 30
PLAIN_BYTES = 1 << 30
SAMPLE_BYTES = 2 << 30
ROUNDS = 7
STEPS = 200


@dataclass(frozen=True)
class Layout:
    """KV of a model in blocks of ``tokens``, split over ``tp`` ranks, the first of which is here; bfloat16."""

    name: str
    layers: int
    heads: int
    tokens: int
    width: int
    tp: int = 1
    token_major: bool = False
    latent: bool = False

    def shards(self, blocks: int) -> list[RankShard]:
        """The ranks' shards, as the connector would derive them."""
        heads = self.heads // self.tp
        elements = heads * self.tokens * self.width
        by_head, by_token = self.tokens * self.width, self.width
        if self.token_major:
            by_head, by_token = self.width, heads * self.width
        tensors = []
        for layer in range(self.layers):
            shape: tuple[int, ...] = (blocks, heads, self.tokens, self.width)
            stride: tuple[int, ...] = (elements, by_head, by_token, 1)
            if self.latent:
                shape, stride = (blocks, self.tokens, self.width), (elements, self.width, 1)
            tensors.append(KvTensor(f"layers.{layer}", 0, shape, stride, 2, layer * blocks * elements * 2))
        model = ModelShape(self.heads, self.latent)
        return [shard_of(model, Parallel(self.tp, rank), tensors, blocks, self.tokens) for rank in range(self.tp)]

    @property
    def canonical_bytes(self) -> int:
        """Of a block without parallelism."""
        return self.layers * self.heads * self.tokens * self.width * 2

    @property
    def block_bytes(self) -> int:
        """Of a block on one rank."""
        return self.canonical_bytes // self.tp


LAYOUTS = (
    Layout("Llama-3-8B, blocks of 16", 32, 8, 16, 256),
    Layout("Llama-3-8B, blocks of 32", 32, 8, 32, 256),
    Layout("Llama-3-70B TP8, blocks of 16", 80, 8, 16, 256, tp=8),
    Layout("Llama-3-70B TP8, blocks of 64", 80, 8, 64, 256, tp=8),
    Layout("Llama-3-70B TP4 token-major, blocks of 64", 80, 8, 64, 256, tp=4, token_major=True),
    Layout("DeepSeek MLA, blocks of 64", 61, 1, 64, 576, latent=True),
)


class Engine:
    """This process' GPU memory under one layout, attached to the mover."""

    def __init__(self, torch: Any, driver: Driver, link: GpuLink, layout: Layout) -> None:
        # Imported late: it is the connector's, and needs nothing of vLLM.
        from hpkv_vllm.cuda_export import export

        self.layout = layout
        self.blocks = max(8, SAMPLE_BYTES // layout.block_bytes)
        shards = layout.shards(self.blocks)
        self.run_bytes = min(run.fragment for run in shards[0].layers[0].runs)
        self.memory = torch.zeros(self.blocks * layout.block_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.device, handle, _ = export(driver, self.memory.untyped_storage().data_ptr(), self.memory.numel())
        self._link = link
        self.attachment = link.attach(handle, shards)
        slots = POOL_BYTES // 2 // layout.canonical_bytes
        order = random.Random(1)
        self.order = order.sample(range(self.blocks), min(self.blocks, slots))
        self.slots = [slot * layout.canonical_bytes for slot in order.sample(range(slots), len(self.order))]

    @property
    def bytes(self) -> int:
        """Of one sample."""
        return len(self.order) * self.layout.block_bytes

    def go(self, direction: Direction, second_half: bool = False) -> int:
        """Queue a copy of all blocks, to or from one half of the pool; its ticket."""
        base = POOL_BYTES // 2 if second_half else 0
        return self._link.submit(self.attachment, direction, [base + slot for slot in self.slots], self.order)

    def close(self) -> None:
        """Give the memory back."""
        self._link.detach(self.attachment)


def check_bytes(torch: Any, link: GpuLink, engine: Engine) -> None:
    """Random blocks, stored, wiped, loaded: equal to the byte; and in the pool in canonical order."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    engine.memory.random_(0, 256, generator=generator)
    before = engine.memory.clone()
    torch.cuda.synchronize()
    link.wait([engine.go(Direction.STORE)])
    layout = engine.layout
    piece = layout.block_bytes // layout.layers
    planes = before.view(layout.layers, engine.blocks, piece)
    if layout.tp == 1:
        check_pool(link, engine, planes)
    engine.memory.zero_()
    torch.cuda.synchronize()
    link.wait([engine.go(Direction.LOAD)])
    after = engine.memory.view(layout.layers, engine.blocks, piece)
    chosen = torch.tensor(engine.order, device="cuda")
    if not torch.equal(after[:, chosen], planes[:, chosen]):
        raise SystemExit(f"{layout.name}: what was loaded is not what was stored")


def check_pool(link: GpuLink, engine: Engine, planes: Any) -> None:
    """A few stored blocks lie in the pool layer after layer."""
    pool = np.frombuffer(link.pool.mapping, np.uint8)
    layout = engine.layout
    for index in (0, len(engine.order) // 2, len(engine.order) - 1):
        slot, block = engine.slots[index], engine.order[index]
        stored = pool[slot : slot + layout.block_bytes].reshape(layout.layers, -1)
        if not np.array_equal(stored, planes[:, block].cpu().numpy()):
            raise SystemExit(f"{layout.name}: block {block} is wrong in the pool")


def plain_speed(torch: Any, to_device: bool) -> float:
    """Bytes per second of one large asynchronous copy between page-locked memory and the GPU."""
    host = torch.empty(PLAIN_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(PLAIN_BYTES, dtype=torch.uint8, device="cuda")
    target, source = (device, host) if to_device else (host, device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    target.copy_(source, non_blocking=True)
    begin.record()
    target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return PLAIN_BYTES / (begin.elapsed_time(end) / 1e3)


def copy_speed(link: GpuLink, go: Callable[[], list[int]], size: int) -> float:
    """Bytes per second of copies through the mover, with all that lies between."""
    started = time.perf_counter()
    link.wait(go())
    return size / (time.perf_counter() - started)


def measure(torch: Any, link: GpuLink, engine: Engine, deadline: float) -> dict[str, Any]:
    """Ratios of store, load and both at once; medians of rounds that are each framed by plain copies."""
    ways: dict[str, tuple[Callable[[], list[int]], Callable[[], float], int]] = {
        "store": (lambda: [engine.go(Direction.STORE)], lambda: plain_speed(torch, False), 1),
        "load": (lambda: [engine.go(Direction.LOAD)], lambda: plain_speed(torch, True), 1),
        "both": (
            lambda: [engine.go(Direction.STORE, second_half=True), engine.go(Direction.LOAD)],
            lambda: plain_speed(torch, True) + plain_speed(torch, False),
            2,
        ),
    }
    found: dict[str, Any] = {
        "layout": engine.layout.name,
        "run_bytes": engine.run_bytes,
    }
    for name, (go, plain, times) in ways.items():
        link.wait(go())
        speeds, ratios = [], []
        for _ in range(ROUNDS):
            if time.monotonic() > deadline:
                break
            before = plain()
            speed = copy_speed(link, go, engine.bytes * times)
            after = plain()
            speeds.append(speed / 1e9)
            ratios.append(speed / statistics.fmean((before, after)))
        if ratios:
            found[name] = {
                "gigabytes_per_second": round(statistics.median(speeds), 2),
                "ratio": round(statistics.median(ratios), 3),
                "rounds": len(ratios),
            }
    return found


def decode_steps(torch: Any, weights: Any, activations: Any) -> Iterator[float]:
    """Seconds of steps that read all weights, as a decode step of a small batch does."""
    while True:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for weight in weights:
            activations = activations @ weight
        end.record()
        end.synchronize()
        yield begin.elapsed_time(end) / 1e3


def decode_slowdown(torch: Any, link: GpuLink, engine: Engine) -> dict[str, float]:
    """A decode step alone, and while blocks are stored all the time."""
    weights = [torch.zeros((8192, 8192), dtype=torch.bfloat16, device="cuda") for _ in range(32)]
    steps = decode_steps(torch, weights, torch.zeros((16, 8192), dtype=torch.bfloat16, device="cuda"))
    for _ in range(20):
        next(steps)
    alone = [next(steps) for _ in range(STEPS)]
    beside = []
    tickets = [engine.go(Direction.STORE), engine.go(Direction.STORE)]
    while len(beside) < STEPS:
        beside.append(next(steps))
        done = link.done()
        if done is not None:
            tickets.remove(done.ticket)
            tickets.append(engine.go(Direction.STORE))
    link.wait(tickets)
    return {
        "alone_milliseconds": round(statistics.median(alone) * 1e3, 3),
        "while_storing_milliseconds": round(statistics.median(beside) * 1e3, 3),
        "slowdown": round(statistics.median(beside) / statistics.median(alone), 3),
    }


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0, help="take at most about so long")
    parser.add_argument("--json", help="write what was found to this file, too")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds * 0.9
    import torch

    if not torch.cuda.is_available():
        sys.exit("no GPU here")
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    driver = Driver()
    device = f"cuda:{driver.uuid_of(driver.devices()[torch.cuda.current_device()])}"
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "layouts": []}
    with GpuLink(device, POOL_BYTES) as link:
        for layout in LAYOUTS:
            engine = Engine(torch, driver, link, layout)
            if not found["layouts"]:
                found["page_lock_seconds_per_gib"] = round(link.lock_all() / (POOL_BYTES >> 30), 3)
            check_bytes(torch, link, engine)
            found["layouts"].append(measure(torch, link, engine, deadline))
            print(json.dumps(found["layouts"][-1]), flush=True)
            if layout is LAYOUTS[0] and time.monotonic() < deadline:
                found["decode"] = decode_slowdown(torch, link, engine)
                print(json.dumps(found["decode"]), flush=True)
            engine.close()
    print(json.dumps(found, indent=2))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    sys.path.insert(0, "connectors")
    main()
