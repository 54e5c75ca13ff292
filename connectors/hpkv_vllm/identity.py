"""The namespace: a digest of everything that changes the bytes of a block, and of nothing else."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger

from hpkv_client.errors import ConfigError
from hpkv_client.types import typed_digest
from hpkv_vllm.weights import Signature, files_digest, model_digest, signature, weight_files

log = init_logger("vllm.hpkv.identity")

STRONG_HASHES = ("sha256", "sha256_cbor")


_MODEL_FIELDS = (
    "architectures",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "quantization_config",
)
"""Parts of a model's configuration that are told apart when two namespaces are compared."""

_BRIEF_CHARACTERS = 64


def namespace_fields(vllm_config: Any, kv_cache_config: Any, weights_id: str) -> dict[str, str]:
    """Everything that changes the bytes of a block, by name. Free of tp, pp, dp, ranks and engine ids.

    ``weights_id`` names the model's weights if someone set it. Raises ``ConfigError`` when the engine hashes prefixes
    with something that is guessable or collides, or when its weights cannot be told from others.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm not in STRONG_HASHES:
        raise ConfigError(
            f"prefix hashes of type {algorithm!r} can collide",
            f"start vLLM with --prefix-caching-hash-algo {STRONG_HASHES[0]}",
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "KV scales that are calculated from the first prompt differ from engine to engine",
            "start vLLM without --calculate-kv-scales",
        )
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    fields = _model_fields("model", model) | {
        "weights": _weights(vllm_config, model, weights_id).hex(),
        "element type": str(model.dtype),
        "KV cache type": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "prefix hash": algorithm,
        "block size": str(cache.block_size),
        "hash block size": str(getattr(kv_cache_config, "hash_block_size", None) or cache.block_size),
        "KV layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "KV groups": _groups_text(kv_cache_config),
        "speculation": str(getattr(speculative, "method", None)),
        "element order": element_encoding(vllm_config),
    }
    if draft is not None:
        fields |= _model_fields("draft model", draft)
        fields["draft weights"] = _weights(vllm_config, draft, weights_id and f"{weights_id} draft").hex()
    return fields


def fingerprint(fields: Mapping[str, str]) -> bytes:
    """32 bytes that name model, weights and KV format."""
    return typed_digest("hpkv-vllm-v2", *(text for pair in sorted(fields.items()) for text in pair))


def brief(fields: Mapping[str, str]) -> dict[str, str]:
    """The same for people who compare two: long values become a digest."""
    return {
        name: text if len(text) <= _BRIEF_CHARACTERS else f"#{typed_digest(text).hex()[:12]}"
        for name, text in fields.items()
    }


def _weights(vllm_config: Any, model: Any, weights_id: str) -> bytes:
    load_format = str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        return typed_digest("dummy", int(model.seed or 0))
    return model_digest(model.model, model.revision, weights_id)


def _model_fields(prefix: str, model: Any) -> dict[str, str]:
    """The model's configuration with overrides (rope, window ...) applied, without where it was read from."""
    config = model.hf_config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        config.pop(volatile, None)
    fields = {f"{prefix} {name}": _json(config.pop(name)) for name in _MODEL_FIELDS if name in config}
    return fields | {f"{prefix}, all else": _json(config)}


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _groups_text(kv_cache_config: Any) -> str:
    specs = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        window, dtypes = getattr(spec, "sliding_window", None), getattr(spec, "dtypes", None)
        specs.append(f"{type(spec).__name__} {spec.block_size} {window} {dtypes}")
    return "; ".join(specs)


def element_encoding(vllm_config: Any) -> str:
    """How the engine orders the elements of a KV head.

    CPU kernels pack K in an order of their instruction set. On other devices the order is that of the attention
    kernels, which vLLM chooses by its version, the device's capability and its configuration; strides do not show it.
    """
    device_type = vllm_config.device_config.device_type
    if device_type != "cpu":
        import vllm
        from vllm.platforms import current_platform

        attention = getattr(vllm_config, "attention_config", None)
        chosen = [getattr(attention, name, None) for name in ("backend", "backend_per_kind", "use_trtllm_attention")]
        return f"{device_type} {current_platform.get_device_capability()} vllm {vllm.__version__} {_json(chosen)}"
    amx = torch.cpu._is_amx_tile_supported()
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} amx={amx}"


class Adapters:
    """LoRA adapters by content. vLLM's own hashes tell them apart by name and path only."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, str], tuple[Signature, bytes | None]] = {}

    def digest(self, request: Any) -> bytes | None:
        """Of the request's adapter, empty without one; None when nothing may be cached for it.

        The engine reads an adapter once: if its files change later, what it computes with is not known any more.
        """
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return b""
        key = (str(lora.lora_name), int(lora.lora_int_id), str(lora.lora_path))
        files = weight_files(Path(lora.lora_path))
        try:
            now = signature(files)
            known = self._known.get(key)
            if known is None:
                known = now, files_digest(files) if files else None
                if not files:
                    log.warning("HPKV: the weights of adapter %s are not in local files: it is not cached", key[0])
            elif known[0] != now and known[1] is not None:
                known = now, None
                log.warning("HPKV: the files of adapter %s have changed: it is not cached until vLLM restarts", key[0])
        except OSError as problem:
            log.warning("HPKV: adapter %s is not cached: %s", key[0], problem)
            known = (), None
        self._known[key] = known
        return known[1]


def machine_id() -> str:
    """Names this machine until it boots again; equal in all of its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
