"""What the benchmarks share: the demo's task with its SFT model, `tetrarch train` commands, and a run's history."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from examples.first_run.__main__ import ROOT, Workspace, new_workspace
from services.console.core.history import METRICS_FILE, History, parse_line

BENCH_DIR = ROOT / "runs" / "bench"


def history_of(run_dir: Path) -> History:
    """Everything a run wrote about itself."""
    history = History()
    for number, line in enumerate((run_dir / METRICS_FILE).read_text().splitlines(), 1):
        event = parse_line(number, line)
        if event:
            history.add(event)
    return history


def tetrarch(arguments: list[str], log: Path) -> tuple[int, float]:
    """Runs the command line with its output in a file; (exit status, seconds)."""
    started = time.monotonic()
    with log.open("a") as out:
        command = [sys.executable, "-m", "services.console", *arguments]
        status = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    return status, time.monotonic() - started


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    run_dir: Path
    seconds: float
    history: History

    @property
    def accuracies(self) -> list[float]:
        """Held-out accuracy at every evaluation."""
        return [value for _, value in self.history.evaluation_series().get("heldout", [])]


def sft_workspace(seed: int) -> Workspace:
    """The demo's workspace after phase 1; made once and kept."""
    for path in sorted(BENCH_DIR.glob("first-run-*")):
        workspace = Workspace(path.absolute(), seed)
        if (path / "sft" / "hf" / "config.json").exists() and (path / f"seed-{seed}").exists():
            return workspace
    workspace = new_workspace(BENCH_DIR, seed)
    (workspace.path / f"seed-{seed}").touch()
    train(workspace, workspace.sft(), "sft")
    return workspace


def train(workspace: Workspace, arguments: list[str], run_id: str) -> Trained:
    """A `tetrarch train` command to its end. Raises SystemExit with the log's place when it fails."""
    log = workspace.path / f"{run_id}.log"
    status, seconds = tetrarch(arguments, log)
    if status:
        raise SystemExit(f"tetrarch train of {run_id} failed with exit status {status}; see {log}.")
    run_dir = workspace.path / run_id
    return Trained(run_dir, seconds, history_of(run_dir))


def fresh_id(workspace: Workspace, name: str) -> str:
    """A run id that the workspace has not seen."""
    number = 1
    while (workspace.path / f"{name}-{number}").exists():
        number += 1
    return f"{name}-{number}"
