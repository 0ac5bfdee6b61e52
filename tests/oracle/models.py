"""Tiny Hugging Face checkpoints with random weights, one per family and RoPE kind that the trainer supports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

NAMES = ("qwen3", "qwen3_tied", "qwen2", "llama", "llama31", "qwen3_moe")
VOCAB_SIZE = 131  # not divisible by two: with tensor parallelism the embedding is padded


def write_models(root: Path, names: Sequence[str] = NAMES) -> None:
    """Writes root/<name> for every name; norms and biases are randomised, else swapped ones would go unnoticed."""
    import torch
    import transformers as hf

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    scaled = {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    }
    configs = {
        "qwen3": hf.Qwen3Config(**common, **plain, head_dim=16),
        "qwen3_tied": hf.Qwen3Config(**common | {"tie_word_embeddings": True}, **plain, head_dim=16),
        "qwen2": hf.Qwen2Config(**common, **plain),
        "llama": hf.LlamaConfig(**common),
        "llama31": hf.LlamaConfig(**common, **scaled),
        "qwen3_moe": hf.Qwen3MoeConfig(
            **common | {"num_hidden_layers": 3},
            **plain,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
    }
    for seed, name in enumerate(NAMES):
        if name not in names:
            continue
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(configs[name], dtype=torch.float32)
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.data.uniform_(0.5, 1.5)
            if parameter_name.endswith("bias"):
                parameter.data.normal_(0, 0.2)
        model.save_pretrained(root / name)
        (root / name / "tokenizer.json").write_text("{}")
