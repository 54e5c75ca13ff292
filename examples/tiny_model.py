"""Tiny models with random weights and a real tokenizer, so that a real engine runs anywhere, offline.

    python examples/tiny_model.py qwen2 /tmp/models          # prints the directory of the model
    python examples/tiny_model.py --list

The same name and element type always give the same weights. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPES = ("bfloat16", "float32")
VOCABULARY = 1024
CONTEXT_TOKENS = 8192
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the cache keeps every block of keys and values.",
    "Once upon a time there was a small model with random weights that said nothing of use to anyone.",
    "A prefix that was computed once need not be computed again: not by this engine, not by the next one.",
    "Rain fell on the harbour all night, and in the morning the boats were still tied to the wooden pier.",
    "She asked how long the journey would take, and he answered that it depended on wind and tide.",
    "Every node has a pool of shared memory, a daemon that owns it, and engines which come and go.",
    "When the library closed for the summer, the students carried their books across the square.",
    "What is the difference between a lock and a lease? A lease ends by itself when it is forgotten.",
    "The engineer wrote down the numbers: 12, 48, 96, 1024, 4096, and 65536; then she measured again.",
    "Please summarise the following conversation in three short sentences, and add nothing of your own.",
    "They planted apple trees along the road because the soil was good and nobody had thought of pears.",
    "If the answer is not in the text, say so; if it is, repeat the sentence in which it was found.",
    "def first(values): return values[0] if values else None  # an empty list has no first element",
    "0 1 2 3 4 5 6 7 8 9 10 20 30 40 50 60 70 80 90 100 1000 10000; (a + b) * c = a * c + b * c",
    "Breakfast was bread with honey and a cup of strong coffee; lunch was forgotten, and dinner late.",
    "The committee met on Monday, argued on Tuesday, voted on Wednesday, and was sorry on Thursday.",
)


@dataclass(frozen=True)
class Recipe:
    """How to make one model: the names of its classes in transformers, and what is not the default."""

    about: str
    config: str
    model: str
    options: dict[str, Any]
    initializer_range: float = 0.08


RECIPES = {
    "qwen2": Recipe(
        "5 layers, 4 KV heads, 3M parameters",
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 5,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
    "qwen2-1kv": Recipe(
        "4 layers, one KV head: every tensor-parallel rank holds the same KV",
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
        },
    ),
    "qwen2-large": Recipe(
        "8 layers, 8 KV heads, 127M parameters: a prefill takes seconds on a CPU",
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
        initializer_range=0.04,
    ),
    "deepseek-v2": Recipe(
        "3 layers with MLA and mixture of experts: one latent per token, no KV heads",
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
        },
    ),
    "gemma3": Recipe(
        "6 layers, sliding window of 128 tokens in two of three: several KV-cache groups",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 128,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 64,
        },
    ),
    "qwen3-moe": Recipe(
        "4 layers with 8 experts each, 4 KV heads",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-next": Recipe(
        "4 layers, three of them recurrent (gated delta net), 4 experts",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
    ),
    "gpt-oss": Recipe(
        "4 layers with attention sinks, sliding window of 128 tokens in every other one, 4 experts",
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}
"""Name -> how the model is made."""


def make(name: str, directory: str | os.PathLike[str], dtype: str = "bfloat16") -> Path:
    """The directory of the model, ``directory/NAME-DTYPE``; made now unless it is there already.

    Several processes may ask for the same model at once: each sees all of it or none of it.
    """
    if name not in RECIPES:
        raise ValueError(f"no model {name!r}; there are {', '.join(RECIPES)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    target = Path(directory).resolve() / f"{name}-{dtype}"
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        workshop = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _build(RECIPES[name], workshop, dtype)
            _publish(workshop, target)
        finally:
            shutil.rmtree(workshop, ignore_errors=True)
    return target


def _publish(workshop: Path, target: Path) -> None:
    workshop.chmod(0o755)
    try:
        workshop.rename(target)
    except OSError:
        # Another process was faster; what it made is the same.
        if not (target / "config.json").exists():
            raise


def _build(recipe: Recipe, directory: Path, dtype: str) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(directory)
    config = getattr(transformers, recipe.config)(
        **recipe.options,
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=recipe.initializer_range,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        architectures=[recipe.model],
    )
    build: Callable[[Any], Any] = getattr(transformers, recipe.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(config).to(getattr(torch, dtype))
    model.save_pretrained(directory)


def _tokenizer() -> Any:
    """A byte-level BPE tokenizer, trained here on the corpus above."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        pad_token=SPECIAL_TOKENS[2],
        model_max_length=CONTEXT_TOKENS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="qwen2", choices=RECIPES)
    parser.add_argument("directory", nargs="?", default=".demo/models", help="each model in one of its own")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--list", action="store_true", help="say which models there are")
    arguments = parser.parse_args()
    if arguments.list:
        for name, recipe in RECIPES.items():
            print(f"{name:12} {recipe.about}")
        return
    print(make(arguments.name, arguments.directory, arguments.dtype))


if __name__ == "__main__":
    main()
