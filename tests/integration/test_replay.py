"""A run generates and keeps its groups, and another run trains the files: no engine, the same samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from services.console.core.history import load_history
from tests.integration.embedded import write_sums
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
  n_samples_per_prompt: 2
  rollout_max_response_len: 8
reward:
  rm_type: custom
  custom_rm_path: grader.by_length
trainer:
  lr: 1e-3
  save_interval: 1
"""
GRADER = """\
async def by_length(args, sample, **kwargs):
    return float(len(sample.response) % 7)
"""


def call(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "services.console", *arguments]
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=120
    )
    return done.returncode, done.stdout


def series(folder: Path, run: str, name: str) -> list[float]:
    """A metric of every step."""
    return [value for _, value in load_history(folder / "runs" / run).series(name)]


def rows(path: Path) -> list[dict]:
    return sorted(map(json.loads, path.open()), key=lambda row: (row["ordinal"], row["index"]))


def test_kept_groups_are_trained_in_place_of_generated_ones(tmp_path):
    write_checkpoint(tmp_path / "model")
    write_sums(tmp_path, 16)
    (tmp_path / "grader.py").write_text(GRADER)
    (tmp_path / "run.yaml").write_text(RUN)
    keep = ("--debug-rollout-only", "--save-debug-rollout-data", "kept", "--num-rollout", "4")
    code, output = call(tmp_path, "train", "run.yaml", "--run-id", "first", *keep)
    assert code == 0, output
    assert series(tmp_path, "first", "staleness_max") == series(tmp_path, "first", "stale_group_count") == [0.0] * 4
    assert series(tmp_path, "first", "policy_version") == [1.0] * 4, "the weights stay"
    assert not series(tmp_path, "first", "loss")
    assert not list((tmp_path / "runs" / "first").glob("checkpoints/step_*"))
    code, output = call(tmp_path, "export-samples", "first", "--step", "2", "--out", "step.jsonl")
    assert code == 0, output
    assert "4 samples of step 2: step.jsonl" in output
    assert rows(tmp_path / "step.jsonl") == rows(tmp_path / "kept" / "1.jsonl")

    again = ("--load-debug-rollout-data", "kept/{rollout_id}.jsonl", "--save-debug-rollout-data", "again")
    code, output = call(tmp_path, "train", "run.yaml", "--run-id", "again", *again)
    assert code == 0, output
    for name in ("reward_mean", "response_length_mean"):
        assert series(tmp_path, "again", name) == series(tmp_path, "first", name)[:2]
    assert len(series(tmp_path, "again", "loss")) == 2
    for step in (0, 1):
        kept, trained = (rows(tmp_path / place / f"{step}.jsonl") for place in ("kept", "again"))
        assert [(row["tokens"], row["log_probs"]) for row in kept] == [
            (row["tokens"], row["log_probs"]) for row in trained
        ]
    code, output = call(tmp_path, "train", "run.yaml", "--run-id", "none", "--debug-train-only", "--check")
    assert code == 2
    assert "debug_train_only needs load_debug_rollout_data" in output
