"""A tiny model that sees: LLaVA with random weights, and pictures for it."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

IMAGE_TOKEN = "<image>"
SIDE, PATCH = 112, 14
IMAGE_TOKENS = (SIDE // PATCH) ** 2
"""Placeholders of one picture in the prompt."""


def make_llava(base: Path, directory: Path) -> Path:
    """The model, with the tokenizer of ``base`` and one token more."""
    import torch
    from transformers import AutoTokenizer, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(directory)
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.08,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=64,
        initializer_range=0.3,
    )
    image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    config = LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=image_token,
        image_seq_length=IMAGE_TOKENS,
        architectures=["LlavaForConditionalGeneration"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlavaForConditionalGeneration(config).to(torch.float32).save_pretrained(directory)
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_resize": True,
        "do_center_crop": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE_TOKEN,
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    (directory / "processor_config.json").write_text(json.dumps(processor))
    return directory


def picture(seed: int) -> str:
    """A PNG of random pixels as a data URL."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
