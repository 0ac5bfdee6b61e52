"""What the benchmarks share: a task with a model to train, `tetrarch` commands, and a run's history.

On the CPU it is the demo's task with its SFT model; on CUDA the word problems with the model that `--model` names.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.first_run.__main__ import CONFIGS, ROOT, Workspace, new_workspace
from examples.word_problems.task import write_task
from services.common.run_spec import RunSpec
from services.common.settings import read_yaml
from services.console.core.history import METRICS_FILE, History, parse_line
from services.console.state import Running, StateDir
from services.console.tiers import Ports

BENCH_DIR = ROOT / "runs" / "bench"
_UP_SECONDS, _DOWN_SECONDS = 300.0, 120.0
_COMMAND_SECONDS = 3000.0


def history_of(run_dir: Path) -> History:
    """Everything a run wrote about itself."""
    history = History()
    for number, line in enumerate((run_dir / METRICS_FILE).read_text().splitlines(), 1):
        event = parse_line(number, line)
        if event:
            history.add(event)
    return history


def tetrarch(arguments: list[str], log: Path, limit: float = _COMMAND_SECONDS) -> tuple[int, float]:
    """Runs the command line with its output in a file; (exit status, seconds). Raises SystemExit when it is not done
    after `limit` seconds."""
    started = time.monotonic()
    with log.open("a") as out:
        command = [sys.executable, "-m", "services.console", *arguments]
        try:
            status = subprocess.run(
                command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            why = f"was not done after {limit:.0f} s"
            raise SystemExit(f"tetrarch {arguments[0]} {why}; see {log}.") from None
    return status, time.monotonic() - started


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    run_dir: Path
    seconds: float
    history: History

    @property
    def settings(self) -> RunSpec:
        """Its resolved settings."""
        return RunSpec.model_validate(read_yaml(self.run_dir / "run.yaml"))


@dataclass(frozen=True)
class RealWorkspace:
    """The word problems and a model that is trained on them on GPUs."""

    path: Path
    model: Path

    @property
    def state(self) -> Path:
        """Store and logs of the tiers."""
        return self.path / "state"

    def grpo(self, run_id: str, *more: str) -> list[str]:
        """Arguments of a run; `more` flags win."""
        data = self.path / "data"
        return [
            *("train", str(CONFIGS / "smollm2_grpo.yaml"), "--state-dir", str(self.state)),
            *("--run-id", run_id, "--run-dir", str(self.path), "--hf-checkpoint", str(self.model)),
            *("--prompt-data", str(data / "train.jsonl"), "--eval-prompt-data", "heldout", str(data / "heldout.jsonl")),
            *more,
        ]


def add_device(arguments: argparse.ArgumentParser) -> None:
    """Adds --device and --model."""
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--model", type=Path, help="Hugging Face checkpoint that is trained on CUDA")


def workspace_for(device: str, model: Path | None) -> Workspace | RealWorkspace:
    """The task of a device. Raises SystemExit without a model for CUDA."""
    if device == "cpu":
        return sft_workspace(1)
    if model is None:
        raise SystemExit("--device cuda needs --model DIR, a Hugging Face checkpoint.")
    path = (BENCH_DIR / "word-problems").absolute()
    if not (path / "data" / "heldout.jsonl").exists():
        write_task(path / "data", 1)
    return RealWorkspace(path, model.absolute())


@contextlib.contextmanager
def tiers_up(workspace: Workspace | RealWorkspace, *more: str) -> Iterator[Running]:
    """`tetrarch up` on free ports for as long as the block lasts: runs within it share engines when they want equal
    ones. `more`: further flags of it. Raises SystemExit when it does not come up in time."""
    workspace.path.mkdir(parents=True, exist_ok=True)
    state = StateDir(workspace.state)
    ports = [part for name, port in asdict(Ports.free()).items() for part in (f"--{name}-port", str(port))]
    command = [sys.executable, "-m", "services.console", "up", "--state-dir", str(workspace.state), *ports, *more]
    log = workspace.path / "up.log"
    with log.open("a") as out:
        tiers = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + _UP_SECONDS
        while not (running := state.running()):
            if time.monotonic() > deadline or tiers.poll() is not None:
                raise SystemExit(f"tetrarch up did not come up within {_UP_SECONDS:.0f} s; see {log}.")
            time.sleep(0.2)
        yield running
    finally:
        tiers.terminate()
        try:
            tiers.wait(_DOWN_SECONDS)
        except subprocess.TimeoutExpired:
            tiers.kill()  # its children die with it
            tiers.wait()


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


def train(
    workspace: Workspace | RealWorkspace, arguments: list[str], run_id: str, limit: float = _COMMAND_SECONDS
) -> Trained:
    """A `tetrarch train` command to its end. Raises SystemExit with the log's place when it fails."""
    log = workspace.path / f"{run_id}.log"
    status, seconds = tetrarch(arguments, log, limit)
    if status:
        raise SystemExit(f"tetrarch train of {run_id} failed with exit status {status}; see {log}.")
    run_dir = workspace.path / run_id
    return Trained(run_dir, seconds, history_of(run_dir))


def fresh_id(workspace: Workspace | RealWorkspace, name: str) -> str:
    """A run id that the workspace has not seen."""
    number = 1
    while (workspace.path / f"{name}-{number}").exists():
        number += 1
    return f"{name}-{number}"
