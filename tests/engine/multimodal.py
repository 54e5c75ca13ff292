"""A tiny model that sees: BLIP-2 with random weights, and pictures for it."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

IMAGE_TOKEN = "<image>"
SIDE, PATCH = 112, 14
IMAGE_TOKENS = 100
"""Placeholders of one picture, at the start of the prompt."""


def make_blip2(base: Path, directory: Path) -> Path:
    """The model, with the tokenizer of ``base`` and one token more."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    tokenizer.save_pretrained(directory)
    text = transformers.OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        word_embed_proj_dim=128,
        ffn_dim=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=4096,
        init_std=0.3,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    vision = transformers.Blip2VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        initializer_range=0.3,
    )
    queries = transformers.Blip2QFormerConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        encoder_hidden_size=64,
        initializer_range=0.3,
    )
    config = transformers.Blip2Config(
        vision_config=vision.to_dict(),
        qformer_config=queries.to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        architectures=["Blip2ForConditionalGeneration"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = transformers.Blip2ForConditionalGeneration(config).to(torch.float32)
        with torch.no_grad():
            made.query_tokens.normal_(0, 1)
            made.language_projection.weight.normal_(0, 0.5)
        made.save_pretrained(directory)
    images = {
        "image_processor_type": "BlipImageProcessor",
        "processor_class": "Blip2Processor",
        "size": {"height": SIDE, "width": SIDE},
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    return directory


def picture(seed: int) -> str:
    """A PNG of coloured squares as a data URL."""
    import numpy as np
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    pixels = colours.repeat(SIDE // 4, 0).repeat(SIDE // 4, 1)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
