"""`python -m benchmarks.first_light --device cuda --model DIR`: GRPO of SmolLM2-135M on word problems.

Nothing is replaced: every tier runs as `tetrarch up` starts it, the run is deploy/config/smollm2_grpo.yaml. Told for
every step: reward, trainer against engine in log-probs, ppo_kl, seconds; for every update: verified tensors;
held-out score before, between and after; every prompt trained once; and the export, compared with what engines hold.

`--device cpu` is a rehearsal: two tiny steps through the same code, without bars on learning. Without --model it
takes the demo's task with its model of random weights, with --model word problems. `--from RUN_DIR` tells of a run that
was made before what its own metrics say; its engines and its buffer are gone, so what only they can tell is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.checkpoints import random_model
from benchmarks.held_weights import Held, compare
from benchmarks.kill_and_resume import trained_rows
from benchmarks.report import Figure, finish, parser
from benchmarks.workspace import BENCH_DIR, history_of, tiers_up
from examples.first_run import task as sums
from examples.first_run.__main__ import CONFIGS, ROOT, Workspace
from examples.word_problems import task as word_problems
from services.common.devices import visible_gpus
from services.console.adapters.chart import draw_rewards
from services.console.core.history import History
from services.console.core.report import time_split

RUN_ID = "first-light"
GREEDY_SECONDS = 240.0
WARM_UP = 3
COLUMNS = (
    "reward_mean", "log_prob_abs_diff_mean", "log_prob_abs_diff_p99", "log_prob_abs_diff_max", "ppo_kl", "ppo_kl_first",
    "pg_clipfrac", "entropy", "grad_norm", "response_length_mean", "truncated_fraction", "zero_advantage_fraction",
    "staleness_max", "tokens_per_second", "total_seconds", "wait_groups_seconds", "train_seconds",
    "update_weights_seconds", "update_verified_tensor_count",
)  # fmt: skip
"""Metrics of a step that go into the CSV."""
REHEARSAL = [
    "--no-bf16", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--max-tokens-per-gpu", "2048",
    "--rollout-max-response-len", "16", "--n-samples-per-eval-prompt", "1", "--eval-interval", "1",
    "--sglang-attention-backend", "torch_native", "--sglang-mem-fraction-static", "0.1",
]  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What is run. `model` is a checkpoint, `rehearsal` says that two steps on a CPU must do."""

    workspace: Workspace
    model: Path
    device: str
    steps: int
    seconds: float
    more: Sequence[str] = ()

    @property
    def rehearsal(self) -> bool:
        """A run too small to learn anything."""
        return self.device == "cpu"

    @property
    def words(self) -> bool:
        """Word problems; else the demo's sums, which the demo's model can read."""
        return self.model.parent != BENCH_DIR

    @property
    def run_dir(self) -> Path:
        """Where the run writes."""
        return self.workspace.path / RUN_ID

    def arguments(self) -> list[str]:
        """Of `tetrarch`."""
        data, seed = self.workspace.path / "data", str(self.workspace.seed)
        heldout = f"{data / 'heldout.jsonl'}{'@[0:8]' if self.rehearsal else ''}"
        return [
            *("train", str(CONFIGS / "smollm2_grpo.yaml"), "--state-dir", str(self.workspace.state), "--plain"),
            *("--run-id", RUN_ID, "--run-dir", str(self.workspace.path), "--hf-checkpoint", str(self.model)),
            *("--prompt-data", str(data / "train.jsonl"), "--eval-prompt-data", "heldout", heldout),
            *("--seed", seed, "--rollout-seed", seed, "--num-rollout", str(self.steps), "--device", self.device),
            *(REHEARSAL if self.rehearsal else ()),
            *(() if self.words else ("--rollout-max-context-len", "64")),
            *self.more,
        ]


def prepare(chosen: argparse.Namespace) -> Task:
    """A directory that did not exist, with the task's files."""
    number = 1 + max((int(path.name.rpartition("-")[2]) for path in BENCH_DIR.glob(f"{RUN_ID}-*")), default=0)
    path = (BENCH_DIR / f"{RUN_ID}-{number}").absolute()
    task = word_problems if chosen.model else sums
    task.write_task(path / "data", chosen.seed)
    model = (chosen.model or random_model(BENCH_DIR / "random-model")).absolute()
    steps = chosen.steps or (2 if chosen.device == "cpu" else 60)
    return Task(Workspace(path, chosen.seed), model, chosen.device, steps, chosen.limit, chosen.more)


def train(task: Task) -> float:
    """The run to its end, with its output on the terminal; seconds. Raises SystemExit when it fails."""
    started = time.monotonic()
    command = [sys.executable, "-m", "services.console", *task.arguments()]
    try:
        status = subprocess.run(command, cwd=ROOT, check=False, timeout=task.seconds).returncode
    except subprocess.TimeoutExpired:
        raise SystemExit(f"The run was not done after {task.seconds:.0f} s; see {task.run_dir}.") from None
    if status:
        raise SystemExit(f"The run failed with exit status {status}; see {task.run_dir} and the logs beside it.")
    return time.monotonic() - started


def greedy_accuracy(task: Task, model: Path) -> float:
    """Of a checkpoint, by transformers alone, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "examples.word_problems.evaluate", str(model)]
    command += [str(task.workspace.path / "data" / "heldout.jsonl"), "--device", task.device]
    command += ["--rows", "4"] if task.rehearsal else []
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=GREEDY_SECONDS)
    return json.loads(done.stdout.splitlines()[-1])["greedy_accuracy"]


def second_opinion(task: Task) -> list[Figure]:
    """Greedy accuracy before and after; none, with a line that says so, when it takes too long."""
    models = (("before", task.model), ("after", task.run_dir / "hf"))
    try:
        return [
            Figure(f"greedy held-out accuracy by transformers, {name}", greedy_accuracy(task, model))
            for name, model in models
        ]
    except subprocess.TimeoutExpired:
        print(f"transformers did not score the held-out problems within {GREEDY_SECONDS:.0f} s; left out")
        return []


def write_curve(task: Task, history: History, json_file: Path | None) -> list[Path]:
    """One row a step, and the picture; beside the JSON file, or in the run's directory."""
    base = json_file if json_file else task.run_dir / "first_light.json"
    base.parent.mkdir(parents=True, exist_ok=True)
    scores = dict(history.evaluation_series().get("heldout", []))
    table, picture = base.with_suffix(".csv"), base.with_suffix(".png")
    with table.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["steps_done", "heldout", *COLUMNS])
        writer.writerow([0, scores.get(0, ""), *("" for _ in COLUMNS)])
        for step, metrics in sorted(history.steps.items()):
            writer.writerow([step + 1, scores.get(step + 1, ""), *(metrics.get(name, "") for name in COLUMNS)])
    draw_rewards(history, picture, f"{task.model.name}: mean reward")
    return [table, picture]


def learning(task: Task, history: History) -> list[Figure]:
    """Scores and rewards."""
    curve = history.evaluation_series()["heldout"]
    rewards = [value for _, value in history.series("reward_mean")]
    bar = "" if task.rehearsal else ">= 0.15"
    return [
        Figure("steps", len(history.steps), "", "== 2" if task.rehearsal else ">= 30"),
        *(Figure(f"held-out score after {done} steps (sampled)", value) for done, value in curve),
        Figure("held-out score, after - before", curve[-1][1] - curve[0][1], "", bar),
        Figure("mean reward, first 3 steps", statistics.fmean(rewards[:3])),
        Figure("mean reward, last 3 steps", statistics.fmean(rewards[-3:])),
    ]


def agreement(task: Task, history: History) -> list[Figure]:
    """Trainer against engine, and what the engines hold."""

    def values(name: str) -> list[float]:
        return [value for _, value in history.series(name)]

    mean, p99 = values("log_prob_abs_diff_mean"), values("log_prob_abs_diff_p99")
    first_kl = history.steps[0]["ppo_kl"]
    updates = history.updates.values()
    verified = [update["update_verified_tensor_count"] for update in updates]
    return [
        Figure("|trainer - engine| log-prob: mean, first step", mean[0], "nat"),
        Figure("|trainer - engine| log-prob: mean, median of steps", statistics.median(mean), "nat"),
        Figure("|trainer - engine| log-prob: mean, worst step", max(mean), "nat"),
        Figure("|trainer - engine| log-prob: p99, first step", p99[0], "nat"),
        Figure("|trainer - engine| log-prob: p99, median of steps", statistics.median(p99), "nat"),
        Figure("|trainer - engine| log-prob: p99, worst step", max(p99), "nat"),
        Figure("trainer - engine log-prob: signed mean, first step", values("log_prob_diff_mean")[0], "nat"),
        Figure("steps that tell both", min(len(mean), len(p99)), "", f"== {task.steps}"),
        Figure("|ppo_kl| of the first step", abs(first_kl), "", "<= 0.001"),
        Figure("|ppo_kl|, worst step", max(map(abs, values("ppo_kl")))),
        Figure("clip fraction, worst step", max(values("pg_clipfrac"))),
        Figure("staleness, worst step", max(values("staleness_max")), "versions", "== 0"),
        Figure("weight updates", len(updates), "", f">= {task.steps}"),
        Figure("tensors verified by checksum, fewest in an update", min(verified), "", ">= 1"),
        Figure("engines left out of an update", sum(u["update_failed_engine_count"] for u in updates), "", "== 0"),
    ]


def time_figures(history: History, seconds: float | None) -> list[Figure]:
    """Where the time of a step goes, the first ones left out where there are enough. `seconds`: of the whole run."""
    steps = [metrics for _, metrics in sorted(history.steps.items())]
    steps = steps[WARM_UP:] if len(steps) > 2 * WARM_UP else steps
    total = statistics.median(step["total_seconds"] for step in steps)
    rate = statistics.fmean(step["tokens_per_second"] for step in steps)
    split = [Figure(f"  share of {part.name}", part.share) for part in time_split(steps)]
    whole = [] if seconds is None else [Figure("whole run, start of the engines included", seconds, "s")]
    return [
        *whole,
        Figure("step, median", total, "s"),
        *split,
        Figure("tokens trained a second, mean", rate, "1/s"),
    ]


def accounting(task: Task) -> list[Figure]:
    """Every prompt once, as the buffer has it."""
    rows = asyncio.run(trained_rows(task.workspace, RUN_ID))
    batch = yaml.safe_load((task.run_dir / "run.yaml").read_text())["rollout"]["rollout_batch_size"]
    return [
        Figure("prompts trained", len(rows), "", f"== {task.steps * batch}"),
        Figure("prompts trained more than once", sum(count > 1 for count in rows.values()), "", "== 0"),
    ]


def export_figures(engines: list[Held], version: int) -> list[Figure]:
    """The export against the engines, right after the run."""
    behind = sum(held.version != version for held in engines)
    return [
        Figure("engines asked for their weights after the run", len(engines), "", ">= 1"),
        Figure("  that hold another version than the last", behind, "", "== 0"),
        Figure("  tensors equal to the export's, fewest", min((h.equal for h in engines), default=0), "", ">= 1"),
        Figure("  tensors that differ", sum(len(held.different) for held in engines), "", "== 0"),
    ]


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    options = parser(__doc__)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--model", type=Path, help="SmolLM2 as examples.word_problems.make_checkpoint writes it")
    options.add_argument("--steps", type=int, help="60 on cuda, 2 on a CPU")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--limit", type=float, default=1500.0, help="longest time of the run in seconds")
    options.add_argument("--no-greedy", action="store_true", help="leave transformers' second opinion out")
    options.add_argument("--from", dest="source", type=Path, metavar="RUN_DIR", help="tell of this run; trains nothing")
    options.add_argument("more", nargs="*", help="after --: further flags of `tetrarch train`, as -- --lr 2e-5")
    chosen = options.parse_args()
    if chosen.device == "cuda" and not chosen.source:
        if len(visible_gpus()) < 2:
            options.error(
                f"--device cuda needs two GPUs, one to train and one to generate; visible: {len(visible_gpus())}"
            )
        if not chosen.model:
            options.error("--device cuda needs --model DIR; examples/word_problems/README.md says how to make it")
    return chosen


def made_before(chosen: argparse.Namespace) -> tuple[Task, History]:
    """A run of before, as far as its own files tell."""
    history = history_of(chosen.source)
    model = Path(yaml.safe_load((chosen.source / "run.yaml").read_text())["rollout"]["hf_checkpoint"])
    task = Task(Workspace(chosen.source.parent, chosen.seed), model, chosen.device, len(history.steps), 0.0)
    return task, history


def main() -> int:
    """Command line entry."""
    chosen = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`, which ends the tiers
    if chosen.source:
        task, history = made_before(chosen)
        figures = learning(task, history) + agreement(task, history) + time_figures(history, None)
    else:
        task = prepare(chosen)
        gpus = visible_gpus()
        flags = ("--trainer-gpus", gpus[0], "--rollout-gpus", gpus[1]) if task.device == "cuda" else ()
        with tiers_up(task.workspace, *flags) as running:
            seconds = train(task)
            history = history_of(task.run_dir)
            counted = accounting(task)
            engines = asyncio.run(compare(running.addresses["buffer"], task.run_dir / "hf", task.device))
        version = int(history.updates[max(history.updates)]["policy_version"])
        figures = learning(task, history) + agreement(task, history) + export_figures(engines, version)
        figures += counted + time_figures(history, seconds)
        if task.words and not chosen.no_greedy:
            figures += second_opinion(task)
    files = write_curve(task, history, chosen.json)
    print("rehearsal: nothing is learnt, and no bar is on learning" if task.rehearsal else "", *files, sep="\n")
    series = {name: [value for _, value in history.series(name)] for name in COLUMNS}
    context = {
        "device": task.device,
        "model": task.model.name,
        "seed": chosen.seed,
        "rehearsal": task.rehearsal,
        "more": chosen.more,
        "read_from": chosen.source.name if chosen.source else "",
    }
    curve = history.evaluation_series()["heldout"]
    return finish("first_light", figures, chosen.json, heldout=curve, series=series, **context)


if __name__ == "__main__":
    raise SystemExit(main())
