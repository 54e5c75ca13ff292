"""What one rank registers: its tensors, sorted into parts, as bodies of the verb ``register``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpkv_client.errors import LayoutRefused
from hpkv_client.memory import SharedMemory
from hpkv_client.settings import Settings
from hpkv_client.topology import KvTensor, ModelShape, Parallel, element_order, shard_of, split_of
from hpkv_client.types import Layer, RankShard, typed_digest
from hpkv_client.wire import Body, handle_to_wire, shard_to_wire
from hpkv_vllm import compat
from hpkv_vllm.identity import brief, fingerprint, namespace_fields
from hpkv_vllm.metadata import Part
from hpkv_vllm.regions import GpuMemory, Region

_PATTERN = 251
"""Prime, so that the check's pattern does not repeat with any power of two."""


@dataclass(frozen=True, slots=True)
class PartShard:
    """One part as this rank holds it; ``shard.layers`` may be empty on a pipeline stage."""

    part: Part
    shard: RankShard
    registration: Body


def shards_of(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    memory: compat.KvMemory,
    control: SharedMemory,
    settings: Settings,
    engine: str,
    gpu: Callable[[], GpuMemory],
) -> list[PartShard]:
    """Every part of the engine that this rank's node keeps, in the same order on every rank of the node.

    Raises ``LayoutRefused`` for anything that cannot be proven, ``ConfigError`` for weak prefix hashes.
    """
    groups = compat.groups_of(vllm_config, kv_cache_config)
    shapes = compat.model_shapes(vllm_config)
    parallel = compat.parallel_of(vllm_config)
    place = _place(parallel, settings)
    node = f"n{parallel.node}" if parallel.node else ""
    tensors, regions = compat.kv_tensors(kv_caches, memory, gpu)
    devices = {region.device for region in regions}
    if len(devices) != 1:
        raise LayoutRefused(f"the KV of one rank lies on {len(devices)} devices: {', '.join(sorted(devices))}")
    fields = namespace_fields(vllm_config, kv_cache_config, settings.weights_id)
    base = fingerprint(fields)
    orders = {element_order(tensor) for tensor in tensors}
    if len(orders) != 1:
        raise LayoutRefused(f"layers of one rank are laid out differently: {sorted(orders)}")
    order = orders.pop()
    common = {
        "rank": parallel.node_rank,
        "world": parallel.node_world,
        "model": _model_name(vllm_config),
        "strategy": compat.strategy(vllm_config),
        "place": _words(parallel),
        "device": devices.pop(),
        "regions": [handle_to_wire(region.handle) for region in regions],
        "control": handle_to_wire(control.handle),
    }
    found = []
    for group in groups:
        names = set(kv_cache_config.kv_cache_groups[group.number].layer_names)
        split = replace(parallel, dcp_size=group.token_shards)
        # Ranks cut a state as they like: each one's is a head of its own, and the cut a part of the namespace.
        kinds = [ModelShape(group.state_shards)] if group.snapshots else shapes
        sorted_tensors = _by_shape([tensor for tensor in tensors if tensor.name in names], kinds, split)
        for index, (shape, mine) in enumerate(sorted_tensors.items()):
            if not mine and parallel.pp_size == 1:
                continue
            label = f"g{group.number}s{index}"
            name = node + label
            part = Part(
                name,
                group.number,
                group.block_tokens,
                group.window_tokens,
                group.snapshots,
                f"{engine}/{name}",
                place,
            )
            shard = shard_of(shape, split, mine, kv_cache_config.num_blocks, group.rank_tokens)
            for tensor, layer in zip(mine, shard.layers, strict=True):
                prove_runs(tensor, layer, shard.blocks, kv_caches[tensor.name], regions[tensor.region])
            if group.snapshots:
                label += f" state/{group.state_shards}"
            if group.token_shards > 1:
                # How vLLM deals tokens out is known from its source only: engines share with their like alone.
                label += f" dcp{group.token_shards}x{parallel.dcp_interleave} pcp{parallel.pcp_size}"
            registration = common | {
                "namespace": part_namespace(base, label, group.window_tokens, order),
                "fields": brief(fields | {"part": label, "order": order}),
                "key_namespace": base,
                "group": group.number,
                "block_tokens": group.block_tokens,
                **shard_to_wire(shard),
            }
            found.append(PartShard(part, shard, registration))
    return found


def _model_name(vllm_config: Any) -> str:
    model = vllm_config.model_config
    name = model.served_model_name or model.model
    return str(name if isinstance(name, str) else name[0])[:256]


def _place(parallel: Parallel, settings: Settings) -> str:
    """Where the scheduler finds this node's daemon; empty on its own node."""
    if parallel.nodes == 1:
        return ""
    if not settings.listen or not settings.key_file:
        raise LayoutRefused(
            f"the engine runs over {parallel.nodes} nodes, and the daemon of node {parallel.node} does not listen",
            "set HPKV_LISTEN and HPKV_KEY_FILE on every node",
        )
    if not parallel.node:
        return ""
    host, _, port = settings.listen.rpartition(":")
    if host in ("*", "0.0.0.0", "[::]"):
        host = compat.host_address()
        host = f"[{host}]" if ":" in host else host
    return f"{host}:{port}"


def _words(parallel: Parallel) -> str:
    """The rank's place in words: ``tp1 pp0``, with what else there is."""
    words = [f"tp{parallel.tp_rank}", f"pp{parallel.pp_rank}"]
    if parallel.pcp_size > 1:
        words.append(f"pcp{parallel.pcp_rank}")
    if parallel.nodes > 1:
        words.append(f"node{parallel.node}")
    return " ".join(words)


def part_namespace(base: bytes, label: str, window_tokens: int, order: str) -> bytes:
    """The namespace of one part: the engine's, the part's place in it, and the order of its elements."""
    return typed_digest(base, label, window_tokens, order)


def _by_shape(
    tensors: list[KvTensor], shapes: list[ModelShape], parallel: Parallel
) -> dict[ModelShape, list[KvTensor]]:
    """The tensors under the model (or draft model) whose split of heads they show."""
    sorted_tensors: dict[ModelShape, list[KvTensor]] = {shape: [] for shape in shapes}
    locals_of = {shape: split_of(shape, parallel) for shape in shapes}
    for tensor in tensors:
        heads = tensor.shape[1] if len(tensor.shape) == 4 else 1
        fitting = [shape for shape, split in locals_of.items() if split.heads == heads]
        if not fitting:
            raise LayoutRefused(f"layer {tensor.name}: {heads} KV heads per rank fit neither model nor draft model")
        if len(fitting) > 1:
            raise LayoutRefused(f"layer {tensor.name}: {heads} KV heads per rank fit both model and draft model")
        sorted_tensors[fitting[0]].append(tensor)
    return sorted_tensors


def prove_runs(tensor: KvTensor, layer: Layer, blocks: int, view: Any, region: Region) -> None:
    """Write a pattern through the engine's own view of its first and last block, read it back through the runs.

    The engine has just allocated its cache and uses no block yet; the blocks are zeroed again. Raises
    ``LayoutRefused`` when the runs do not name exactly the bytes that the engine's view names.
    """
    import torch

    for block in {0, blocks - 1}:
        elements = view[block]
        size = elements.numel() * elements.element_size()
        pattern = (np.arange(size, dtype=np.int64) * 7 + block) % _PATTERN
        wanted = torch.from_numpy(pattern.astype(np.uint8)).view(elements.dtype).reshape(elements.shape)
        elements.copy_(wanted)
        pieces = sorted(
            (run.local_offset + block * run.block_stride + i * run.local_step, run.fragment)
            for run in layer.runs
            for i in range(run.count)
        )
        got = np.concatenate([region.read(start, length) for start, length in pieces])
        order = elements if element_order(tensor) == "hnd" else elements.transpose(0, 1)
        expected = order.contiguous().view(torch.uint8).cpu().numpy().reshape(-1).copy()
        elements.zero_()
        if not np.array_equal(got, expected):
            raise LayoutRefused(f"layer {tensor.name}: its memory does not lie where its strides say")
