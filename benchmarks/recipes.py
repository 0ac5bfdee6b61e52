"""`python -m benchmarks.recipes [--recipes grpo ...] [--seeds 1 2 3]`: does every recipe learn? Real SGLang on the CPU.

Per seed: the demo's task and a model of random weights, the SFT recipe, then the others from its model, one after the
other on the same tiers. Each result is kept as it comes, so the command can be ended and given again: it goes on with
what is missing, and a recipe whose file has changed is run anew. One that fails is reported and stops no other.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.curves import draw, write_table
from benchmarks.report import Figure, finish, parser
from benchmarks.run_book import LAST, Book, Result, series_of
from benchmarks.workspace import BENCH_DIR, tetrarch, tiers_up, train
from examples.first_run.__main__ import CONFIGS, ROOT, Workspace, make_workspace

RECIPES = (
    "sft", "grpo", "dr_grpo", "rloo", "cispo", "gspo", "dapo", "reinforce_plus_plus", "ppo", "opd",
)  # fmt: skip
"""In the order of the runs."""
NEEDS = {"sft": (), "opd": ("sft", "grpo")}
"""Recipes whose models a recipe begins with, where it is not SFT alone."""
DIRECTORY = BENCH_DIR / "recipes"
AFTER = dict.fromkeys(RECIPES, ">= 0.85") | {"sft": ">= 0.3", "ppo": ">= 0.75"}
"""Bars of the held-out reward. What SFT imitates is right in about 0.4. PPO is slow for its critic's sake: where nearly
all answers are right, there is little left that values could explain."""
EXPLAINED = ">= 0.5"
RUN_SECONDS = 3000.0
SERIES = ("reward_mean", "loss", "explained_variance", "entropy", "pg_clipfrac", "ppo_kl", "total_seconds")


def recipe_file(recipe: str) -> Path:
    """Run file of a recipe."""
    return CONFIGS / "recipes" / f"{recipe}.yaml"


def stamps() -> dict[str, str]:
    """Of what each recipe's file says."""
    return {recipe: hashlib.sha256(recipe_file(recipe).read_bytes()).hexdigest()[:12] for recipe in RECIPES}


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
    """A recipe's run to its end; one that was broken off goes on. Raises SystemExit when it fails."""
    stamp = stamps()[recipe]
    run_id = f"{recipe}-{stamp}"
    place = ("--state-dir", str(workspace.state), "--run-id", run_id, "--run-dir", str(workspace.path))
    arguments = ["train", str(recipe_file(recipe)), *place, *flags_of(recipe, workspace, made)]
    try:
        done = train(workspace, arguments, run_id, RUN_SECONDS)
    except SystemExit:
        # One that took too long would hold the trainer, also of tiers that are started later.
        tetrarch(["stop", run_id, "--state-dir", str(workspace.state)], workspace.path / f"{run_id}.log", RUN_SECONDS)
        raise
    if recipe == "sft":
        heldout, last = workspace.path / "data" / "heldout.jsonl", len(done.history.steps)
        models = ((0, workspace.path / "model"), (last, done.run_dir / "hf"))
        curve = [(steps, greedy(model, heldout)) for steps, model in models]
    else:
        curve = done.history.evaluation_series()["heldout"]
    series = series_of(done.history, SERIES)
    return Result(recipe, workspace.seed, stamp, run_id, done.seconds, curve, series)


def run_seed(seed: int, recipes: Sequence[str], book: Book) -> None:
    """What is missing of a seed's recipes."""
    found = book.read(stamps()).items()
    done = {recipe: one for (recipe, of), one in found if of == seed and not one.failed}
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
            if not result.failed:
                done[recipe] = result


def _tried(recipe: str, workspace: Workspace, made: Mapping[str, str]) -> Result:
    """The result of a run, also when it fails."""
    absent = [name for name in NEEDS.get(recipe, ("sft",)) if name not in made]
    try:
        why = f"it needs the model of {absent[0]}, which failed" if absent else ""
        return Result(recipe, workspace.seed, stamps()[recipe], failed=why) if why else run(recipe, workspace, made)
    except SystemExit as error:
        return Result(recipe, workspace.seed, stamps()[recipe], failed=str(error))


def figures_of(result: Result) -> list[Figure]:
    """What one run shows."""
    name = f"{result.name}, seed {result.seed}"
    if result.failed:
        return [Figure(f"{name}: failed, {result.failed}", 1, "", "== 0")]
    figures = [
        Figure(f"{name}: held-out reward before", result.heldout[0][1]),
        Figure(f"{name}: held-out reward after", result.heldout[-1][1], "", AFTER[result.name]),
    ]
    if result.name == "ppo":
        explained = f"{name}: critic's explained variance, mean of the last {LAST} steps"
        figures.append(Figure(explained, result.late("explained_variance"), "", EXPLAINED))
    return figures


def main() -> int:
    """Command line entry."""
    arguments = parser(__doc__)
    arguments.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="RECIPE")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments.add_argument("--report", action="store_true", help="tell what there is; train nothing")
    chosen = arguments.parse_args()
    book = Book(DIRECTORY / "results.jsonl")
    for seed in () if chosen.report else chosen.seeds:
        run_seed(seed, chosen.recipes, book)
    found = book.read(stamps())
    results = [found[key] for recipe in chosen.recipes for seed in chosen.seeds if (key := (recipe, seed)) in found]
    if chosen.json:
        finished = [result for result in results if not result.failed]
        draw([result.curve() for result in finished], chosen.json.with_suffix(".png"), {"sft": "loss"})
        rows = [(f"{result.name} seed {result.seed}", result.heldout, result.series) for result in finished]
        write_table(rows, chosen.json.with_suffix(".csv"))
    figures = [figure for result in results for figure in figures_of(result)]
    return finish("recipes", figures, chosen.json, runs=[asdict(result) for result in results])


if __name__ == "__main__":
    raise SystemExit(main())
