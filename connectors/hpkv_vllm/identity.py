"""The namespace: a digest of everything that changes the bytes of a block, and of nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from hpkv_client.errors import ConfigError
from hpkv_client.types import typed_digest

STRONG_HASHES = ("sha256", "sha256_cbor")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_SAMPLE_BYTES = 4096
_SAMPLES = 16
_HEAD_BYTES = 1 << 16


def fingerprint(vllm_config: Any, kv_cache_config: Any) -> bytes:
    """32 bytes that name model, weights and KV format. Free of tp, pp, dp, ranks and engine ids.

    Raises ``ConfigError`` when the engine hashes prefixes with something that is guessable or collides.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm not in STRONG_HASHES:
        raise ConfigError(
            f"prefix hashes of type {algorithm!r} can collide",
            f"start vLLM with --prefix-caching-hash-algo {STRONG_HASHES[0]}",
        )
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    return typed_digest(
        "hpkv-vllm-v1",
        _model_text(model),
        weights_digest(model.model, model.revision),
        str(model.dtype),
        str(cache.cache_dtype),
        str(model.quantization),
        algorithm,
        cache.block_size,
        int(getattr(kv_cache_config, "hash_block_size", None) or cache.block_size),
        str(getattr(kv_cache_config, "kv_cache_layout", None)),
        _groups_text(kv_cache_config),
        str(getattr(speculative, "method", None)),
        _model_text(draft) if draft is not None else None,
        weights_digest(draft.model, draft.revision) if draft is not None else None,
        element_encoding(vllm_config.device_config.device_type),
    )


def _model_text(model: Any) -> str:
    """The model's configuration with overrides (rope, window ...) applied, without where it was read from."""
    config = model.hf_config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        config.pop(volatile, None)
    return json.dumps(config, sort_keys=True, default=str)


def _groups_text(kv_cache_config: Any) -> str:
    specs = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        window, dtypes = getattr(spec, "sliding_window", None), getattr(spec, "dtypes", None)
        specs.append(f"{type(spec).__name__} {spec.block_size} {window} {dtypes}")
    return "; ".join(specs)


def element_encoding(device_type: str) -> str:
    """How the engine orders the elements of a KV head. CPU kernels pack K in an order of their instruction set."""
    if device_type != "cpu":
        return device_type
    amx = torch.cpu._is_amx_tile_supported()
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} amx={amx}"


def weights_digest(model: str, revision: str | None) -> bytes:
    """Digest of the weights: sizes, headers and sampled contents of local files; name and revision of others.

    Reads at most ``_SAMPLES`` small pieces and the header of each file, whatever its size.
    """
    directory = Path(model)
    if not directory.is_dir():
        return typed_digest("remote", model, revision)
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in _WEIGHT_SUFFIXES and path.is_file():
            digest.update(typed_digest(path.name, path.stat().st_size, _sample(path)))
    return digest.digest()


def _sample(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(file.read(_HEAD_BYTES))
        for i in range(1, _SAMPLES + 1):
            file.seek(max(0, size - _SAMPLE_BYTES) * i // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def machine_id() -> str:
    """Names this machine until it boots again; equal in all of its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
