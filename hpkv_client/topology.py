"""Parallelism, and nothing else: from a rank's tensors to its shard of the canonical block.

A canonical block is a block without parallelism: the layers of the model in natural order of their names, in
each layer all KV heads, in the engine's element layout. Everything here is derived from shapes, strides,
element sizes and the engine's parallel configuration; what cannot be proven raises ``LayoutRefused``.
Pure functions, no I/O; used by connectors (to register) and by the daemon (to check and to place).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """One rank's place. Expert and data parallelism do not change KV and do not appear.

    World ranks count tp_rank fastest, then pcp_rank, then pp_rank; every node has equally many, in this order.
    Decode context parallelism (``dcp_size``) makes no ranks of its own: it splits tokens, ``dcp_interleave`` at a
    time, over ranks that hold the same heads.
    """

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    pcp_size: int = 1
    pcp_rank: int = 0
    dcp_size: int = 1
    dcp_interleave: int = 1
    nodes: int = 1

    @property
    def world(self) -> int:
        """Ranks of one engine replica."""
        return self.tp_size * self.pcp_size * self.pp_size

    @property
    def rank(self) -> int:
        """Position among the ranks of one engine replica."""
        return (self.pp_rank * self.pcp_size + self.pcp_rank) * self.tp_size + self.tp_rank

    @property
    def node_world(self) -> int:
        """Ranks of one engine replica on each of its nodes."""
        return self.world // self.nodes

    @property
    def node(self) -> int:
        """The node of this rank among those of its engine replica."""
        return self.rank // self.node_world

    @property
    def node_rank(self) -> int:
        """Position among the engine's ranks on the same node."""
        return self.rank % self.node_world

    @property
    def node_mates(self) -> list[Parallel]:
        """The ranks of the same pipeline stage on the same node, this one among them."""
        stage = self.tp_size * self.pcp_size
        first = self.node * self.node_world
        mates = []
        for rank in range(first, first + self.node_world):
            place = rank % stage
            if rank // stage == self.pp_rank:
                mates.append(replace(self, tp_rank=place % self.tp_size, pcp_rank=place // self.tp_size))
        return mates


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
class Split:
    """What one rank holds of each layer that its node holds, and which of its equal replicas it is.

    ``heads`` of the node's ``total_heads`` KV heads from ``first_head`` on; of their tokens every
    ``token_shards``-th group of ``interleave``, from the ``token_shard``-th on. ``scope`` names the heads that the
    node holds, empty if all of the model.
    """

    total_heads: int
    first_head: int
    heads: int
    replicas: int = 1
    replica: int = 0
    token_shards: int = 1
    token_shard: int = 0
    interleave: int = 1
    scope: str = ""


def split_of(model: ModelShape, parallel: Parallel) -> Split:
    """What the rank holds of the KV on its node.

    On several nodes each node's daemon keeps what the ranks there hold: heads are counted from the node's first,
    replicas are those on the node.
    """
    _require_place(parallel)
    whole = _engine_split(model, parallel)
    if parallel.nodes == 1:
        return whole
    mates = {mate.rank: _engine_split(model, mate) for mate in parallel.node_mates}
    firsts = sorted({split.first_head for split in mates.values()})
    if firsts != list(range(firsts[0], firsts[0] + len(firsts) * whole.heads, whole.heads)):
        raise LayoutRefused("the ranks of one node hold heads that are not neighbours")
    for first in firsts:
        shards = sorted(split.token_shard for split in mates.values() if split.first_head == first)
        replicas = len(shards) // whole.token_shards
        if shards != sorted(list(range(whole.token_shards)) * replicas):
            raise LayoutRefused(
                "context parallelism splits the tokens of one head over nodes",
                "choose --decode-context-parallel-size so that each node holds whole heads",
            )
    equal = [
        rank
        for rank, split in mates.items()
        if (split.first_head, split.token_shard) == (whole.first_head, whole.token_shard)
    ]
    held = len(firsts) * whole.heads
    return replace(
        whole,
        total_heads=held,
        first_head=whole.first_head - firsts[0],
        replicas=len(equal),
        replica=equal.index(parallel.rank),
        scope="" if held == whole.total_heads else f"[{firsts[0]}:{firsts[0] + held}/{whole.total_heads}]",
    )


def _require_place(parallel: Parallel) -> None:
    ranges = (
        ("tensor-parallel", parallel.tp_rank, parallel.tp_size),
        ("pipeline", parallel.pp_rank, parallel.pp_size),
        ("prefill-context-parallel", parallel.pcp_rank, parallel.pcp_size),
    )
    for kind, rank, size in ranges:
        if not 0 <= rank < size:
            raise LayoutRefused(f"rank {rank} of {size} {kind} ranks")
    if parallel.nodes < 1 or parallel.world % parallel.nodes:
        raise LayoutRefused(f"{parallel.world} ranks do not divide over {parallel.nodes} nodes")


def _engine_split(model: ModelShape, parallel: Parallel) -> Split:
    """The split over all ranks of the engine.

    MLA latents and KV heads fewer than ranks are replicated: of ``tp_size`` ranks, ``tp_size // kv_heads``
    neighbours hold the same head (vLLM's QKVParallelLinear places them so), and each of them once more per
    prefill-context-parallel rank. Decode context parallelism deals the tokens out to ``dcp_size`` neighbours among
    these, prefill-context-parallel ranks first (the order of vLLM's DCP groups).
    """
    heads, tp_size = 1 if model.latent else model.kv_heads, parallel.tp_size
    if heads < 1:
        raise LayoutRefused(f"a model of {heads} KV heads")
    local, replicas = max(1, heads // tp_size), max(1, tp_size // heads)
    if local * tp_size != heads * replicas:
        raise LayoutRefused(f"{heads} KV heads do not divide over {tp_size} tensor-parallel ranks")
    first = parallel.tp_rank // replicas * local
    equal, place = replicas * parallel.pcp_size, parallel.tp_rank % replicas * parallel.pcp_size + parallel.pcp_rank
    shards = parallel.dcp_size
    if shards < 1 or equal % shards or parallel.dcp_interleave < 1:
        raise LayoutRefused(
            f"tokens do not divide over {shards} decode-context-parallel ranks of {equal} with the same KV heads"
        )
    interleave = parallel.dcp_interleave if shards > 1 else 1
    return Split(heads, first, local, equal // shards, place // shards, shards, place % shards, interleave)


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


def layer_of(tensor: KvTensor, split: Split, blocks: int, rank_tokens: int) -> Layer:
    """The rank's runs in one layer's canonical bytes.

    ``blocks`` and ``rank_tokens`` (tokens of one block that a rank holds) are the engine's own; a tensor cut in
    other blocks is refused.
    """
    found_blocks, local, tokens, width, by_block, *_ = _four_dimensions(tensor)
    if (found_blocks, tokens) != (blocks, rank_tokens):
        raise LayoutRefused(
            f"layer {tensor.name}: {found_blocks} blocks of {tokens} tokens, the engine says {blocks} of {rank_tokens}",
            "choose a --block-size that the attention backend does not split",
        )
    if local != split.heads:
        raise LayoutRefused(
            f"layer {tensor.name}: holds {local} KV heads where {split.heads} of {split.total_heads} were expected"
        )
    if tokens % split.interleave:
        raise LayoutRefused(f"layer {tensor.name}: blocks of {tokens} tokens dealt out {split.interleave} at a time")
    order = element_order(tensor)
    size = tensor.element_bytes
    token_bytes = width * size
    if by_block * size < local * tokens * token_bytes:
        raise LayoutRefused(f"layer {tensor.name}: blocks overlap (block stride {by_block})")
    runs = _head_major(split, tokens, token_bytes) if order == "hnd" else _token_major(split, tokens, token_bytes)
    placed = tuple(
        Run(tensor.region, tensor.offset + local_offset, by_block * size, offset, fragment, count, step, stride)
        for local_offset, offset, fragment, count, step, stride in runs
    )
    canonical_bytes = split.total_heads * tokens * split.token_shards * token_bytes
    return Layer(tensor.name + split.scope, canonical_bytes, placed)


_Piece = tuple[int, int, int, int, int, int]
"""Local offset, canonical offset, fragment, count, local step, canonical step of one run; bytes."""


def _head_major(split: Split, tokens: int, token_bytes: int) -> Iterator[_Piece]:
    head_bytes = tokens * token_bytes
    if split.token_shards == 1:
        yield 0, split.first_head * head_bytes, split.heads * head_bytes, 1, 0, 0
        return
    group = split.interleave * token_bytes
    for head in range(split.heads):
        offset = (split.first_head + head) * head_bytes * split.token_shards + split.token_shard * group
        count = tokens // split.interleave
        yield head * head_bytes, offset, group, count, group, group * split.token_shards


def _token_major(split: Split, tokens: int, token_bytes: int) -> Iterator[_Piece]:
    local, total = split.heads * token_bytes, split.total_heads * token_bytes
    first = split.first_head * token_bytes
    if split.heads == split.total_heads:
        group, groups = split.interleave, tokens // split.interleave
        if split.token_shards == 1:
            yield 0, 0, local * tokens, 1, 0, 0
        else:
            step = group * local
            yield 0, split.token_shard * step, step, groups, step, step * split.token_shards
        return
    for within in range(split.interleave if split.token_shards > 1 else 1):
        # One run takes the same token of each group; without token shards every token is a group.
        offset = (split.token_shard * split.interleave + within) * total + first
        step = split.interleave * local
        yield (
            within * local,
            offset,
            local,
            tokens // split.interleave,
            step,
            step // local * total * split.token_shards,
        )


def shard_of(
    model: ModelShape, parallel: Parallel, tensors: Iterable[KvTensor], blocks: int, rank_tokens: int
) -> RankShard:
    """Everything one rank registers about where its KV lies; layers in the order of ``tensors``."""
    split = split_of(model, parallel)
    layers = tuple(layer_of(tensor, split, blocks, rank_tokens) for tensor in tensors)
    if not layers:
        raise LayoutRefused("the rank holds no KV tensor")
    _prove_apart(layers, blocks)
    return RankShard(layers, blocks, split.replicas, split.replica)


def _prove_apart(layers: Sequence[Layer], blocks: int) -> None:
    """A load of one block must not write over another block of any layer.

    Two names for the very same memory (layers that share their KV) are fine: block meets block.
    """
    pieces = {piece: layer.name for layer in layers for piece in _pieces(layer)}
    for (piece, name), (other, other_name) in combinations(sorted(pieces.items()), 2):
        if _overlap(piece, other, blocks):
            raise LayoutRefused(f"layers {name} and {other_name} overlap in memory")


def _pieces(layer: Layer) -> Iterator[tuple[int, int, int, int]]:
    """(region, stride, offset, size) of the memory of one block, neighbours as one: runs may lie between each other."""
    spans = sorted(
        (run.region, run.block_stride, run.local_offset + i * run.local_step, run.fragment)
        if run.local_step != run.fragment
        else (run.region, run.block_stride, run.local_offset, run.size)
        for run in layer.runs
        for i in range(run.count if run.local_step != run.fragment else 1)
    )
    region, stride, offset, size = spans[0]
    for other in spans[1:]:
        if other[:3] == (region, stride, offset + size):
            size += other[3]
        else:
            yield region, stride, offset, size
            region, stride, offset, size = other
    yield region, stride, offset, size


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
