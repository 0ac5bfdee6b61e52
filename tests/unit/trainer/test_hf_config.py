"""Reading config.json without transformers; transformers itself is the oracle for rotary frequencies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from services.common.errors import ServiceError
from services.trainer.ranks.model.hf_config import inverse_frequencies, read_hf_config

BASE = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
SCALED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write(path: Path, **changes: object) -> Path:
    (path / "config.json").write_text(json.dumps(BASE | changes))
    return path


def test_defaults_and_both_generations_of_rope_keys(tmp_path: Path) -> None:
    old = read_hf_config(write(tmp_path, rope_theta=5e5))
    new = read_hf_config(write(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    assert old.rope_theta == new.rope_theta == 5e5
    assert (old.kv_heads, old.head_dim, old.tied) == (4, 16, False)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_experts_are_read_from_both_generations_of_keys(tmp_path: Path, key: str) -> None:
    moe = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    every = read_hf_config(write(tmp_path, **moe, **{key: 8}, norm_topk_prob=True)).experts
    assert every is not None
    assert (every.count, every.per_token, every.intermediate_size, every.normalised) == (8, 2, 16, True)
    assert every.layers == (0, 1, 2, 3, 4, 5)
    some = read_hf_config(write(tmp_path, **moe, **{key: 8}, decoder_sparse_step=2, mlp_only_layers=[3])).experts
    assert some is not None
    assert (some.layers, some.normalised) == ((1, 5), False)
    assert read_hf_config(write(tmp_path, **moe, **{key: 0})).experts is None


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, {"rope_type": "llama3", **SCALED}]
)
def test_frequencies_equal_transformers(tmp_path: Path, rope: dict) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = rope | {"rope_theta": 1e4}
    ours = torch.tensor(inverse_frequencies(read_hf_config(write(tmp_path, rope_parameters=parameters))))
    reference = LlamaRotaryEmbedding(LlamaConfig(**BASE, rope_parameters=parameters))
    assert torch.allclose(ours, reference.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is unknown; use one of llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "RoPE of type 'yarn'"),
        ({"use_sliding_window": True}, "sliding window"),
    ],
)
def test_unsupported_models_are_named(tmp_path: Path, changes: dict, sentence: str) -> None:
    with pytest.raises(ServiceError, match=sentence) as refused:
        read_hf_config(write(tmp_path, **changes))
    assert refused.value.reason == "MODEL_UNSUPPORTED"


def test_missing_or_broken_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"config\.json cannot be read"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ServiceError, match=r"config\.json has no key"):
        read_hf_config(tmp_path)
