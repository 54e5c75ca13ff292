"""What must be right on a real GPU: every byte, the order with the compute stream, memory that is given back.

Each check raises ``SystemExit`` that says what is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.gpu_engine import Engine, Layout
from benchmarks.gpu_link import ROOT, GpuLink
from hpkv_client.cuda import Driver
from hpkv_client.errors import HpkvError
from hpkv_client.types import Layer, MemoryHandle, RankShard, Run
from hpkv_daemon.movers.base import Direction

BLOCK_BYTES = 1 << 20
_PATIENCE_SECONDS = 60.0


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


def check_order(torch: Any, driver: Driver, link: GpuLink, sample_bytes: int, times: int) -> None:
    """A store that waits for its event has what the kernel before it wrote, every time."""
    from hpkv_vllm.cuda_export import ComputeStream
    from hpkv_vllm.order import StreamOrder

    engine = Engine(torch, driver, link, Layout("small", 4, 8, 16, 256), sample_bytes)
    order: StreamOrder[int] = StreamOrder(ComputeStream(driver), lambda: torch.cuda.current_stream().cuda_stream)
    busy = torch.zeros((4096, 4096), device="cuda")
    block, slot = engine.order[0], engine.slots[0]
    for value in range(1, times + 1):
        busy = busy @ busy
        engine.memory.fill_(value)
        order.hold(value)
        _await(lambda: list(order.passed()), "an event of the compute stream")
        link.wait([link.submit(engine.attachment, Direction.STORE, [slot], [block])])
        if set(link.pool.mapping[slot : slot + engine.layout.block_bytes]) != {value}:
            raise SystemExit(f"a store did not have what the kernel before it wrote, at its turn {value}")
    engine.close()


class Peer:
    """An engine in a process of its own, with ``size`` bytes on the GPU; with ``paged`` from expandable segments."""

    def __init__(self, size: int, paged: bool) -> None:
        settings = "expandable_segments:True" if paged else ""
        environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF=settings, PYTORCH_ALLOC_CONF=settings)
        command = [sys.executable, "-m", "benchmarks.gpu_peer", str(size)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        self.problem, handle = self._heard()
        handle["token"] = bytes.fromhex(handle.get("token", ""))
        self.handle = MemoryHandle(**handle) if not self.problem else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the process that plays an engine ended")
        return json.loads(line)

    def ask(self, *words: object) -> Any:
        """Have it do something; what it says."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return self._heard()

    def hand_over(self, path: Path) -> bool:
        """Have it send its descriptors, if its memory takes some; whether that is done. Raises ``HpkvError``."""
        if self.handle is None or self.handle.kind != "cuda_fd":
            return True
        done, problem = self.ask("hand_over", path)
        if problem:
            raise HpkvError(problem)
        return bool(done)

    def kill(self) -> None:
        """End it; ``wait`` until its memory is its no more."""
        self._process.kill()
        with self._process:
            self._process.wait()


def check_peer(torch: Any, link: GpuLink, size: int, paged: bool) -> str:
    """Another process' memory is stored and loaded byte for byte, and free when that has ended; what it was.

    ``paged`` memory that its engine cannot share is said, not an error: that is what the engine would say, too.
    """
    blocks = size // BLOCK_BYTES
    chosen = [blocks - 1, 0, blocks // 2]
    with Peer(size, paged) as peer:
        if peer.handle is None:
            return f"refused: {peer.problem}"
        shard = RankShard((Layer("layer.0", BLOCK_BYTES, (Run(0, 0, BLOCK_BYTES, 0, BLOCK_BYTES),)),), blocks)
        attachment = link.attach(peer.handle, [shard], peer.hand_over)
        digests = [peer.ask("digest", block * BLOCK_BYTES, BLOCK_BYTES) for block in chosen]
        slots = [number * BLOCK_BYTES for number in range(len(chosen))]
        link.wait([link.submit(attachment, Direction.STORE, slots, chosen)])
        if [sha256(link.pool.mapping[slot : slot + BLOCK_BYTES]).hexdigest() for slot in slots] != digests:
            raise SystemExit("what was stored from another process is not what is there")
        peer.ask("wipe")
        link.wait([link.submit(attachment, Direction.LOAD, slots, chosen)])
        if [peer.ask("digest", block * BLOCK_BYTES, BLOCK_BYTES) for block in chosen] != digests:
            raise SystemExit("what was loaded into another process is not what was stored")
        while_mapped = torch.cuda.mem_get_info()[0]
        peer.kill()
        link.detach(attachment)
        freed = while_mapped + size // 8 * 7
        _await(lambda: torch.cuda.mem_get_info()[0] >= freed, "the memory of an engine that is gone to be free")
    link.await_answer()
    return peer.handle.kind


def _await(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {_PATIENCE_SECONDS:.0f} s in vain for {what}")
        time.sleep(0.001)
