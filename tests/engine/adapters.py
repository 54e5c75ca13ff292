"""LoRA adapters for the tiny Qwen2 model: random, but strong enough to change every answer."""

from __future__ import annotations

import json
from pathlib import Path


def make_adapter(directory: Path, base: Path, seed: int) -> Path:
    """An adapter on the key and value projections, so that it changes the KV itself."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(5):
        for name, width in (("k_proj", 128), ("v_proj", 128)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(8, 256, generator=generator) * 0.3
            weights[f"{stem}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * 0.3
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["k_proj", "v_proj"],
        "lora_dropout": 0.0,
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
