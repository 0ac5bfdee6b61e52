"""A step of a run is exported, and another run trains the file: no engine, the same samples, the same loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from services.console.core.history import load_history
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


def test_a_file_is_trained_in_place_of_generated_groups(tmp_path):
    write_checkpoint(tmp_path / "model")
    rows = [json.dumps({"input": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    (tmp_path / "grader.py").write_text(GRADER)
    (tmp_path / "run.yaml").write_text(RUN)
    code, output = call(tmp_path, "train", "run.yaml", "--run-id", "first")
    assert code == 0, output
    # The second step is newer than the oldest retained checkpoint: its tokens are still there.
    code, output = call(tmp_path, "export-samples", "first", "--step", "2", "--out", "step.jsonl")
    assert code == 0, output
    assert "4 samples of step 2: step.jsonl" in output

    replay = ("--load-debug-rollout-data", str(tmp_path / "step.jsonl"), "--num-rollout", "3")
    code, output = call(tmp_path, "train", "run.yaml", "--run-id", "again", *replay)
    assert code == 0, output
    assert series(tmp_path, "again", "reward_mean") == [series(tmp_path, "first", "reward_mean")[1]] * 3
    assert (
        series(tmp_path, "again", "response_length_mean") == [series(tmp_path, "first", "response_length_mean")[1]] * 3
    )
    code, output = call(tmp_path, "train", "run.yaml", "--run-id", "none", "--debug-train-only", "--check")
    assert code == 2
    assert "debug_train_only needs load_debug_rollout_data" in output
