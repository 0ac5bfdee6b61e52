"""A whole run on a mixture: a JSONL and a parquet file, own limits and graders, weights from a user's function."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine import write_checkpoint

RUN = """\
data:
  label_key: label
  rollout_shuffle: true
  prompt_data_mixture:
    - {name: easy, path: easy.jsonl}
    - {name: hard, path: hard.parquet, input_key: q, label_key: a, rm_type: math, max_response_len: 3}
  curriculum_path: my_plan.weights
rollout:
  hf_checkpoint: model
  engine: simulated
  device: cpu
  num_rollout: 3
  rollout_batch_size: 4
  n_samples_per_prompt: 2
  rollout_max_response_len: 8
"""
PLAN = """\
def weights(state):
    # Shares of 1/2, 1/4 and 0 for the easy set.
    return {"easy": 2 - state.block, "hard": 2 + state.block}
"""


def test_a_run_draws_by_the_users_weights_and_keeps_the_limits_of_each_set(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    write_checkpoint(tmp_path / "model")
    rows = [{"input": f"{i}+1=", "label": str(i + 1)} for i in range(16)]
    (tmp_path / "easy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hard = pyarrow.Table.from_pylist([{"q": f"{i}*2=", "a": str(2 * i)} for i in range(9)])
    parquet.write_table(hard, tmp_path / "hard.parquet", row_group_size=4)
    (tmp_path / "my_plan.py").write_text(PLAN)
    (tmp_path / "mix.yaml").write_text(RUN)
    done = subprocess.run(
        [sys.executable, "-m", "services.console", "train", "mix.yaml"],
        cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # Simulated answers are as long as they may be: 8 tokens for the easy set, 3 for the hard one.
    for step, length in ((1, 5.5), (2, 4.2), (3, 3.0)):
        line = next(line for line in done.stdout.splitlines() if line.startswith(f"step {step}/3"))
        assert f"length {length:.1f} " in line, done.stdout
