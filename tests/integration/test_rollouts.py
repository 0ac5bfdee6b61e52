"""A whole run whose rollouts give several samples, the first of each group being a greedy baseline (remax)."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.integration.embedded import train, write_sums
from tests.support.engine import write_checkpoint

RUN = """\
data:
  prompt_data: train.jsonl
  label_key: label
rollout:
  hf_checkpoint: model
  engine: simulated
  device: cpu
  num_rollout: 2
  rollout_batch_size: 2
  n_samples_per_prompt: 3
  rollout_max_response_len: 8
  max_turns: 2
  custom_generate_function_path: forked.generate
  save_debug_rollout_data: kept
trainer:
  lr: 1e-3
  advantage_estimator: remax
  loss_normalizer: rollout_mean
"""
FORKED = """\
async def generate(context, prompt, sampling):
    made = []
    for _ in range(1 + context.index % 2):  # rollout 1 gives two samples, the others one
        trajectory = context.start(prompt)
        trajectory.append_generation(await context.generate(trajectory.input_ids, sampling))
        trajectory.reward = trajectory.response_length / 8 + context.index
        trajectory.metadata["temperature"] = sampling.temperature
        made.append(trajectory)
    return made
"""


@pytest.mark.timeout(240)
def test_rollouts_of_several_samples_are_trained_against_a_greedy_one(tmp_path):
    write_checkpoint(tmp_path / "model")
    write_sums(tmp_path, 8)
    (tmp_path / "forked.py").write_text(FORKED)
    (tmp_path / "run.yaml").write_text(RUN)
    history = train(tmp_path, "forked", seconds=220)
    metrics = {name: dict(history.series(name)) for name in ("reward_mean", "greedy_reward_mean", "trained_tokens")}
    for step in range(2):
        rows = [json.loads(line) for line in (tmp_path / "kept" / f"{step}.jsonl").open()]
        assert [row["rollout_index"] for row in rows] == [0, 1, 1, 2] * 2
        heat = [json.loads(row["metadata_json"])["temperature"] for row in rows]
        assert heat == [0.0, 1.0, 1.0, 1.0] * 2
        greedy = [row for row in rows if row["rollout_index"] == 0]
        others = [row for row in rows if row["rollout_index"] != 0]
        found = {name: list(values.values())[step] for name, values in metrics.items()}
        assert found["greedy_reward_mean"] == pytest.approx(np.mean([row["reward"] for row in greedy]))
        assert found["reward_mean"] == pytest.approx(np.mean([row["reward"] for row in others]))
        assert found["trained_tokens"] == sum(sum(row["loss_mask"]) for row in others)
