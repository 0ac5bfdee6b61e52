"""`python -m benchmarks.staleness`: max_staleness 0, 1 and 4: does each learn, is the bound kept, how long?

`--device cuda --model DIR` trains the word problems on GPUs, the runs after each other on the same engines.
`--from RUN_DIR ...` reads runs that were made before.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Figure, finish, limit, parser
from benchmarks.workspace import add_device, fresh_id, history_of, tiers_up, train, workspace_for
from services.common.settings import read_yaml
from services.console.core.history import History

LIMIT_SECONDS = 7200
WARM_UP = 3
"""Steps of a run that are left out of its median: engines compile and fill their caches."""
ACCURACY = {"cpu": ("<= 0.6", ">= 0.85"), "cuda": ("", "")}


@dataclass(frozen=True)
class Run:
    """A run that was made with a bound on staleness."""

    bound: int
    name: str
    history: History


def made(device: str, model: Path | None, bounds: list[int], steps: int) -> list[Run]:
    """Runs one after the other under one `tetrarch up`."""
    workspace = workspace_for(device, model)
    runs = []
    with tiers_up(workspace):
        for bound in bounds:
            run_id = fresh_id(workspace, f"staleness-{bound}")
            flags = ["--num-rollout", str(steps), "--eval-interval", str(steps), "--save-interval", str(steps)]
            flags += ["--max-staleness", str(bound), "--use-rollout-logprobs"]
            run = train(workspace, workspace.grpo(run_id, *flags), run_id)
            runs.append(Run(bound, run_id, run.history))
    return runs


def read(directories: list[Path]) -> list[Run]:
    """Runs of before."""
    return [
        Run(read_yaml(path / "run.yaml").get("trainer", {}).get("max_staleness", 0), path.name, history_of(path))
        for path in directories
    ]


def step_seconds(history: History) -> float:
    """Median seconds of a step, evaluations and checkpoints left out."""
    rows = [step for number, step in sorted(history.steps.items()) if number >= WARM_UP]
    return statistics.median(
        step["total_seconds"] - step.get("eval_seconds", 0.0) - step.get("save_seconds", 0.0) for step in rows
    )


def figures_of(run: Run, device: str) -> list[Figure]:
    """What one run shows."""
    history, name = run.history, f"max_staleness {run.bound}"
    curve = [value for _, value in history.evaluation_series().get("heldout", [])]
    if len(curve) < 2:
        raise SystemExit(f"{run.name} was evaluated {len(curve)} times; once before and once after are needed.")
    largest = [value for _, value in history.series("staleness_max")]
    mean = [value for _, value in history.series("staleness_mean")]
    rewards = [value for _, value in history.series("reward_mean")]
    seconds = [value for _, value in history.series("total_seconds")]
    before, after = ACCURACY[device]
    return [
        Figure(f"{name}: accuracy before", curve[0], "", before),
        Figure(f"{name}: accuracy after", curve[-1], "", after or f">= {curve[0]:.4f}"),
        Figure(f"{name}: mean reward, first 3 steps", statistics.fmean(rewards[:3])),
        Figure(f"{name}: mean reward, last 3 steps", statistics.fmean(rewards[-3:])),
        Figure(f"{name}: staleness, largest", max(largest), "versions", f"<= {run.bound}"),
        Figure(f"{name}: staleness, mean", statistics.fmean(mean), "versions"),
        Figure(f"{name}: step, median", step_seconds(history), "s"),
        Figure(f"{name}: wait for groups, mean", statistics.fmean(_waits(history)), "s"),
        Figure(f"{name}: {len(seconds)} steps", sum(seconds), "s"),
    ]


def _waits(history: History) -> list[float]:
    return [value for _, value in history.series("wait_groups_seconds")][WARM_UP:] or [0.0]


def main() -> int:
    """Command line entry."""
    arguments = parser(__doc__ or "")
    add_device(arguments)
    arguments.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 4])
    arguments.add_argument("--steps", type=int, default=50)
    arguments.add_argument("--from", dest="source", type=Path, nargs="+", metavar="RUN_DIR")
    chosen = arguments.parse_args()
    limit(LIMIT_SECONDS)
    runs = read(chosen.source) if chosen.source else made(chosen.device, chosen.model, chosen.bounds, chosen.steps)
    figures = [figure for run in runs for figure in figures_of(run, chosen.device)]
    synchronous = next((run for run in runs if run.bound == 0), None)
    for run in runs:
        if synchronous and run.bound:
            gain = step_seconds(synchronous.history) / step_seconds(run.history)
            # Two CPU cores generate and train in turn, so nothing can overlap there.
            bar = ">= 1" if chosen.device == "cuda" else ""
            figures.append(Figure(f"max_staleness {run.bound}: steps in the time of a synchronous one", gain, "", bar))
    return finish("staleness", figures, chosen.json, device=chosen.device, runs=[run.name for run in runs])


if __name__ == "__main__":
    raise SystemExit(main())
