"""One model under any two parallel strategies: what one stores the other loads, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hpkv_client.errors import LayoutRefused
from hpkv_client.topology import (
    CanonicalLayout,
    KvTensor,
    ModelShape,
    Parallel,
    canonical_layout,
    element_order,
    natural_order,
    place,
    shard_of,
    split_of,
)
from hpkv_client.types import Layer, RankShard, Run

Bytes = npt.NDArray[np.uint8]
REGION = 8
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Model:
    """What every strategy has in common."""

    names: tuple[str, ...]
    heads: int
    latent: bool
    token_major: bool
    blocks: int
    tokens: int
    width: int
    element_bytes: int

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.heads, self.latent)


@dataclass(frozen=True)
class Strategy:
    """One way to run it: ranks per layer, first layers of the stages, and where tensors lie in memory.

    A rank holds ``1 / dcp_size`` of the model's tokens of each block.
    """

    tp_size: int
    stages: tuple[int, ...]
    memory: str
    padding: int
    pcp_size: int = 1
    dcp_size: int = 1
    interleave: int = 1
    nodes: int = 1


@dataclass
class Rank:
    """One rank's memory and the tensors in it."""

    parallel: Parallel
    tensors: list[KvTensor]
    regions: list[Bytes]
    layers: tuple[int, ...]
    heads: slice
    tokens: list[int]
    shard: RankShard

    def view(self, index: int) -> Bytes:
        """The tensor's bytes as (blocks, heads, tokens, bytes of one token)."""
        tensor = self.tensors[index]
        shape, stride = tensor.shape, tensor.stride
        if len(shape) == 3:
            shape, stride = (shape[0], 1, *shape[1:]), (stride[0], 0, *stride[1:])
        size = tensor.element_bytes
        return np.lib.stride_tricks.as_strided(
            self.regions[tensor.region][tensor.offset :],
            (*shape[:3], shape[3] * size),
            (*(step * size for step in stride[:3]), 1),
        )


def build_rank(model: Model, strategy: Strategy, pp_rank: int, pcp_rank: int, tp_rank: int) -> Rank:
    parallel = Parallel(
        strategy.tp_size,
        tp_rank,
        len(strategy.stages),
        pp_rank,
        strategy.pcp_size,
        pcp_rank,
        strategy.dcp_size,
        strategy.interleave,
        strategy.nodes,
    )
    ends = (*strategy.stages[1:], len(model.names))
    layers = tuple(range(strategy.stages[pp_rank], ends[pp_rank]))
    # By the book, apart from the code under test: heads in turn, and the order of vLLM's DCP groups.
    local = max(1, model.heads // strategy.tp_size)
    first = tp_rank * model.heads // strategy.tp_size
    dcp_rank = (tp_rank * strategy.pcp_size + pcp_rank) % strategy.dcp_size
    held = [t for t in range(model.tokens) if t // strategy.interleave % strategy.dcp_size == dcp_rank]
    size, tokens, width = model.element_bytes, len(held), model.width
    elements = local * tokens * width + strategy.padding
    inner = (width, local * width, 1) if model.token_major and not model.latent else (tokens * width, width, 1)
    tensors, regions = [], []
    for index, layer in enumerate(layers):
        if strategy.memory == "interleaved":
            by_block, offset, region = elements * len(layers), index * elements * size, 0
        elif strategy.memory == "downwards":
            by_block, region = elements, 0
            offset = (len(layers) - 1 - index) * model.blocks * elements * size
        elif strategy.memory == "stacked":
            by_block, offset, region = elements, index * model.blocks * elements * size, 0
        else:
            by_block, offset, region = elements, REGION * index, index
        shape: tuple[int, ...] = (model.blocks, local, tokens, width)
        stride: tuple[int, ...] = (by_block, *inner)
        if model.latent:
            shape, stride = (model.blocks, tokens, width), (by_block, *inner[1:])
        tensors.append(KvTensor(model.names[layer], region, shape, stride, size, offset))
    for region in sorted({tensor.region for tensor in tensors}):
        inside = [tensor for tensor in tensors if tensor.region == region]
        last = max(tensor.offset + model.blocks * tensor.stride[0] * size for tensor in inside)
        regions.append(np.zeros(last, np.uint8))
    shard = shard_of(model.shape, parallel, tensors, model.blocks, tokens)
    return Rank(parallel, tensors, regions, layers, slice(first, first + local), held, shard)


def build(model: Model, strategy: Strategy) -> list[Rank]:
    return [
        build_rank(model, strategy, pp_rank, pcp_rank, tp_rank)
        for pp_rank in range(len(strategy.stages))
        for pcp_rank in range(strategy.pcp_size)
        for tp_rank in range(strategy.tp_size)
    ]


def fill(ranks: list[Rank], logical: Bytes) -> None:
    """What the engine's forward pass leaves in every rank's memory."""
    for rank in ranks:
        for index, layer in enumerate(rank.layers):
            rank.view(index)[:] = logical[layer][:, rank.heads][:, :, rank.tokens]


def fragments(run: Run, block: int) -> list[tuple[slice, slice]]:
    """The run's definition, word by word: local and canonical bytes of each fragment."""
    pairs = []
    for i in range(run.count):
        local = run.local_offset + block * run.block_stride + i * run.local_step
        canonical = run.canonical_offset + i * run.canonical_step
        pairs.append((slice(local, local + run.fragment), slice(canonical, canonical + run.fragment)))
    return pairs


def gather(ranks: list[Rank], layout: CanonicalLayout, blocks: int) -> Bytes:
    """Canonical blocks from the writers; every byte must come from exactly one of them."""
    stored = np.zeros((blocks, layout.block_bytes), np.uint8)
    writes = np.zeros((blocks, layout.block_bytes), np.int64)
    for block in range(blocks):
        for rank in ranks:
            if block % rank.shard.replicas != rank.shard.replica:
                continue
            for run in place(rank.shard, layout):
                assert run.last_local_byte(blocks) <= len(rank.regions[run.region])
                for local, canonical in fragments(run, block):
                    assert local.start >= run.local_offset
                    stored[block, canonical] = rank.regions[run.region][local]
                    writes[block, canonical] += 1
    assert (writes == 1).all()
    return stored


def scatter(ranks: list[Rank], layout: CanonicalLayout, stored: Bytes) -> None:
    for rank in ranks:
        for run in place(rank.shard, layout):
            for block in range(len(stored)):
                for local, canonical in fragments(run, block):
                    rank.regions[run.region][local] = stored[block, canonical]


@st.composite
def models(draw: st.DrawFn) -> Model:
    count = draw(st.integers(1, 12))
    names = tuple(f"model.layers.{index}.attn" for index in range(count))
    if draw(st.booleans()):
        names = (*names, "mtp.layers.0.attn")
    latent = draw(st.booleans())
    return Model(
        names,
        heads=1 if latent else draw(st.sampled_from((1, 2, 3, 4, 6, 8))),
        latent=latent,
        token_major=draw(st.booleans()),
        blocks=draw(st.integers(1, 4)),
        tokens=draw(st.sampled_from((1, 2, 3, 4, 8))),
        width=draw(st.integers(1, 3)),
        element_bytes=draw(st.sampled_from((1, 2, 4))),
    )


def tp_sizes(model: Model) -> list[int]:
    if model.latent:
        return [1, 2, 3, 4]
    return [size for size in range(1, 9) if model.heads % size == 0 or size % model.heads == 0]


@st.composite
def strategies_of(draw: st.DrawFn, model: Model) -> Strategy:
    cuts = draw(st.sets(st.integers(1, len(model.names)), max_size=3)) - {len(model.names)}
    tp_size = draw(st.sampled_from(tp_sizes(model)))
    pcp_size = draw(st.sampled_from((1, 1, 2)))
    equal = max(1, tp_size // model.heads) * pcp_size
    dcp_size = draw(st.sampled_from([n for n in range(1, equal + 1) if equal % n == 0 and model.tokens % n == 0]))
    held = model.tokens // dcp_size
    return Strategy(
        pcp_size=pcp_size,
        dcp_size=dcp_size,
        interleave=draw(st.sampled_from([n for n in range(1, held + 1) if held % n == 0])),
        tp_size=tp_size,
        stages=(0, *sorted(cuts)),
        memory=draw(st.sampled_from(("apart", "stacked", "downwards", "interleaved"))),
        padding=draw(st.sampled_from((0, 0, 5))),
    )


def order_of(ranks: list[Rank]) -> str:
    (order,) = {element_order(tensor) for rank in ranks for tensor in rank.tensors}
    return order


@settings(patient, max_examples=250)
@given(st.data())
def test_blocks_stored_under_one_strategy_load_under_any_other(data: st.DataObject) -> None:
    model = data.draw(models())
    first = build(model, data.draw(strategies_of(model)))
    second = build(model, data.draw(strategies_of(model)))
    # The element order is part of the namespace: engines that differ in it never share blocks.
    assume(order_of(first) == order_of(second))
    size = (len(model.names), model.blocks, model.heads, model.tokens, model.width * model.element_bytes)
    logical = np.random.default_rng(0).integers(1, 256, size, np.uint8)

    layout = canonical_layout([rank.shard for rank in first])
    assert canonical_layout([rank.shard for rank in reversed(second)]) == layout
    assert layout.block_bytes == logical[:, 0].size
    fill(first, logical)
    stored = gather(first, layout, model.blocks)
    scatter(second, layout, stored)

    expected = build(model, Strategy(1, (0,), "apart", 0))
    assert canonical_layout([rank.shard for rank in expected]).description == layout.description
    loaded = [[region.copy() for region in rank.regions] for rank in second]
    for rank in second:
        for region in rank.regions:
            region[:] = 0
    fill(second, logical)
    for rank, regions in zip(second, loaded, strict=True):
        for found, wanted in zip(regions, rank.regions, strict=True):
            np.testing.assert_array_equal(found, wanted)


@settings(patient, max_examples=150)
@given(st.data())
def test_a_block_without_parallelism_is_all_layers_with_all_heads_in_element_order(
    data: st.DataObject,
) -> None:
    model = data.draw(models())
    ranks = build(model, data.draw(strategies_of(model)))
    size = (len(model.names), model.blocks, model.heads, model.tokens, model.width * model.element_bytes)
    logical = np.random.default_rng(1).integers(1, 256, size, np.uint8)
    fill(ranks, logical)
    layout = canonical_layout([rank.shard for rank in ranks])
    by_block = logical if order_of(ranks) == "hnd" else logical.transpose(0, 1, 3, 2, 4)
    expected = by_block.transpose(1, 0, 2, 3, 4).reshape(model.blocks, -1)
    np.testing.assert_array_equal(gather(ranks, layout, model.blocks), expected)


@settings(patient, max_examples=150)
@given(st.data())
def test_every_replica_could_write_and_each_writes_its_share(data: st.DataObject) -> None:
    model = data.draw(models())
    ranks = build(model, data.draw(strategies_of(model)))
    layout = canonical_layout([rank.shard for rank in ranks])
    replicas = ranks[0].shard.replicas
    for replica in range(replicas):
        shards = [rank.shard for rank in ranks if rank.shard.replica == replica]
        held = np.zeros(layout.block_bytes, np.int64)
        for shard in shards:
            for run in place(shard, layout):
                for _, canonical in fragments(run, 0):
                    held[canonical] += 1
        assert (held == 1).all()
    assert sum(rank.shard.block_bytes for rank in ranks) == replicas * layout.block_bytes


def not_whole(model: Model, ranks: list[Rank]) -> bool:
    """Whether some head lies there with some of its tokens only, or the heads of a stage have gaps."""
    for layer in {layer for rank in ranks for layer in rank.layers}:
        tokens: dict[int, set[int]] = {}
        for rank in ranks:
            if layer in rank.layers:
                for head in range(model.heads)[rank.heads]:
                    tokens.setdefault(head, set()).update(rank.tokens)
        if len(tokens) != max(tokens) - min(tokens) + 1 or any(len(held) != model.tokens for held in tokens.values()):
            return True
    return False


@settings(patient, max_examples=150)
@given(st.data())
def test_each_node_keeps_whole_what_its_ranks_hold(data: st.DataObject) -> None:
    model = data.draw(models())
    strategy = data.draw(strategies_of(model))
    world = strategy.tp_size * strategy.pcp_size * len(strategy.stages)
    nodes = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    alone = build(model, strategy)
    local = world // nodes
    if any(not_whole(model, alone[node * local : (node + 1) * local]) for node in range(nodes)):
        with pytest.raises(LayoutRefused):
            build(model, replace(strategy, nodes=nodes))
        return
    ranks = build(model, replace(strategy, nodes=nodes))
    size = (len(model.names), model.blocks, model.heads, model.tokens, model.width * model.element_bytes)
    logical = np.random.default_rng(2).integers(1, 256, size, np.uint8)
    fill(ranks, logical)
    for node in range(nodes):
        mine = ranks[node * local : (node + 1) * local]
        assert [rank.parallel.node_rank for rank in mine] == list(range(local))
        try:
            layout = canonical_layout([rank.shard for rank in mine])
        except LayoutRefused:
            # Stages of unlike numbers of replicas on one node.
            assert len({rank.shard.replicas for rank in mine}) > 1
            return
        held = {(layer, head) for rank in mine for layer in rank.layers for head in range(model.heads)[rank.heads]}
        assert layout.block_bytes == len(held) * logical[0, 0, 0].size
        stored = gather(mine, layout, model.blocks)
        kept = [[region.copy() for region in rank.regions] for rank in mine]
        for rank in mine:
            for region in rank.regions:
                region[:] = 0
        scatter(mine, layout, stored)
        for rank, regions in zip(mine, kept, strict=True):
            for found, wanted in zip(rank.regions, regions, strict=True):
                np.testing.assert_array_equal(found, wanted)


def test_nodes_that_hold_other_heads_never_share_a_description() -> None:
    model = Model(("l.0",), 4, False, False, 1, 2, 1, 1)
    ranks = build(model, Strategy(4, (0,), "apart", 0, nodes=2))
    whole = canonical_layout([rank.shard for rank in build(model, Strategy(2, (0,), "apart", 0))])
    first, second = (canonical_layout([rank.shard for rank in ranks[i : i + 2]]) for i in (0, 2))
    assert list(first.sizes) == ["l.0[0:2/4]"]
    assert list(second.sizes) == ["l.0[2:4/4]"]
    assert len({first.description, second.description, whole.description}) == 3


@settings(patient, max_examples=100)
@given(st.data())
def test_an_engine_that_lacks_a_rank_or_has_one_twice_is_refused(data: st.DataObject) -> None:
    model = data.draw(models())
    shards = [rank.shard for rank in build(model, data.draw(strategies_of(model)))]
    canonical_layout(shards)
    index = data.draw(st.integers(0, len(shards) - 1))
    with pytest.raises(LayoutRefused):
        canonical_layout([*shards, shards[index]])
    # A rank whose layers no one else has cannot be missed by looking at the others.
    others = {layer.name for shard in shards[:index] + shards[index + 1 :] for layer in shard.layers}
    if all(layer.name in others for layer in shards[index].layers):
        with pytest.raises(LayoutRefused):
            canonical_layout(shards[:index] + shards[index + 1 :])


def test_head_major_layers_in_one_region_become_one_strided_run() -> None:
    model = Model(tuple(f"l.{i}" for i in range(6)), 4, False, False, 3, 2, 2, 2)
    rank = build_rank(model, Strategy(2, (0,), "interleaved", 0), 0, 0, 1)
    other = build_rank(model, Strategy(2, (0,), "interleaved", 0), 0, 0, 0)
    layout = canonical_layout([other.shard, rank.shard])
    (run,) = place(rank.shard, layout)
    assert (run.count, run.fragment) == (6, 2 * 2 * 2 * 2)
    alone = build_rank(model, Strategy(1, (0,), "interleaved", 0), 0, 0, 0)
    (whole,) = place(alone.shard, canonical_layout([alone.shard]))
    assert (whole.count, whole.fragment) == (1, layout.block_bytes)


def test_neighbouring_layers_of_different_sizes_are_not_taken_for_one_run() -> None:
    narrow = KvTensor("l.1", 0, (4, 2, 3, 4), (54, 12, 4, 1), 1, 30)
    wide = KvTensor("l.0", 0, (4, 2, 3, 5), (54, 15, 5, 1), 1, 0)
    shards = [shard_of(ModelShape(4), Parallel(2, tp_rank), (wide, narrow), 4, 3) for tp_rank in range(2)]
    layout = canonical_layout(shards)
    for each in shards:
        runs = place(each, layout)
        assert [run.fragment for run in runs] == [30, 24]
        assert sum(run.size for run in runs) == each.block_bytes == 54


# -- what is refused -----------------------------------------------------------------------------------------

GOOD = KvTensor("l.0", 0, (4, 2, 3, 5), (30, 15, 5, 1), 2, 0)
TWO_HEADS = ModelShape(2)


def shard(*tensors: KvTensor, model: ModelShape = TWO_HEADS, parallel: Parallel | None = None) -> RankShard:
    return shard_of(model, parallel or Parallel(), tensors, 4, 3)


@pytest.mark.parametrize(
    "tensor",
    [
        replace(GOOD, stride=(30, 15, 1, 3)),
        replace(GOOD, stride=(30, 15, 5, 2)),
        replace(GOOD, stride=(30, 16, 5, 1)),
        replace(GOOD, stride=(40, 5, 11, 1)),
        replace(GOOD, stride=(40, 6, 10, 1)),
        replace(GOOD, stride=(29, 15, 5, 1)),
        replace(GOOD, stride=(-30, 15, 5, 1)),
        replace(GOOD, stride=(0, 15, 5, 1)),
        replace(GOOD, stride=(30, 15, 5)),
        replace(GOOD, shape=(8, 2, 3, 5)),
        replace(GOOD, shape=(4, 2, 6, 5), stride=(60, 30, 5, 1)),
        replace(GOOD, shape=(4, 4, 3, 5), stride=(60, 15, 5, 1)),
        replace(GOOD, shape=(4, 1, 3, 5)),
        replace(GOOD, shape=(4, 3, 5), stride=(15, 5, 1)),
        replace(GOOD, shape=(4, 30), stride=(30, 1)),
        replace(GOOD, shape=(4, 2, 3, 5, 1), stride=(30, 15, 5, 1, 1)),
        replace(GOOD, shape=(4, 2, 3, 0), stride=(30, 15, 5, 1)),
        replace(GOOD, element_bytes=0),
    ],
    ids=lambda tensor: f"{tensor.shape}-{tensor.stride}-{tensor.element_bytes}",
)
def test_a_tensor_that_is_not_proven_to_be_head_or_token_major_is_refused(tensor: KvTensor) -> None:
    shard(GOOD)
    with pytest.raises(LayoutRefused):
        shard(tensor)


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (ModelShape(3), Parallel(tp_size=2)),
        (ModelShape(4), Parallel(tp_size=6)),
        (ModelShape(0), Parallel()),
        (ModelShape(2), Parallel(tp_size=2, tp_rank=2)),
        (ModelShape(2), Parallel(tp_size=2, tp_rank=-1)),
        (ModelShape(2), Parallel(pp_size=2, pp_rank=2)),
        (ModelShape(2), Parallel(pcp_size=2, pcp_rank=2)),
        (ModelShape(2), Parallel(dcp_size=2)),
        (ModelShape(2), Parallel(tp_size=4, dcp_size=4)),
        (ModelShape(1, latent=True), Parallel(tp_size=2, dcp_size=4)),
        (ModelShape(1, latent=True), Parallel(tp_size=2, dcp_size=0)),
        (ModelShape(1, latent=True), Parallel(tp_size=2, dcp_size=2, dcp_interleave=0)),
        (ModelShape(2), Parallel(tp_size=2, nodes=3)),
        (ModelShape(2), Parallel(tp_size=2, nodes=0)),
        # The tokens of one latent are dealt out over both nodes.
        (ModelShape(1, latent=True), Parallel(tp_size=4, dcp_size=4, nodes=2)),
    ],
)
def test_a_split_that_does_not_come_out_even_is_refused(model: ModelShape, parallel: Parallel) -> None:
    with pytest.raises(LayoutRefused):
        split_of(model, parallel)


def test_a_rank_without_tensors_is_refused() -> None:
    with pytest.raises(LayoutRefused):
        shard()


def test_layers_that_overlap_in_memory_are_refused_but_two_names_for_one_tensor_are_not() -> None:
    shard(GOOD, replace(GOOD, name="l.1", region=1))
    shard(GOOD, replace(GOOD, name="l.1", offset=4 * 60))
    shard(GOOD, replace(GOOD, name="shares.0"))
    with pytest.raises(LayoutRefused, match="overlap"):
        shard(GOOD, replace(GOOD, name="l.1", offset=60))
    with pytest.raises(LayoutRefused, match="overlap"):
        shard(GOOD, replace(GOOD, name="l.1", offset=4 * 60 - 2))
    with pytest.raises(LayoutRefused, match="overlap"):
        shard(GOOD, replace(GOOD, name="l.1", stride=(60, 15, 5, 1)))


@settings(patient, max_examples=300)
@given(
    blocks=st.integers(1, 4),
    strides=st.tuples(st.integers(30, 90), st.integers(30, 90)) | st.integers(30, 90).map(lambda s: (s, s)),
    offset=st.integers(0, 200),
)
def test_overlap_is_found_exactly_where_bytes_are_shared(blocks: int, strides: tuple[int, int], offset: int) -> None:
    one = KvTensor("l.0", 0, (blocks, 1, 3, 10), (strides[0], 30, 10, 1), 1, 100)
    two = KvTensor("l.1", 0, (blocks, 1, 3, 10), (strides[1], 30, 10, 1), 1, offset)
    touched = [
        {tensor.offset + block * tensor.stride[0] + byte for block in range(blocks) for byte in range(30)}
        for tensor in (one, two)
    ]
    same = one.offset == two.offset and strides[0] == strides[1]
    refused = False
    try:
        shard_of(ModelShape(1), Parallel(), (one, two), blocks, 3)
    except LayoutRefused:
        refused = True
    if touched[0] & touched[1] and not same:
        assert refused
    elif strides[0] == strides[1] or same:
        assert not refused


def test_ranks_that_disagree_are_refused() -> None:
    heads = ModelShape(4)
    left, right = (shard(GOOD, model=heads, parallel=Parallel(2, rank)) for rank in range(2))
    canonical_layout([left, right])
    with pytest.raises(LayoutRefused, match="twice"):
        canonical_layout([left, left])
    with pytest.raises(LayoutRefused, match="do not hold"):
        canonical_layout([right])
    wider = replace(GOOD, shape=(4, 2, 3, 6), stride=(36, 18, 6, 1))
    with pytest.raises(LayoutRefused, match="disagree"):
        canonical_layout([left, shard(wider, model=heads, parallel=Parallel(2, 1))])
    with pytest.raises(LayoutRefused):
        canonical_layout([left, replace(right, replicas=2, replica=1)])
    with pytest.raises(LayoutRefused):
        canonical_layout([])


@pytest.mark.parametrize(
    "run",
    [
        Run(0, 0, 8, 0, 8, count=1 << 40, canonical_step=0),
        Run(0, 0, 8, -8, 8),
        Run(0, 0, 8, 4, 8),
        Run(0, 0, 8, 0, 0),
        Run(0, 0, 8, 0, 8, count=0),
        Run(0, 0, 8, 4, 4, count=2, canonical_step=-4),
    ],
)
def test_runs_that_no_engine_has_are_refused_without_work(run: Run) -> None:
    canonical_layout([RankShard((Layer("l.0", 8, (Run(0, 0, 8, 0, 8),)),), 4)])
    with pytest.raises(LayoutRefused):
        canonical_layout([RankShard((Layer("l.0", 8, (run,)),), 4)])


def test_replica_numbers_that_do_not_exist_are_refused() -> None:
    layers = (Layer("l.0", 8, (Run(0, 0, 8, 0, 8),)),)
    for replicas, replica in ((0, 0), (1, 1), (1, -1), (1 << 40, 0)):
        with pytest.raises(LayoutRefused):
            canonical_layout([RankShard(layers, 4, replicas, replica)])


# -- names ---------------------------------------------------------------------------------------------------


def test_layers_are_ordered_by_number_not_by_text() -> None:
    ordered = ["draft", "l", "l.1", "l.1.x", "l.2", "l.10", "l.10.x", "l.007000", "m.1"]
    backwards = ordered[::-1]
    assert sorted(backwards, key=natural_order) == ordered


@settings(patient)
@given(st.lists(st.text(alphabet="0123a.²٣", max_size=5), unique=True, min_size=2))
def test_the_order_of_any_names_is_total_and_does_not_depend_on_who_came_first(names: list[str]) -> None:
    ordered, backwards = sorted(names, key=natural_order), names[::-1]
    assert sorted(backwards, key=natural_order) == ordered
    assert all(natural_order(low) != natural_order(high) for low, high in pairwise(ordered))


def test_absurdly_long_numbers_in_names_are_ordered_too() -> None:
    assert natural_order("l." + "9" * 5000) < natural_order("l.1" + "0" * 5000)


def test_different_layouts_never_share_a_description() -> None:
    one = CanonicalLayout({"a": 0, "b": 1}, {"a": 1, "b": 2}, 3)
    two = CanonicalLayout({"a 1\nb": 0}, {"a 1\nb": 2}, 2)
    assert one.description != two.description


def test_tokens_that_are_dealt_out_in_groups_beside_split_heads_lie_apart() -> None:
    """Then the runs of a layer lie between each other, and each touches its neighbours."""
    model = Model(
        ("model.layers.0.attn",), 4, latent=False, token_major=True, blocks=2, tokens=8, width=1, element_bytes=1
    )
    ranks = build(model, Strategy(2, (0,), "apart", 0, pcp_size=2, dcp_size=2, interleave=2))
    assert {len(layer.runs) for rank in ranks for layer in rank.shard.layers} == {2}
