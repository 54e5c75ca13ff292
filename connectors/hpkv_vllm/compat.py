"""Every place where vLLM's internals or versions matter. Measured with 0.32; the rest is by feature, not number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hpkv_client.errors import LayoutRefused
from hpkv_client.memory import SharedMemory
from hpkv_client.topology import KvTensor, ModelShape, Parallel

_SMALLEST_POOL = 1 << 20
"""Allocations below this are no KV cache."""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV-cache group of the engine. ``window_tokens`` is 0 for full attention."""

    number: int
    block_tokens: int
    window_tokens: int


def groups_of(kv_cache_config: Any) -> list[Group]:
    """The engine's KV-cache groups. Raises ``LayoutRefused`` for kinds of state that blocks cannot restore."""
    return [
        Group(number, int(group.kv_cache_spec.block_size), _window_of(number, group.kv_cache_spec))
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    ]


def _window_of(number: int, spec: Any) -> int:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    windows = set()
    for layer in getattr(spec, "kv_cache_specs", {"": spec}).values():
        if isinstance(layer, FullAttentionSpec):
            # A window without the hybrid manager: the engine keeps every block, so it needs every block.
            windows.add(0)
        elif isinstance(layer, SlidingWindowSpec):
            windows.add(int(layer.sliding_window) + int(getattr(layer, "extra_retained_tokens", 0)))
        else:
            raise LayoutRefused(
                f"KV-cache group {number} is of kind {type(layer).__name__}",
                "HPKV restores attention with full and sliding windows only; this engine runs without it",
            )
    if len(windows) != 1:
        raise LayoutRefused(f"KV-cache group {number} mixes windows of {sorted(windows)} tokens")
    return windows.pop()


def hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens under one of the engine's prefix hashes."""
    return int(getattr(kv_cache_config, "hash_block_size", None) or vllm_config.cache_config.block_size)


def block_tables(output: Any, request_id: str) -> tuple[list[int], ...] | None:
    """The request's current block ids per group (0: no block), or None on versions that do not tell."""
    state = getattr(output, "kv_connector_block_state", None)
    return state.get_block_ids(request_id) if state is not None else None


def model_shapes(vllm_config: Any) -> list[ModelShape]:
    """KV heads of the model, then of the draft model if it has one and they differ."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    shapes = [
        ModelShape(model.get_total_num_kv_heads(), latent=bool(model.use_mla))
        for model in (vllm_config.model_config, draft)
        if model is not None
    ]
    return list(dict.fromkeys(shapes))


def parallel_of(vllm_config: Any) -> Parallel:
    """This rank's place, as the engine sees it. Worker processes only."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    config = vllm_config.parallel_config
    nodes = int(getattr(config, "nnodes_within_dp", 1))
    if nodes > 1:
        raise LayoutRefused(
            f"the engine's ranks are spread over {nodes} nodes",
            "HPKV keeps engines of one node; this engine runs without it",
        )
    return Parallel(
        tp_size=config.tensor_parallel_size,
        tp_rank=get_tp_group().rank_in_group,
        pp_size=config.pipeline_parallel_size,
        pp_rank=get_pp_group().rank_in_group,
        context_parallel_size=getattr(config, "decode_context_parallel_size", 1)
        * getattr(config, "prefill_context_parallel_size", 1),
    )


class KvMemory:
    """Makes the engine's KV cache shareable in place: it is allocated from sealed shared memory to begin with.

    vLLM asks for the context before it allocates (0.31 and later). While it is active a large ``torch.zeros`` of
    bytes on the CPU comes from a memfd, zeroed and committed page by page on first touch, as before.
    """

    def __init__(self) -> None:
        self.memories: dict[int, SharedMemory] = {}
        """Data pointer -> memory."""

    def context(self) -> AbstractContextManager[None]:
        """To be active around the allocation."""
        return self._patched()

    @contextmanager
    def _patched(self) -> Iterator[None]:
        original = torch.zeros

        def zeros(*size: Any, **options: Any) -> torch.Tensor:
            wanted = size[0] if len(size) == 1 and isinstance(size[0], int) else 0
            device = torch.device(options.get("device") or "cpu")
            if wanted >= _SMALLEST_POOL and options.get("dtype") == torch.int8 and device.type == "cpu":
                return self._allocate(wanted)
            return original(*size, **options)

        torch.zeros = zeros
        try:
            yield
        finally:
            torch.zeros = original

    def _allocate(self, size: int) -> torch.Tensor:
        memory = SharedMemory(size)
        tensor = torch.frombuffer(memory.mapping, dtype=torch.int8)
        self.memories[tensor.untyped_storage().data_ptr()] = memory
        return tensor

    def find(self, tensor: torch.Tensor) -> SharedMemory:
        """The shared memory under a tensor. Raises ``LayoutRefused`` for private memory."""
        memory = self.memories.get(tensor.untyped_storage().data_ptr())
        if memory is None:
            raise LayoutRefused(
                "the engine's KV cache lies in private memory",
                "use vLLM 0.31 or later; this engine runs without HPKV",
            )
        return memory


def kv_tensors(kv_caches: Mapping[str, Any], memory: KvMemory) -> tuple[list[KvTensor], list[SharedMemory]]:
    """The layers' tensors by shape, stride and place, and the distinct memories they lie in."""
    regions: list[SharedMemory] = []
    tensors: list[KvTensor] = []
    for name, value in kv_caches.items():
        if not isinstance(value, torch.Tensor):
            raise LayoutRefused(f"layer {name}: its KV is a {type(value).__name__}, not one tensor")
        if value.device.type != "cpu":
            raise LayoutRefused(
                f"layer {name}: its KV lies on {value.device}",
                "this release moves KV of the CPU only; the engine runs without HPKV",
            )
        region = memory.find(value)
        if region not in regions:
            regions.append(region)
        tensors.append(
            KvTensor(
                name,
                regions.index(region),
                tuple(value.shape),
                tuple(value.stride()),
                value.element_size(),
                value.storage_offset() * value.element_size(),
            )
        )
    return tensors, regions


def touch(block_pool: Any, block_ids: list[int]) -> None:
    """Pin blocks of the engine: they are not given out again before ``untouch``."""
    block_pool.touch([block_pool.blocks[block] for block in block_ids])


def untouch(block_pool: Any, block_ids: list[int]) -> None:
    """Undo ``touch``. Reversed: the tail of a prefix becomes free, and is reused, first."""
    block_pool.free_blocks([block_pool.blocks[block] for block in reversed(block_ids)])
