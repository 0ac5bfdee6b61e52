"""The command as a user runs it: every tier, simulated engines, a kill in the middle, and looks afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.support.engine import write_checkpoint

RUN = """\
data:
  prompt_data: train.jsonl
  label_key: label
  num_epoch: 1
  eval_prompt_data: [held, held.jsonl]
rollout:
  hf_checkpoint: model
  engine: simulated
  device: cpu
  num_rollout: 8
  rollout_batch_size: 2
  n_samples_per_prompt: 2
  rollout_max_response_len: 8
  eval_interval: 8
trainer:
  lr: 1e-4
  save_interval: 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_checkpoint(folder / "model")
    rows = [json.dumps({"input": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(16)]
    (folder / "train.jsonl").write_text("".join(rows))
    (folder / "held.jsonl").write_text(rows[0])
    (folder / "arith.yaml").write_text(RUN)
    return folder


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "services.console", *arguments],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def call(folder: Path, *arguments: str) -> tuple[int, str]:
    process = start(folder, *arguments)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def test_killed_run_resumes_with_the_same_command(folder):
    first = start(folder, "train", "arith.yaml")
    seen = ""
    for line in first.stdout:
        seen += line
        if line.startswith("step 3/8"):
            break
    else:
        pytest.fail(seen)
    tiers = children(first.pid)
    assert len(tiers) == 5
    first.send_signal(signal.SIGKILL)
    first.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in tiers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in tiers if Path(f"/proc/{pid}").exists()]

    code, output = call(folder, "train", "arith.yaml")
    assert code == 0, output
    assert "run arith goes on from step" in output
    assert "step 8/8" in output
    directory = folder / "runs" / "arith"
    assert (directory / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((directory / "run.yaml").read_text())["trainer"]["global_batch_size"] == 4
    assert "before 0.000   after 0.000" in output
    assert str(directory / "metrics.jsonl") in output


def test_what_is_left_can_be_looked_at(folder):
    code, output = call(folder, "status")
    assert code == 0, output
    assert "arith" in output
    assert "finished" in output
    assert "drawn 16 = pending 0 + leased 0 + ready 0 + reserved 0 + consumed 16 + evicted 0" in output
    code, output = call(folder, "samples", "arith", "--step", "8", "-n", "1")
    assert code == 0, output
    assert "step 8, weights v" in output
    assert output.count("0.000") == 2
    code, output = call(folder, "train", "arith.yaml")
    assert code == 0, output
    assert "Run arith is finished: all 8 steps are done." in output


def test_settings_that_may_not_change_are_named(folder):
    code, output = call(folder, "train", "arith.yaml", "--n-samples-per-prompt", "4")
    assert code == 2, output
    assert "tetrarch: Run arith exists with other settings: " in output
    assert "rollout.n_samples_per_prompt (2 → 4)" in output
    assert not os.path.exists(folder / ".tetrarch" / "up.json")
