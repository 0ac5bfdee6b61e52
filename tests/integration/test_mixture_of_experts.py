"""A whole run of a mixture of experts: SGLang tells which expert every token took, the trainer goes the same ways, and
the engine takes updated experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.embedded import train, write_sums
from tests.support.engine import missing, write_checkpoint

RUN = """\
data:
  prompt_data: train.jsonl
  label_key: label
rollout:
  hf_checkpoint: model
  engine: sglang
  device: cpu
  num_rollout: 3
  rollout_batch_size: 4
  n_samples_per_prompt: 4
  rollout_max_response_len: 8
reward:
  rm_type: custom
  custom_rm_path: taste.reward
trainer:
  lr: 1e-2
  use_rollout_routing_replay: true
"""
TASTE = """\
async def reward(args, sample, **kwargs):
    return float(len(sample.response) % 7)
"""
HELD = 21
"""Tensors of the engine: embedding, output, last norm; 9 a layer, experts stacked in two of them."""


def write_mixture(directory: Path) -> None:
    """Random weights of four experts beside the usual tokenizer."""
    import torch
    import transformers as hf

    write_checkpoint(directory)
    known = json.loads((directory / "config.json").read_text())
    torch.manual_seed(0)
    config = hf.Qwen3MoeConfig(
        **{key: known[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
        **{key: known[key] for key in ("num_key_value_heads", "head_dim", "max_position_embeddings", "eos_token_id")},
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    (directory / "model.safetensors").unlink()
    hf.Qwen3MoeForCausalLM(config).save_pretrained(directory)


@pytest.mark.skipif(bool(missing("sglang-cpu")), reason="needs SGLang")
@pytest.mark.timeout(300)
def test_experts_chosen_by_the_engine_are_trained_and_sent_back(tmp_path):
    write_mixture(tmp_path / "model")
    write_sums(tmp_path, 8)
    (tmp_path / "taste.py").write_text(TASTE)
    (tmp_path / "run.yaml").write_text(RUN)
    history = train(tmp_path, "mixture", seconds=280)
    names = ("policy_version", "grad_norm", "log_prob_abs_diff_max", "update_verified_tensor_count")
    versions, norms, differences, verified = ([value for _, value in history.series(name)] for name in names)
    assert versions == [2, 3, 4]
    assert min(norms) > 0
    assert max(differences) <= 1e-5  # also after the engine took updated experts
    assert verified == [HELD] * 3
