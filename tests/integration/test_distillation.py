"""A whole run with a teacher at a URL: its log-probs reach the loss, and while it is away no prompt is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from services.console.core.history import load_history
from tests.integration.embedded import write_sums
from tests.support.engine import start_engine, write_checkpoint

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
  save_debug_rollout_data: kept
reward:
  rm_type: exact_match
trainer:
  lr: 1e-3
  loss_normalizer: token_mean
  use_rollout_logprobs: true
  use_opd: true
  opd_teacher_timeout: 2.0
"""


@pytest.fixture
def teacher(tmp_path):
    write_checkpoint(tmp_path / "model")
    engine = start_engine("simulated", tmp_path / "model", tmp_path, simulated={"seed": 5})
    yield engine
    engine.stop()


def kept(folder: Path) -> list[list[dict]]:
    """Rows by step."""
    return [[json.loads(line) for line in (folder / "kept" / f"{step}.jsonl").open()] for step in (0, 1)]


@pytest.mark.timeout(240)
def test_a_teacher_that_comes_late_teaches_every_prompt(tmp_path, teacher):
    write_sums(tmp_path, 16)
    (tmp_path / "run.yaml").write_text(RUN + f"  opd_teacher_url: http://127.0.0.1:{teacher.port}\n")
    os.kill(teacher.process.pid, signal.SIGSTOP)
    command = [sys.executable, "-m", "services.console", "train", "run.yaml", "--run-id", "taught"]
    log = (tmp_path / "train.log").open("w+")
    process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
    try:
        node_log = tmp_path / "runs" / "taught" / "logs" / "rollout.log"
        deadline = time.monotonic() + 100
        while not (node_log.exists() and "waits for its teacher" in node_log.read_text()):
            assert process.poll() is None, (tmp_path / "train.log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "train.log").read_text()
            time.sleep(0.2)
        os.kill(teacher.process.pid, signal.SIGCONT)
        code = process.wait(120)
    finally:
        process.kill()
    assert code == 0, (tmp_path / "train.log").read_text()
    steps = kept(tmp_path)
    assert sorted({row["ordinal"] for rows in steps for row in rows}) == [0, 1, 2, 3]
    history = load_history(tmp_path / "runs" / "taught")
    found = [value for _, value in history.series("opd_reverse_kl")]
    for value, rows in zip(found, steps, strict=True):
        student, said = (np.concatenate(column) for column in zip(*map(log_probs, rows), strict=True))
        assert len(said)
        assert value == pytest.approx((student - said).mean(), rel=1e-4)


def log_probs(row: dict) -> tuple[np.ndarray, np.ndarray]:
    """The engine's and the teacher's."""
    assert len(row["teacher"]["log_probs"]) == len(row["log_probs"]) == sum(row["loss_mask"])
    return np.array(row["log_probs"]), np.array(row["teacher"]["log_probs"])
