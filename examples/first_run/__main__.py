"""`python -m examples.first_run [--seed 1] [--engines 1]`: the demo.

Makes a task and a small model, then gives two ordinary `tetrarch train` commands: SFT until the model is mediocre,
GRPO until it is good. Everything it writes goes into a new directory under runs/.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from examples.first_run.task import write_task

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "deploy" / "config"
console = Console()


@dataclass(frozen=True)
class Workspace:
    """The demo's directory: data/, model/, and one directory per run."""

    path: Path
    seed: int

    @property
    def state(self) -> Path:
        """Store and logs of the tiers."""
        return self.path / "state"

    def sft(self) -> list[str]:
        """Arguments of phase 1."""
        return [
            *("train", str(CONFIGS / "first_run_sft.yaml"), "--state-dir", str(self.state)),
            *("--run-id", "sft", "--run-dir", str(self.path), "--hf-checkpoint", str(self.path / "model")),
            *("--prompt-data", str(self.path / "data" / "sft.jsonl")),
            *("--seed", str(self.seed), "--rollout-seed", str(self.seed)),
        ]

    def grpo(self, run_id: str = "grpo", *more: str) -> list[str]:
        """Arguments of phase 2; `more` flags win."""
        data = self.path / "data"
        return [
            *("train", str(CONFIGS / "first_run_grpo.yaml"), "--state-dir", str(self.state)),
            *("--run-id", run_id, "--run-dir", str(self.path), "--hf-checkpoint", str(self.path / "sft" / "hf")),
            *("--prompt-data", str(data / "train.jsonl"), "--eval-prompt-data", "heldout", str(data / "heldout.jsonl")),
            *("--seed", str(self.seed), "--rollout-seed", str(self.seed)),
            *more,
        ]


def new_workspace(parent: Path, seed: int) -> Workspace:
    """A directory that did not exist, with the task and a model of random weights."""
    number = 1 + max((int(path.name.split("-")[-1]) for path in parent.glob("first-run-*")), default=0)
    workspace = Workspace((parent / f"first-run-{number}").absolute(), seed)
    make_workspace(workspace)
    return workspace


def make_workspace(workspace: Workspace) -> None:
    """Writes the task and a model of random weights into a workspace."""
    write_task(workspace.path / "data", workspace.seed)
    make_model = ("-m", "examples.first_run.model", str(workspace.path / "model"), str(workspace.seed))
    command = [sys.executable, "-W", "ignore", *make_model]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)


def tetrarch(arguments: Sequence[str]) -> None:
    """Runs the command line; its exit status ends the demo when it is not 0."""
    status = subprocess.run([sys.executable, "-m", "services.console", *arguments], cwd=ROOT, check=False).returncode
    if status:
        console.print(f"[red]The demo ended: tetrarch {arguments[0]} failed with exit status {status}.[/red]")
        raise SystemExit(status)


def show(arguments: Sequence[str]) -> str:
    """The command as a user would type it."""
    short = [part.replace(f"{ROOT}/", "") for part in arguments]
    return "tetrarch " + " ".join(short)


def curves(run_dir: Path) -> tuple[list[tuple[int, float]], list[float]]:
    """From a run's metrics.jsonl: (steps done, held-out accuracy), and the mean reward of every step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    accuracy = [(row["step"] + 1, row["heldout/mean_reward"]) for row in rows if row["kind"] == "eval"]
    return accuracy, [row["reward_mean"] for row in rows if row["kind"] == "step"]


def near(path: Path) -> str:
    """A path as short as it can be typed here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def summary(workspace: Workspace, seconds: dict[str, float]) -> None:
    """What was learned, how long it took, where things are."""
    run = workspace.path / "grpo"
    curve, rewards = curves(run)
    table = Table(title="The demo", show_header=False, title_justify="left")
    table.add_row("held-out accuracy before GRPO (greedy)", f"[bold]{curve[0][1]:.3f}[/bold]")
    after = f"held-out accuracy after {curve[-1][0]} GRPO steps (greedy)"
    table.add_row(after, f"[bold green]{curve[-1][1]:.3f}[/bold green]")
    first, last = sum(rewards[:3]) / len(rewards[:3]), sum(rewards[-3:]) / len(rewards[-3:])
    table.add_row("training prompts, sampled: first 3 and last 3 steps", f"{first:.3f}, {last:.3f}")
    for name, value in (seconds | {"in all": sum(seconds.values())}).items():
        table.add_row(f"seconds: {name}", f"{value:.0f}")
    console.print(table)
    command = near(Path(sys.executable).with_name("tetrarch"))
    lines = {
        "reward curve": near(run / "reward.png"),
        "metrics, TensorBoard, logs": near(run),
        "what it learned (Hugging Face)": near(run / "hf"),
        "look at answers": f"{command} samples grpo --state-dir {near(workspace.state)}",
        "train your own": f"{command} train run.yaml    (README.md, 'Train your own')",
    }
    for name, text in lines.items():
        console.print(f"{name + ':':32}{text}", soft_wrap=True, highlight=False)


def main() -> None:
    """The demo."""
    parser = argparse.ArgumentParser(prog="python -m examples.first_run", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=int, default=1, help="SGLang engines on this machine")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs", help="where the demo's directory is made")
    chosen = parser.parse_args()
    seconds: dict[str, float] = {}
    started = time.monotonic()
    workspace = new_workspace(chosen.dir, chosen.seed)
    console.print(f"Task and a model of random weights: {workspace.path}")
    seconds["task and model"] = time.monotonic() - started
    phases = {
        "SFT": (workspace.sft(), "SFT: imitate a teacher who forgets 6 of 10 carries"),
        "GRPO": (
            workspace.grpo("grpo", "--rollout-num-gpus", str(chosen.engines)),
            "GRPO: the right sum is the only reward",
        ),
    }
    for name, (arguments, title) in phases.items():
        console.print(Rule(title), f"$ {show(arguments)}", sep="\n", soft_wrap=True)
        started = time.monotonic()
        tetrarch(arguments)
        seconds[name] = time.monotonic() - started
    summary(workspace, seconds)


if __name__ == "__main__":
    main()
