"""A run in a directory that has its `run.yaml`, as a user starts it, with all tiers beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from services.console.core.history import History, load_history


def write_sums(directory: Path, count: int) -> None:
    """Prompts and labels in `train.jsonl`."""
    lines = [json.dumps({"input": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(count)]
    (directory / "train.jsonl").write_text("".join(lines))


def train(directory: Path, run_id: str, seconds: float) -> History:
    """The run to its end; modules of the directory can be imported in it."""
    paths = [os.environ.get("PYTHONPATH", ""), str(directory)]
    done = subprocess.run(
        [sys.executable, "-m", "services.console", "train", "run.yaml", "--run-id", run_id],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout
    return load_history(directory / "runs" / run_id)
