"""Whole runs with functions of the user that reject groups, pick batches and judge stale groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.engine import write_checkpoint

RUN = """\
data:
  prompt_data: data.jsonl
  label_key: label
{data}
rollout:
  hf_checkpoint: model
  engine: simulated
  device: cpu
  num_rollout: 3
  rollout_batch_size: 2
  n_samples_per_prompt: 2
  rollout_max_response_len: 8
{rollout}
trainer:
  max_staleness: 1
{trainer}
"""
FUNCTIONS = """\
def odd(args, group):
    return {"keep": group[0].group_index % 2 == 1, "reason": f"even_{group[0].group_index % 4}"}

def none(args, group):
    return False

def oldest(args, rollout_id, buffer, n):
    return sorted(buffer, key=lambda group: group[0].group_index)[:n]

def keep(group):
    return "keep"
"""


def train(directory: Path, **groups: str) -> subprocess.CompletedProcess:
    """A run in a directory with further keys by group."""
    write_checkpoint(directory / "model")
    rows = [{"input": f"{i}+1=", "label": str(i + 1)} for i in range(64)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "choose.py").write_text(FUNCTIONS)
    filled = {name: groups.get(name, "") for name in ("data", "rollout", "trainer")}
    (directory / "run.yaml").write_text(RUN.format(**filled))
    return subprocess.run(
        [sys.executable, "-m", "services.console", "train", "run.yaml"],
        cwd=directory, env=dict(os.environ), capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


def test_a_run_replaces_what_its_filter_rejects_and_trains_what_another_picks(tmp_path: Path):
    done = train(
        tmp_path,
        data="  buffer_filter_path: choose.oldest",
        rollout="  dynamic_sampling_filter_path: choose.odd\n  over_sampling_batch_size: 4",
        trainer="  stale_policy_path: choose.keep",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3/3" in done.stdout


def test_a_filter_that_rejects_everything_ends_the_run_with_a_sentence(tmp_path: Path):
    done = train(tmp_path, rollout="  dynamic_sampling_filter_path: choose.none\n  max_filter_rejections: 6")
    assert done.returncode != 0
    text = " ".join((done.stdout + done.stderr).split())
    assert "dynamic_sampling_filter_path rejected 6 groups in a row" in text, text
    assert "loosen the filter" in text
