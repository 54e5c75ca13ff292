"""Known models under the strategies people run them with: every number here was worked out by hand.

The oracle splits a real numpy tensor over the ranks as vLLM does, then checks the registered runs byte by byte.
Tokens of a block and bytes of an element are those of the model in production, but two blocks have to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pytest

from hpkv_client.topology import KvTensor, ModelShape, Parallel, canonical_layout, place, shard_of

Bytes = npt.NDArray[np.uint8]
BLOCKS = 2


@dataclass(frozen=True)
class Row:
    """One model (or KV-cache group of it) under one strategy, and what must come of it."""

    id: str
    kv_heads: int
    layers: int
    token_bytes: int
    """Of one layer and one KV head: K and V, or the latent."""
    stages: tuple[int, ...]
    """Layers of each pipeline stage."""
    tp_size: int = 1
    block_tokens: int = 16
    latent: bool = False
    pcp_size: int = 1
    dcp_size: int = 1
    interleave: int = 1
    nodes: int = 1
    token_major: bool = False
    # By hand:
    replicas: int = 1
    rank_bytes: tuple[int, ...] = ()
    """Bytes of one block on each rank of tp_rank 0, by stage."""
    node_bytes: tuple[int, ...] = ()
    """Bytes of one block in the pool of each node."""
    runs: tuple[int, ...] = ()
    """Runs of the first rank of each stage once neighbours are merged: layers are apart in memory."""
    scopes: tuple[str, ...] = field(default=("",))
    """Which heads each node holds, as its layers' names tell."""


# Llama 3 70B: 80 layers, 8 KV heads of 128, bfloat16: 512 bytes of K and V per head and token.
# One head of 16 tokens: 8 KiB; all heads of all layers: 5 MiB.
LLAMA_70B = Row(
    "Llama-3-70B TP8",
    kv_heads=8,
    layers=80,
    token_bytes=512,
    stages=(80,),
    tp_size=8,
    rank_bytes=(80 * 8192,),
    node_bytes=(80 * 65536,),
    runs=(80,),
)
# Qwen2.5 7B: 28 layers, 4 KV heads of 128.
QWEN_7B = Row(
    "Qwen2.5-7B TP2xPP2",
    kv_heads=4,
    layers=28,
    token_bytes=512,
    stages=(14, 14),
    tp_size=2,
    rank_bytes=(14 * 16384, 14 * 16384),
    node_bytes=(28 * 32768,),
    runs=(14, 14),
)
# Qwen3 235B A22B: 94 layers, 4 KV heads of 128; TP8 and experts in parallel: two ranks hold each head.
QWEN_235B = Row(
    "Qwen3-235B TP8+EP",
    kv_heads=4,
    layers=94,
    token_bytes=512,
    stages=(94,),
    tp_size=8,
    replicas=2,
    rank_bytes=(94 * 8192,),
    node_bytes=(94 * 32768,),
    runs=(94,),
)
# DeepSeek V3: 61 layers, one latent of 512 + 64 in bfloat16: 1152 bytes per token; blocks of 64 tokens.
DEEPSEEK = Row(
    "DeepSeek-V3 TP8",
    kv_heads=128,
    layers=61,
    token_bytes=1152,
    stages=(61,),
    tp_size=8,
    block_tokens=64,
    latent=True,
    replicas=8,
    rank_bytes=(61 * 73728,),
    node_bytes=(61 * 73728,),
    runs=(61,),
)
DEEPSEEK_TWO_NODES = Row(
    "DeepSeek-V3 TP16 on two nodes",
    kv_heads=128,
    layers=61,
    token_bytes=1152,
    stages=(61,),
    tp_size=16,
    block_tokens=64,
    latent=True,
    nodes=2,
    # Each node keeps the latents once: eight of its ranks hold them.
    replicas=8,
    rank_bytes=(61 * 73728,),
    node_bytes=(61 * 73728, 61 * 73728),
    runs=(61,),
    scopes=("", ""),
)
# vLLM gives the one layer that is left over to the last stage but one; the MTP layer runs on the last.
DEEPSEEK_PP4 = Row(
    "61 layers and MTP on PP4",
    kv_heads=128,
    layers=62,
    token_bytes=1152,
    stages=(15, 15, 16, 16),
    block_tokens=64,
    latent=True,
    rank_bytes=(15 * 73728, 15 * 73728, 16 * 73728, 16 * 73728),
    node_bytes=(62 * 73728,),
    runs=(15, 15, 16, 16),
)
# Gemma 3 27B: 62 layers, 16 KV heads of 128; every sixth layer sees all tokens (10 of them), 52 a window.
GEMMA_FULL = Row(
    "Gemma-3-27B TP4, full attention",
    kv_heads=16,
    layers=10,
    token_bytes=512,
    stages=(10,),
    tp_size=4,
    rank_bytes=(10 * 32768,),
    node_bytes=(10 * 131072,),
    runs=(10,),
)
GEMMA_WINDOW = Row(
    "Gemma-3-27B TP4, one group of windows",
    kv_heads=16,
    layers=10,
    token_bytes=512,
    stages=(10,),
    tp_size=4,
    token_major=True,
    rank_bytes=(10 * 32768,),
    node_bytes=(10 * 131072,),
    runs=(10,),
)
# gpt-oss 120B: 36 layers, 8 KV heads of 64; 18 with a window, 18 without.
GPT_OSS = Row(
    "gpt-oss-120b TP2, one group",
    kv_heads=8,
    layers=18,
    token_bytes=256,
    stages=(18,),
    tp_size=2,
    rank_bytes=(18 * 16384,),
    node_bytes=(18 * 32768,),
    runs=(18,),
)
# Falcon 7B: one KV head of 64, 32 layers.
MQA = Row(
    "MQA TP8",
    kv_heads=1,
    layers=32,
    token_bytes=256,
    stages=(32,),
    tp_size=8,
    replicas=8,
    rank_bytes=(32 * 4096,),
    node_bytes=(32 * 4096,),
    runs=(32,),
)
LLAMA_TWO_NODES = Row(
    "Llama-3-70B TP16 on two nodes",
    kv_heads=8,
    layers=80,
    token_bytes=512,
    stages=(80,),
    tp_size=16,
    nodes=2,
    replicas=2,
    rank_bytes=(80 * 8192,),
    node_bytes=(80 * 32768, 80 * 32768),
    runs=(80,),
    scopes=("[0:4/8]", "[4:8/8]"),
)
LLAMA_PP_OVER_NODES = Row(
    "Llama-3-70B TP8xPP2 on two nodes",
    kv_heads=8,
    layers=80,
    token_bytes=512,
    stages=(40, 40),
    tp_size=8,
    nodes=2,
    rank_bytes=(40 * 8192, 40 * 8192),
    node_bytes=(40 * 65536, 40 * 65536),
    runs=(40, 40),
    scopes=("", ""),
)
# Tokens dealt out one by one: of a block of 8 x 16 tokens each rank holds every eighth.
DEEPSEEK_DCP = Row(
    "DeepSeek-V3 TP8 DCP8",
    kv_heads=128,
    layers=61,
    token_bytes=1152,
    stages=(61,),
    tp_size=8,
    block_tokens=64 * 8,
    latent=True,
    dcp_size=8,
    rank_bytes=(61 * 73728,),
    node_bytes=(61 * 73728 * 8,),
    runs=(61,),
)
# Qwen3 235B, TP8 DCP2: the two ranks of each head have one half of its tokens each, sixteen at a time.
QWEN_DCP = Row(
    "Qwen3-235B TP8 DCP2",
    kv_heads=4,
    layers=94,
    token_bytes=512,
    stages=(94,),
    tp_size=8,
    block_tokens=64,
    dcp_size=2,
    interleave=16,
    rank_bytes=(94 * 16384,),
    node_bytes=(94 * 131072,),
    runs=(94,),
)
# PCP2 doubles the ranks of each latent to four, and DCP2 leaves two equal halves of the tokens.
DEEPSEEK_PCP = Row(
    "DeepSeek-V3 TP2 PCP2 DCP2",
    kv_heads=128,
    layers=61,
    token_bytes=1152,
    stages=(61,),
    tp_size=2,
    block_tokens=128,
    latent=True,
    pcp_size=2,
    dcp_size=2,
    replicas=2,
    rank_bytes=(61 * 73728,),
    node_bytes=(61 * 147456,),
    runs=(61,),
)
ROWS = [
    LLAMA_70B,
    QWEN_7B,
    QWEN_235B,
    DEEPSEEK,
    DEEPSEEK_TWO_NODES,
    DEEPSEEK_PP4,
    GEMMA_FULL,
    GEMMA_WINDOW,
    GPT_OSS,
    MQA,
    LLAMA_TWO_NODES,
    LLAMA_PP_OVER_NODES,
    DEEPSEEK_DCP,
    QWEN_DCP,
    DEEPSEEK_PCP,
]
table = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)


@dataclass
class RankMemory:
    """One rank of the oracle: its tensors' bytes, each (blocks, heads, tokens, bytes of a token)."""

    parallel: Parallel
    stage_layers: range
    heads: range
    tokens: list[int]
    views: list[Bytes]
    memory: list[Bytes]
    tensors: list[KvTensor]


def ranks_of(row: Row) -> list[RankMemory]:
    """As vLLM places them: heads in turn over tp_ranks, tokens by the groups of ``parallel_state``."""
    world = np.arange(len(row.stages) * row.pcp_size * row.tp_size).reshape(-1, row.pcp_size, row.tp_size)
    dcp_rank = {}
    for group in world.transpose(0, 2, 1).reshape(-1, row.dcp_size):
        dcp_rank.update({int(rank): place for place, rank in enumerate(group)})
    heads = 1 if row.latent else row.kv_heads
    starts = [0, *accumulate(row.stages)]
    found = []
    for rank in range(world.size):
        pp_rank, pcp_rank, tp_rank = (int(index[0]) for index in np.where(world == rank))
        local = max(1, heads // row.tp_size)
        first = tp_rank // (row.tp_size // heads) if row.tp_size > heads else tp_rank * local
        period = row.interleave * row.dcp_size
        tokens = [t for t in range(row.block_tokens) if t % period // row.interleave == dcp_rank[rank]]
        layers = range(starts[pp_rank], starts[pp_rank + 1])
        views, memory, tensors = [], [], []
        for number, layer in enumerate(layers):
            held = np.zeros((BLOCKS, local * len(tokens) * row.token_bytes), np.uint8)
            width = row.token_bytes // 2
            if row.token_major:
                view = held.reshape(BLOCKS, len(tokens), local, row.token_bytes).transpose(0, 2, 1, 3)
                inner = (width, local * width, 1)
            else:
                view = held.reshape(BLOCKS, local, len(tokens), row.token_bytes)
                inner = (len(tokens) * width, width, 1)
            by_block = local * len(tokens) * width
            shape: tuple[int, ...] = (BLOCKS, local, len(tokens), width)
            stride: tuple[int, ...] = (by_block, *inner)
            if row.latent:
                shape, stride = (BLOCKS, len(tokens), width), (by_block, *inner[1:])
            tensors.append(KvTensor(f"model.layers.{layer}.self_attn.attn", number, shape, stride, 2, 0))
            memory.append(held.reshape(-1))
            views.append(view)
        parallel = Parallel(
            row.tp_size,
            tp_rank,
            len(row.stages),
            pp_rank,
            row.pcp_size,
            pcp_rank,
            row.dcp_size,
            row.interleave,
            row.nodes,
        )
        assert parallel.rank == rank
        found.append(RankMemory(parallel, layers, range(first, first + local), tokens, views, memory, tensors))
    return found


@table
def test_shards_runs_and_writers_are_those_worked_out_by_hand(row: Row) -> None:
    ranks = ranks_of(row)
    shape = ModelShape(row.kv_heads, row.latent)
    tokens = row.block_tokens // row.dcp_size
    shards = [shard_of(shape, rank.parallel, rank.tensors, BLOCKS, tokens) for rank in ranks]
    per_node = len(ranks) // row.nodes
    assert {shard.replicas for shard in shards} == {row.replicas}
    stage = row.tp_size * row.pcp_size
    assert tuple(shards[i * stage].block_bytes for i in range(len(row.stages))) == row.rank_bytes
    layouts = [canonical_layout(shards[node * per_node : (node + 1) * per_node]) for node in range(row.nodes)]
    assert tuple(layout.block_bytes for layout in layouts) == row.node_bytes
    firsts = [i * stage for i in range(len(row.stages))]
    assert tuple(len(place(shards[i], layouts[i // per_node])) for i in firsts) == row.runs
    names = [next(iter(layout.sizes)) for layout in layouts]
    assert tuple(name.partition("[")[2] and name[name.index("[") :] for name in names) == row.scopes
    # Whichever replica writes a block, it is whole: each of them alone tiles what its node keeps.
    for shard in shards[:per_node]:
        assert (
            sum(other.block_bytes for other in shards[:per_node] if other.replica == shard.replica) == row.node_bytes[0]
        )


@table
def test_the_runs_move_the_bytes_that_the_engine_would(row: Row) -> None:
    ranks = ranks_of(row)
    shape = ModelShape(row.kv_heads, row.latent)
    heads = 1 if row.latent else row.kv_heads
    rng = np.random.default_rng(7)
    logical = rng.integers(0, 256, (row.layers, BLOCKS, heads, row.block_tokens, row.token_bytes), np.uint8)
    for rank in ranks:
        for layer, view in zip(rank.stage_layers, rank.views, strict=True):
            view[:] = logical[layer][:, rank.heads.start : rank.heads.stop][:, :, rank.tokens]
    per_node = len(ranks) // row.nodes
    for node in range(row.nodes):
        mine = ranks[node * per_node : (node + 1) * per_node]
        shards = [
            shard_of(shape, rank.parallel, rank.tensors, BLOCKS, row.block_tokens // row.dcp_size) for rank in mine
        ]
        layout = canonical_layout(shards)
        stored = np.zeros((BLOCKS, layout.block_bytes), np.uint8)
        for block in range(BLOCKS):
            for rank, shard in zip(mine, shards, strict=True):
                if block % row.replicas == shard.replica:
                    for run in place(shard, layout):
                        for i in range(run.count):
                            local = run.local_offset + block * run.block_stride + i * run.local_step
                            there = run.canonical_offset + i * run.canonical_step
                            piece = rank.memory[run.region][local : local + run.fragment]
                            stored[block, there : there + run.fragment] = piece
        layers = sorted({layer for rank in mine for layer in rank.stage_layers})
        first = min(rank.heads.start for rank in mine)
        end = max(rank.heads.stop for rank in mine)
        expected = logical[layers][:, :, first:end]
        if row.token_major:
            expected = expected.transpose(0, 1, 3, 2, 4)
        np.testing.assert_array_equal(stored, expected.swapaxes(0, 1).reshape(BLOCKS, -1))
