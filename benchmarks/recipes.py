"""`python -m benchmarks.recipes [--recipes grpo ...] [--seeds 1 2 3]`: does every recipe learn? Real SGLang on the CPU.

Per seed: the demo's task and a model of random weights, the SFT recipe, then the others from its model, one after the
other on the same tiers. Each result is kept as it comes, so the command can be ended and given again: it goes on with
what is missing, and a recipe whose file has changed is run anew. One that fails is reported and stops no other.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.curves import Curve, draw, write_table
from benchmarks.report import Figure, finish, parser
from benchmarks.workspace import BENCH_DIR, fresh_id, tiers_up, train
from examples.first_run.__main__ import CONFIGS, ROOT, Workspace, make_workspace
from services.console.core.history import History

RECIPES = (
    "sft", "grpo", "dr_grpo", "rloo", "cispo", "gspo", "dapo", "reinforce_plus_plus", "ppo", "opd",
)  # fmt: skip
"""In the order of the runs: all but the first begin with the first's model, the last has grpo's for a teacher."""
NEEDS = {"sft": (), "opd": ("sft", "grpo")}
"""Recipes whose models a recipe begins with, where it is not SFT alone."""
DIRECTORY = BENCH_DIR / "recipes"
AFTER = {"sft": ">= 0.3"} | dict.fromkeys(RECIPES[1:], ">= 0.85")
"""Bars of the held-out reward; what SFT imitates is right in about 0.4."""
EXPLAINED = ">= 0.5"
LAST = 5
"""Steps at the end of a run over which a figure is a mean."""
RUN_SECONDS = 420.0
SERIES = ("reward_mean", "loss", "explained_variance", "entropy", "pg_clipfrac", "ppo_kl", "total_seconds")


@dataclass(frozen=True)
class Result:
    """What a recipe came to with a seed. heldout: (steps done, mean reward, greedy); series: by step; file: digest of
    the recipe; failed: why there is nothing else."""

    recipe: str
    seed: int
    file: str
    run_id: str = ""
    seconds: float = 0.0
    heldout: list[tuple[int, float]] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)
    failed: str = ""

    def late(self, name: str) -> float:
        """Mean of a metric over the last steps."""
        return statistics.fmean(self.series[name][-LAST:])


@dataclass(frozen=True)
class Book:
    """Results in a file of lines; the last of a recipe and seed counts."""

    path: Path

    def write(self, result: Result) -> None:
        """Adds one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as out:
            out.write(json.dumps(asdict(result)) + "\n")

    def read(self) -> dict[tuple[str, int], Result]:
        """All, of the recipes as their files are now."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        results = [Result(**json.loads(line)) for line in lines]
        return {(one.recipe, one.seed): one for one in results if one.file == digest(one.recipe)}


def recipe_file(recipe: str) -> Path:
    """Run file of a recipe."""
    return CONFIGS / "recipes" / f"{recipe}.yaml"


def digest(recipe: str) -> str:
    """Of what the recipe's file says."""
    return hashlib.sha256(recipe_file(recipe).read_bytes()).hexdigest()[:12]


def flags_of(recipe: str, workspace: Workspace, made: Mapping[str, str]) -> list[str]:
    """What a recipe's run has of its own: places and seed. `made`: run ids of the recipes before it."""
    data, path = workspace.path / "data", workspace.path
    model, prompts = (path / "model", "sft") if recipe == "sft" else (path / made["sft"] / "hf", "train")
    flags = ["--hf-checkpoint", str(model), "--prompt-data", str(data / f"{prompts}.jsonl")]
    if recipe != "sft":
        flags += ["--eval-prompt-data", "heldout", str(data / "heldout.jsonl")]
    if recipe == "opd":
        flags += ["--opd-teacher-load", str(path / made["grpo"] / "hf")]
    return [*flags, "--seed", str(workspace.seed), "--rollout-seed", str(workspace.seed)]


def greedy(model: Path, heldout: Path) -> float:
    """Accuracy of a checkpoint by transformers: SFT has no engine that could be asked."""
    command = [sys.executable, "-W", "ignore", "-m", "examples.word_problems.evaluate", str(model), str(heldout)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=RUN_SECONDS)
    return json.loads(done.stdout.splitlines()[-1])["greedy_accuracy"]


def run(recipe: str, workspace: Workspace, made: Mapping[str, str]) -> Result:
    """A recipe's run to its end. Raises SystemExit when it fails."""
    run_id = fresh_id(workspace, recipe)
    place = ("--state-dir", str(workspace.state), "--run-id", run_id, "--run-dir", str(workspace.path))
    arguments = ["train", str(recipe_file(recipe)), *place, *flags_of(recipe, workspace, made)]
    done = train(workspace, arguments, run_id, RUN_SECONDS)
    history = done.history
    if recipe == "sft":
        heldout, last = workspace.path / "data" / "heldout.jsonl", len(history.steps)
        models = ((0, workspace.path / "model"), (last, done.run_dir / "hf"))
        curve = [(steps, greedy(model, heldout)) for steps, model in models]
    else:
        curve = history.evaluation_series()["heldout"]
    return Result(recipe, workspace.seed, digest(recipe), run_id, done.seconds, curve, _series(history))


def _series(history: History) -> dict[str, list[float]]:
    found = {name: [value for _, value in history.series(name)] for name in SERIES}
    return {name: values for name, values in found.items() if values}


def run_seed(seed: int, recipes: Sequence[str], book: Book) -> None:
    """What is missing of a seed's recipes."""
    done = {recipe: one for (recipe, of), one in book.read().items() if of == seed and not one.failed}
    needed = {"sft", *recipes} | ({"grpo"} if "opd" in recipes else set())
    missing = [name for name in RECIPES if name in needed and name not in done]
    if not missing:
        return
    workspace = Workspace((DIRECTORY / f"seed-{seed}").absolute(), seed)
    if not (workspace.path / "model" / "config.json").exists():
        make_workspace(workspace)
    with tiers_up(workspace):
        for recipe in missing:
            result = _tried(recipe, workspace, {name: one.run_id for name, one in done.items()})
            book.write(result)
            print(_line(result), flush=True)
            if not result.failed:
                done[recipe] = result


def _tried(recipe: str, workspace: Workspace, made: Mapping[str, str]) -> Result:
    """The result of a run, also when it fails."""
    absent = [name for name in NEEDS.get(recipe, ("sft",)) if name not in made]
    if absent:
        return Result(recipe, workspace.seed, digest(recipe), failed=f"it needs the model of {absent[0]}, which failed")
    try:
        return run(recipe, workspace, made)
    except SystemExit as error:
        return Result(recipe, workspace.seed, digest(recipe), failed=str(error))


def _line(result: Result) -> str:
    name = f"seed {result.seed} {result.recipe:20}"
    if result.failed:
        return f"{name} failed: {result.failed}"
    return f"{name} {result.heldout[0][1]:.3f} -> {result.heldout[-1][1]:.3f} in {result.seconds:.0f} s"


def figures_of(result: Result) -> list[Figure]:
    """What one run shows."""
    name = f"{result.recipe}, seed {result.seed}"
    if result.failed:
        return [Figure(f"{name}: failed, {result.failed}", 1, "", "== 0")]
    figures = [
        Figure(f"{name}: held-out reward before", result.heldout[0][1]),
        Figure(f"{name}: held-out reward after", result.heldout[-1][1], "", AFTER[result.recipe]),
    ]
    if result.recipe == "ppo":
        explained = f"{name}: critic's explained variance, mean of the last {LAST} steps"
        figures.append(Figure(explained, result.late("explained_variance"), "", EXPLAINED))
    return figures


def curves_of(results: Sequence[Result]) -> list[Curve]:
    """Curves of finished runs; of SFT its loss, for it has no rewards."""
    return [
        Curve(one.recipe, f"seed {one.seed}", one.series["loss"], [])
        if one.recipe == "sft"
        else Curve(one.recipe, f"seed {one.seed}", one.series["reward_mean"], one.heldout)
        for one in results
        if not one.failed
    ]


def main() -> int:
    """Command line entry."""
    arguments = parser(__doc__)
    arguments.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="RECIPE")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    chosen = arguments.parse_args()
    book = Book(DIRECTORY / "results.jsonl")
    for seed in chosen.seeds:
        run_seed(seed, chosen.recipes, book)
    found = book.read()
    results = [found[key] for recipe in chosen.recipes for seed in chosen.seeds if (key := (recipe, seed)) in found]
    if chosen.json:
        draw(curves_of(results), chosen.json.with_suffix(".png"), {"sft": "loss"})
        rows = [(f"{one.recipe} seed {one.seed}", one.heldout, one.series) for one in results if not one.failed]
        write_table(rows, chosen.json.with_suffix(".csv"))
    figures = [figure for result in results for figure in figures_of(result)]
    return finish("recipes", figures, chosen.json, runs=[asdict(result) for result in results])


if __name__ == "__main__":
    raise SystemExit(main())
