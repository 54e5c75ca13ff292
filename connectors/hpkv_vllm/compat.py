"""Every place where vLLM's internals or versions matter. Measured with 0.32; the rest is by feature, not number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hpkv_client.cuda import Driver
from hpkv_client.errors import LayoutRefused
from hpkv_client.memory import SharedMemory
from hpkv_client.topology import KvTensor, ModelShape, Parallel
from hpkv_vllm.regions import GpuMemory, HostRegion, Region

_SMALLEST_POOL = 1 << 20
"""Allocations below this are no KV cache."""


_SNAPSHOT_WINDOW = 2
"""A hit needs the one block that ends where it ends: as under a window of one token before the next."""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV-cache group of the engine. ``window_tokens`` is 0 for full attention.

    A block spans ``block_tokens``, of which each rank holds ``rank_tokens``: decode context parallelism deals them out
    to ``token_shards`` ranks.
    Blocks of a group with ``snapshots`` are the state of recurrent layers after their last token, as one token; it is
    split over ``state_shards`` ranks in a way that only the engine knows.
    """

    number: int
    block_tokens: int
    rank_tokens: int
    window_tokens: int
    token_shards: int = 1
    state_shards: int = 0

    @property
    def snapshots(self) -> bool:
        """Whether the group's layers are recurrent."""
        return self.state_shards > 0


def groups_of(vllm_config: Any, kv_cache_config: Any) -> list[Group]:
    """The engine's KV-cache groups. Raises ``LayoutRefused`` for kinds of state that blocks cannot restore."""
    found = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        tokens = int(spec.block_size)
        state_shards = _state_shards(number, vllm_config.parallel_config, spec)
        if state_shards:
            found.append(Group(number, tokens, 1, _SNAPSHOT_WINDOW, state_shards=state_shards))
        else:
            dealt = _token_shards(vllm_config.parallel_config, spec)
            found.append(Group(number, tokens * dealt, tokens, _window_of(number, spec), dealt))
    return found


def _layer_specs(spec: Any) -> list[Any]:
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def _state_shards(number: int, config: Any, spec: Any) -> int:
    """Over how many ranks the state of a group of recurrent layers is split; 0 for attention.

    Raises ``LayoutRefused`` for an engine that keeps no snapshots of it, or does not tell which blocks they are.
    """
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import MambaSpec

    layers = _layer_specs(spec)
    recurrent = [layer for layer in layers if isinstance(layer, MambaSpec)]
    if not recurrent:
        return 0
    modes = {str(layer.mamba_cache_mode) for layer in recurrent}
    if modes != {"align"}:
        raise LayoutRefused(
            f"KV-cache group {number} keeps no snapshots of its recurrent state (mode {', '.join(sorted(modes))})",
            "start vLLM with --enable-prefix-caching --mamba-cache-mode align",
        )
    if "kv_connector_block_state" not in SchedulerOutput.__dataclass_fields__:
        raise LayoutRefused(
            f"KV-cache group {number} is recurrent, and this vLLM does not hand its snapshots over",
            "use vLLM 0.32 or later; this engine runs without HPKV",
        )
    replicated = {bool(getattr(layer, "tp_replicated", False)) for layer in recurrent}
    if len(recurrent) != len(layers) or len(replicated) != 1:
        raise LayoutRefused(f"KV-cache group {number} mixes kinds of state")
    return 1 if replicated.pop() else int(config.tensor_parallel_size)


def snapshots(output: Any) -> dict[str, list[tuple[int, int, int]]]:
    """Snapshots of recurrent state that this step completes: request -> (group, block, tokens before it)."""
    state = getattr(output, "kv_connector_block_state", None)
    return getattr(state, "boundary_state_offloads", None) or {}


def _token_shards(config: Any, spec: Any) -> int:
    """Over how many ranks the tokens of a block are dealt out."""
    dcp_size = int(getattr(config, "decode_context_parallel_size", 1))
    pcp_size = int(getattr(config, "prefill_context_parallel_size", 1))
    if dcp_size * pcp_size > 1 and not hasattr(spec, "dcp_sharded"):
        raise LayoutRefused(
            "context parallelism of this version of vLLM is not known", "use vLLM 0.32 or later, or run without it"
        )
    return dcp_size if getattr(spec, "dcp_sharded", False) else 1


def _window_of(number: int, spec: Any) -> int:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    windows = set()
    for layer in _layer_specs(spec):
        if isinstance(layer, FullAttentionSpec):
            # A window without the hybrid manager: the engine keeps every block, so it needs every block.
            windows.add(0)
        elif isinstance(layer, SlidingWindowSpec):
            windows.add(int(layer.sliding_window) + int(getattr(layer, "extra_retained_tokens", 0)))
        else:
            raise LayoutRefused(
                f"KV-cache group {number} is of kind {type(layer).__name__}",
                "HPKV restores attention, and snapshots of recurrent state; this engine runs without it",
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
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    config = vllm_config.parallel_config
    pcp_size = int(getattr(config, "prefill_context_parallel_size", 1))
    return Parallel(
        tp_size=config.tensor_parallel_size,
        tp_rank=get_tp_group().rank_in_group,
        pp_size=config.pipeline_parallel_size,
        pp_rank=get_pp_group().rank_in_group,
        pcp_size=pcp_size,
        pcp_rank=get_pcp_group().rank_in_group if pcp_size > 1 else 0,
        dcp_size=int(getattr(config, "decode_context_parallel_size", 1)),
        dcp_interleave=int(getattr(config, "cp_kv_cache_interleave_size", None) or 1),
        nodes=int(getattr(config, "nnodes_within_dp", 1)),
    )


def strategy(vllm_config: Any) -> str:
    """How one replica of the engine runs in parallel, for people: ``TP2 PP2 EP``. Replicas are engines of their own."""
    config = vllm_config.parallel_config
    sizes = {
        "TP": config.tensor_parallel_size,
        "PP": config.pipeline_parallel_size,
        "PCP": getattr(config, "prefill_context_parallel_size", 1),
        "DCP": getattr(config, "decode_context_parallel_size", 1),
        "nodes": getattr(config, "nnodes_within_dp", 1),
    }
    words = [f"{name}{size}" for name, size in sizes.items() if size > 1 or name in ("TP", "PP")]
    if getattr(config, "enable_expert_parallel", False):
        words.append("EP")
    if vllm_config.model_config.use_mla:
        words.append("MLA")
    return " ".join(words)


def host_address() -> str:
    """The address by which other nodes of the engine reach this one (``VLLM_HOST_IP``, or the default route's)."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


class KvMemory:
    """Makes the engine's KV cache shareable in place: it is allocated from sealed shared memory to begin with.

    vLLM asks for the context before it allocates (0.31 and later). While it is active a large ``torch.zeros`` of
    bytes on the CPU comes from a memfd, zeroed and committed page by page on first touch, as before.
    """

    def __init__(self) -> None:
        self.memories: dict[int, SharedMemory] = {}
        """Data pointer -> memory."""
        self._regions: dict[int, HostRegion] = {}

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

    def find(self, tensor: torch.Tensor) -> HostRegion:
        """The shared memory under a tensor. Raises ``LayoutRefused`` for private memory."""
        pointer = tensor.untyped_storage().data_ptr()
        memory = self.memories.get(pointer)
        if memory is None:
            raise LayoutRefused(
                "the engine's KV cache lies in private memory",
                "use vLLM 0.31 or later; this engine runs without HPKV",
            )
        return self._regions.setdefault(pointer, HostRegion(memory))


def refuse_sleep(vllm_config: Any) -> None:
    """Raise ``LayoutRefused`` for an engine on a GPU that may sleep: it wakes up with other memory at the same place.

    A mover would keep the old memory from being freed, and go on to copy it.
    """
    if getattr(getattr(vllm_config, "model_config", None), "enable_sleep_mode", False):
        raise LayoutRefused(
            "sleep mode takes the KV cache's memory away while the engine lives",
            "start vLLM without --enable-sleep-mode; this engine runs without HPKV",
        )


def gpu_memory() -> GpuMemory:
    """How this process' GPU memory is exported. Raises ``LayoutRefused``, ``NoSuchDevice``, ``CudaError``."""
    if torch.version.hip is not None:
        raise LayoutRefused(
            "this PyTorch is built for ROCm, and calls its devices cuda as well",
            "this release moves KV of the CPU and of NVIDIA's GPUs; the engine runs without HPKV",
        )
    return GpuMemory(Driver(), torch.cuda.synchronize)


def compute_stream() -> int:
    """The stream in which this thread puts the engine's kernels."""
    return int(torch.cuda.current_stream().cuda_stream)


def kv_tensors(
    kv_caches: Mapping[str, Any], memory: KvMemory, gpu: Callable[[], GpuMemory]
) -> tuple[list[KvTensor], list[Region]]:
    """The layers' tensors by shape, stride and place, and the distinct memories they lie in.

    ``gpu`` is asked when some lie on a GPU.
    """
    regions: list[Region] = []
    tensors: list[KvTensor] = []
    for name, value in kv_caches.items():
        if not isinstance(value, torch.Tensor):
            raise LayoutRefused(f"layer {name}: its KV is a {type(value).__name__}, not one tensor")
        region: Region
        if value.device.type == "cpu":
            region = memory.find(value)
        elif value.device.type == "cuda":
            region = gpu().find(value)
        else:
            raise LayoutRefused(
                f"layer {name}: its KV lies on {value.device}",
                "this release moves KV of the CPU and of NVIDIA's GPUs; the engine runs without HPKV",
            )
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


def nothing_is_held(block_pool: Any) -> bool:
    """Whether no request and no store uses a block of the engine. Block 0 stands for no block and is never free."""
    return int(block_pool.get_num_free_blocks()) == int(block_pool.num_gpu_blocks) - 1


def touch(block_pool: Any, block_ids: list[int]) -> None:
    """Pin blocks of the engine: they are not given out again before ``untouch``."""
    block_pool.touch([block_pool.blocks[block] for block in block_ids])


def untouch(block_pool: Any, block_ids: list[int]) -> None:
    """Undo ``touch``. Reversed: the tail of a prefix becomes free, and is reused, first."""
    block_pool.free_blocks([block_pool.blocks[block] for block in reversed(block_ids)])
