"""Parallelism, and nothing else: from a rank's tensors to its shard of the canonical block.

A canonical block is a block without parallelism: the layers of the model in natural order of their names, in
each layer all KV heads, in the engine's element layout. Everything here is derived from shapes, strides,
element sizes and the engine's parallel configuration; what cannot be proven raises ``LayoutRefused``.
Pure functions, no I/O; used by connectors (to register) and by the daemon (to check and to place).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hpkv_client.errors import LayoutRefused
from hpkv_client.types import Layer, RankShard, Run

_DIGITS = re.compile(r"([0-9]+)")

_MAX_PIECES = 1 << 20
"""Fragments of one block over all ranks; far above any real model, and what a proof may cost is bounded."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the split of KV heads needs to know of the model. ``latent`` marks MLA: one vector per token."""

    kv_heads: int
    latent: bool = False


@dataclass(frozen=True, slots=True)
class Parallel:
    """One rank's place. Expert and data parallelism do not change KV and do not appear."""

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    context_parallel_size: int = 1

    @property
    def world(self) -> int:
        """Ranks of one engine replica."""
        return self.tp_size * self.pp_size

    @property
    def rank(self) -> int:
        """Position among the ranks of one engine replica."""
        return self.pp_rank * self.tp_size + self.tp_rank


@dataclass(frozen=True, slots=True)
class KvTensor:
    """One layer's KV tensor: logical ``(blocks, heads, tokens, width)`` or ``(blocks, tokens, width)``.

    ``stride`` in elements, ``offset`` in bytes from the start of ``region``.
    """

    name: str
    region: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    element_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The KV heads one rank holds, and which of its equal replicas it is."""

    total: int
    first: int
    local: int
    replicas: int
    replica: int


def split_heads(model: ModelShape, parallel: Parallel) -> HeadSplit:
    """The KV heads of ``parallel.tp_rank``.

    MLA latents and KV heads fewer than ranks are replicated: rank ``r`` of ``tp_size // kv_heads`` replicas
    holds head ``r // replicas`` (vLLM's QKVParallelLinear places them so).
    """
    if parallel.context_parallel_size != 1:
        raise LayoutRefused(
            "context parallelism splits tokens over ranks", "run without --decode-context-parallel-size"
        )
    if not 0 <= parallel.tp_rank < parallel.tp_size:
        raise LayoutRefused(f"rank {parallel.tp_rank} of {parallel.tp_size} tensor-parallel ranks")
    if model.latent:
        return HeadSplit(1, 0, 1, parallel.tp_size, parallel.tp_rank)
    heads, tp_size = model.kv_heads, parallel.tp_size
    if heads < 1:
        raise LayoutRefused(f"a model of {heads} KV heads")
    if heads >= tp_size and heads % tp_size == 0:
        local = heads // tp_size
        return HeadSplit(heads, parallel.tp_rank * local, local, 1, 0)
    if heads < tp_size and tp_size % heads == 0:
        replicas = tp_size // heads
        return HeadSplit(heads, parallel.tp_rank // replicas, 1, replicas, parallel.tp_rank % replicas)
    raise LayoutRefused(f"{heads} KV heads do not divide over {tp_size} tensor-parallel ranks")


def element_order(tensor: KvTensor) -> str:
    """``hnd`` when one head of a block is contiguous, ``nhd`` when one token is; part of the fingerprint."""
    _, heads, tokens, width, _, by_head, by_token, by_element = _four_dimensions(tensor)
    if by_element == 1 and by_token == width and (heads == 1 or by_head == tokens * width):
        return "hnd"
    if by_element == 1 and by_head == width and by_token == heads * width:
        return "nhd"
    raise LayoutRefused(
        f"layer {tensor.name}: shape {tensor.shape} with stride {tensor.stride} is neither head-major nor token-major",
        "report this layout; the engine runs without caching meanwhile",
    )


def _four_dimensions(tensor: KvTensor) -> tuple[int, ...]:
    if len(tensor.shape) != len(tensor.stride) or min(tensor.shape, default=0) < 1 or tensor.element_bytes < 1:
        raise LayoutRefused(f"layer {tensor.name}: shape {tensor.shape} with stride {tensor.stride} holds nothing")
    if len(tensor.shape) == 3:
        blocks, tokens, width = tensor.shape
        by_block, by_token, by_element = tensor.stride
        return blocks, 1, tokens, width, by_block, tokens * width, by_token, by_element
    if len(tensor.shape) == 4:
        return (*tensor.shape, *tensor.stride)
    raise LayoutRefused(f"layer {tensor.name}: a KV tensor of {len(tensor.shape)} dimensions")


def layer_of(tensor: KvTensor, heads: HeadSplit, blocks: int, block_tokens: int) -> Layer:
    """The rank's runs in one layer's canonical bytes.

    ``blocks`` and ``block_tokens`` are the engine's own; a tensor cut in other blocks is refused.
    """
    found_blocks, local, tokens, width, by_block, *_ = _four_dimensions(tensor)
    if (found_blocks, tokens) != (blocks, block_tokens):
        raise LayoutRefused(
            f"layer {tensor.name}: {found_blocks} blocks of {tokens} tokens, the engine says "
            f"{blocks} of {block_tokens}",
            "choose a --block-size that the attention backend does not split",
        )
    if local != heads.local:
        raise LayoutRefused(
            f"layer {tensor.name}: holds {local} KV heads where {heads.local} of {heads.total} were expected"
        )
    order = element_order(tensor)
    size = tensor.element_bytes
    token_bytes = width * size
    head_bytes = tokens * token_bytes
    canonical_bytes = heads.total * head_bytes
    if by_block * size < local * head_bytes:
        raise LayoutRefused(f"layer {tensor.name}: blocks overlap (block stride {by_block})")
    if order == "hnd" or heads.local == heads.total:
        run = Run(tensor.region, tensor.offset, by_block * size, heads.first * head_bytes, local * head_bytes)
    else:
        run = Run(
            tensor.region,
            tensor.offset,
            by_block * size,
            heads.first * token_bytes,
            local * token_bytes,
            count=tokens,
            local_step=local * token_bytes,
            canonical_step=heads.total * token_bytes,
        )
    return Layer(tensor.name, canonical_bytes, (run,))


def shard_of(
    model: ModelShape, parallel: Parallel, tensors: Iterable[KvTensor], blocks: int, block_tokens: int
) -> RankShard:
    """Everything one rank registers about where its KV lies."""
    heads = split_heads(model, parallel)
    layers = tuple(layer_of(tensor, heads, blocks, block_tokens) for tensor in tensors)
    if not layers:
        raise LayoutRefused("the rank holds no KV tensor")
    _prove_apart(layers, blocks)
    return RankShard(layers, blocks, heads.replicas, heads.replica)


def _prove_apart(layers: Sequence[Layer], blocks: int) -> None:
    """A load of one block must not write over another block of any layer.

    Two names for the very same memory (layers that share their KV) are fine: block meets block.
    """
    pieces = {
        (run.region, run.block_stride, run.local_offset, run.size): layer.name for layer in layers for run in layer.runs
    }
    for (piece, name), (other, other_name) in combinations(sorted(pieces.items()), 2):
        if _overlap(piece, other, blocks):
            raise LayoutRefused(f"layers {name} and {other_name} overlap in memory")


def _overlap(one: tuple[int, int, int, int], two: tuple[int, int, int, int], blocks: int) -> bool:
    """Whether any of ``blocks`` pieces (region, stride, offset, size) of one touches any of the other."""
    region, stride, offset, size = one
    other_region, other_stride, other_offset, other_size = two
    if region != other_region:
        return False
    if stride != other_stride:
        reach, other_reach = (blocks - 1) * stride + size, (blocks - 1) * other_stride + other_size
        return offset < other_offset + other_reach and other_offset < offset + reach
    ahead, rest = divmod(other_offset - offset, stride)
    return (rest < size and abs(ahead) < blocks) or (rest + other_size > stride and abs(ahead + 1) < blocks)


def natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts ``layers.10`` after ``layers.9``; equal on every rank and for every split."""
    parts = _DIGITS.split(name)
    order = [(1, len(part.lstrip("0")), part.lstrip("0")) if i % 2 else (0, 0, part) for i, part in enumerate(parts)]
    return (*order, (-1, 0, name))


@dataclass(frozen=True, slots=True)
class CanonicalLayout:
    """Where each layer lies in the canonical block. Equal for every parallel strategy of one model."""

    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    block_bytes: int

    @property
    def description(self) -> str:
        """Text that two layouts of one element order share exactly when their blocks are interchangeable."""
        return "\n".join(f"{name!a} {size}" for name, size in self.sizes.items())


def canonical_layout(shards: Sequence[RankShard]) -> CanonicalLayout:
    """The canonical block of an engine, from the shards of all its ranks.

    Proves that the ranks' runs tile it: every byte is held by exactly one rank per replica set.
    """
    _require_bounded(shards)
    sizes: dict[str, int] = {}
    for shard in shards:
        for layer in shard.layers:
            if sizes.setdefault(layer.name, layer.canonical_bytes) != layer.canonical_bytes:
                raise LayoutRefused(f"ranks disagree on the size of layer {layer.name}")
    ordered = {name: sizes[name] for name in sorted(sizes, key=natural_order)}
    offsets, end = {}, 0
    for name, size in ordered.items():
        offsets[name] = end
        end += size
    layout = CanonicalLayout(offsets, ordered, end)
    for replica in range(shards[0].replicas):
        pieces = [
            (run.canonical_offset + i * run.canonical_step, run.fragment)
            for shard in shards
            if shard.replica == replica
            for run in place(shard, layout)
            for i in range(run.count)
        ]
        _prove_tiling(sorted(pieces), end)
    return layout


def _require_bounded(shards: Sequence[RankShard]) -> None:
    """Refuse, before anything is counted out, what no engine would register."""
    if not shards:
        raise LayoutRefused("an engine without ranks")
    pieces = sum(max(0, run.count) for shard in shards for layer in shard.layers for run in layer.runs)
    if pieces > _MAX_PIECES:
        raise LayoutRefused(f"a block in {pieces} pieces; at most {_MAX_PIECES} are supported")
    for shard in shards:
        if not 0 <= shard.replica < shard.replicas == shards[0].replicas <= len(shards):
            raise LayoutRefused(f"replica {shard.replica} of {shard.replicas} among {len(shards)} ranks")
        for layer in shard.layers:
            for run in layer.runs:
                inside = 0 <= run.canonical_offset <= run.last_canonical_byte() <= layer.canonical_bytes
                if not inside or run.fragment < 1 or run.count < 1 or run.canonical_step < 0:
                    raise LayoutRefused(f"layer {layer.name}: a run outside of the layer's bytes")


def _prove_tiling(pieces: list[tuple[int, int]], end: int) -> None:
    position = 0
    for offset, length in pieces:
        if offset != position:
            what = "hold twice" if offset < position else "do not hold"
            raise LayoutRefused(f"the ranks {what} bytes {min(offset, position)}.. of the canonical block")
        position += length
    if position != end:
        raise LayoutRefused(f"the ranks hold {position} of {end} bytes of the canonical block")


def place(shard: RankShard, layout: CanonicalLayout) -> tuple[Run, ...]:
    """The rank's runs with offsets in the whole canonical block, neighbours merged into longer runs."""
    runs = [
        replace(run, canonical_offset=run.canonical_offset + layout.offsets[layer.name])
        for layer in shard.layers
        for run in layer.runs
    ]
    runs.sort(key=lambda run: run.canonical_offset)
    merged: list[Run] = []
    for run in runs:
        if merged and (longer := _merge(merged[-1], run)) is not None:
            merged[-1] = longer
        else:
            merged.append(run)
    return tuple(merged)


def _merge(first: Run, second: Run) -> Run | None:
    """One strided run that equals both, or None. Only plain fragments are merged."""
    if second.count != 1 or (first.region, first.block_stride) != (second.region, second.block_stride):
        return None
    if first.count == 1:
        local_step = second.local_offset - first.local_offset
        canonical_step = second.canonical_offset - first.canonical_offset
        if local_step == canonical_step == first.fragment:
            return replace(first, fragment=first.fragment + second.fragment)
    else:
        local_step, canonical_step = first.local_step, first.canonical_step
    follows = (
        second.fragment == first.fragment
        and local_step > 0
        and second.local_offset == first.local_offset + first.count * local_step
        and second.canonical_offset == first.canonical_offset + first.count * canonical_step
    )
    if not follows:
        return None
    return replace(first, count=first.count + 1, local_step=local_step, canonical_step=canonical_step)
