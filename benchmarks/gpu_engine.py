"""KV of real models on a GPU: the layouts, and this process' memory under one of them as an engine has it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_link import GpuLink
from hpkv_client.cuda import Driver
from hpkv_client.topology import KvTensor, ModelShape, Parallel, shard_of
from hpkv_client.types import RankShard
from hpkv_daemon.movers.base import Direction


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

    def __init__(self, torch: Any, driver: Driver, link: GpuLink, layout: Layout, sample_bytes: int) -> None:
        from hpkv_vllm.cuda_export import export

        self.layout = layout
        self.blocks = max(8, sample_bytes // layout.block_bytes)
        shards = layout.shards(self.blocks)
        self.run_bytes = min(run.fragment for run in shards[0].layers[0].runs)
        self.memory = torch.zeros(self.blocks * layout.block_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.device, handle, _ = export(driver, self.memory.untyped_storage().data_ptr(), self.memory.numel())
        self._link = link
        self.attachment = link.attach(handle, shards)
        self._half = link.pool.handle.size // 2
        slots = self._half // layout.canonical_bytes
        order = random.Random(1)
        self.order = order.sample(range(self.blocks), min(self.blocks, slots))
        self.slots = [slot * layout.canonical_bytes for slot in order.sample(range(slots), len(self.order))]

    @property
    def bytes(self) -> int:
        """Of one sample."""
        return len(self.order) * self.layout.block_bytes

    def go(self, direction: Direction, second_half: bool = False) -> int:
        """Queue a copy of all blocks, to or from one half of the pool; its ticket."""
        base = self._half if second_half else 0
        return self._link.submit(self.attachment, direction, [base + slot for slot in self.slots], self.order)

    def close(self) -> None:
        """Give the memory back."""
        self._link.detach(self.attachment)
