"""`python -m benchmarks.mismatch [--seeds 1 2 3]`: what a mismatched engine costs, without and with correction.

The engine samples at another temperature than the trainer is told, and the advantages have no baseline, so that it
matters (`mismatch_engine`). The same run four times on the same tiers: with an engine as it should be, mismatched
without correction, with truncated importance sampling (TIS), and with rejection of whole responses besides (MIS).
Results are kept as they come, as by `benchmarks.recipes`, which also makes the model that the runs begin with.
"""

from __future__ import annotations

from dataclasses import asdict

from benchmarks import mismatch_engine, recipes
from benchmarks.curves import draw, write_table
from benchmarks.report import Figure, finish, parser
from benchmarks.run_book import Book, Result, series_of
from benchmarks.workspace import fresh_id, tiers_up, train
from examples.first_run.__main__ import Workspace

STEPS = 30
_PLACE = mismatch_engine.__name__
_ENGINE = ["--custom-generate-function-path", f"{_PLACE}.{mismatch_engine.generate.__name__}"]
_TIS = [*_ENGINE, "--use-tis", "--tis-clip", "2.0"]
RUNS = {
    "matched": [],
    "uncorrected": _ENGINE,
    "tis": _TIS,
    "mis": [*_TIS, "--use-rs", "--rs-level", "geometric", "--rs-clip", "1.5"],
}
"""Flags by name of the run."""
_SAME = [
    *("--advantage-estimator", "custom"),
    *("--custom-advantage-function-path", f"{_PLACE}.{mismatch_engine.no_baseline.__name__}"),
    *("--num-rollout", str(STEPS), "--eval-interval", "5", "--save-interval", str(STEPS), "--lr", "5e-4"),
]
SERIES = ("reward_mean", "entropy", "log_prob_abs_diff_mean", "grad_norm", "ppo_kl", "pg_clipfrac", "total_seconds")


def stamps() -> dict[str, str]:
    """What is run, by name."""
    return {name: " ".join([str(mismatch_engine.TEMPERATURE), *_SAME, *flags]) for name, flags in RUNS.items()}


def run(name: str, workspace: Workspace, model: str) -> Result:
    """One run to its end, from the model of a run. Raises SystemExit when it fails."""
    run_id = fresh_id(workspace, f"mismatch-{name}")
    flags = ["--hf-checkpoint", str(workspace.path / model / "hf"), *_SAME, *RUNS[name]]
    done = train(workspace, workspace.grpo(run_id, *flags), run_id, recipes.RUN_SECONDS)
    curve = done.history.evaluation_series()["heldout"]
    return Result(name, workspace.seed, stamps()[name], run_id, done.seconds, curve, series_of(done.history, SERIES))


def run_seed(seed: int, book: Book) -> None:
    """What is missing of a seed's runs. Raises SystemExit when one fails."""
    missing = [name for name in RUNS if (name, seed) not in book.read(stamps())]
    if not missing:
        return
    of_recipes = Book(recipes.DIRECTORY / "results.jsonl")
    recipes.run_seed(seed, ["sft"], of_recipes)
    model = of_recipes.read(recipes.stamps())["sft", seed].run_id
    workspace = Workspace((recipes.DIRECTORY / f"seed-{seed}").absolute(), seed)
    with tiers_up(workspace):
        for name in missing:
            book.write(run(name, workspace, model))


def figures_of(seed: int, results: dict[str, Result]) -> list[Figure]:
    """Held-out rewards of a seed's runs: the best on the way, what is lost of it at the end, what correction saves."""
    figures = [Figure(f"seed {seed}: held-out reward before", results["matched"].heldout[0][1])]
    for name, result in results.items():
        after, best = result.heldout[-1][1], max(value for _, value in result.heldout)
        kept = name != "uncorrected"
        figures.append(Figure(f"seed {seed}: held-out reward after, {name}", after, "", ">= 0.8" if kept else ""))
        if name != "matched":
            bar = "<= 0.05" if kept else ">= 0.05"
            figures.append(Figure(f"seed {seed}: lost since its best, {name}", best - after, "", bar))
    for name in ("tis", "mis"):
        ahead = results[name].heldout[-1][1] - results["uncorrected"].heldout[-1][1]
        figures.append(Figure(f"seed {seed}: ahead of uncorrected at the end, {name}", ahead, "", ">= 0.1"))
    distance = results["uncorrected"].late("log_prob_abs_diff_mean")
    return [*figures, Figure(f"seed {seed}: |trainer - engine| log-prob, uncorrected, last steps", distance, "nat")]


def main() -> int:
    """Command line entry."""
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    chosen = arguments.parse_args()
    book = Book(recipes.DIRECTORY / "mismatch.jsonl")
    for seed in chosen.seeds:
        run_seed(seed, book)
    found = book.read(stamps())
    figures = [
        figure for seed in chosen.seeds for figure in figures_of(seed, {name: found[name, seed] for name in RUNS})
    ]
    results = [found[name, seed] for name in RUNS for seed in chosen.seeds]
    if chosen.json:
        draw([result.curve() for result in results], chosen.json.with_suffix(".png"))
        rows = [(f"{result.name} seed {result.seed}", result.heldout, result.series) for result in results]
        write_table(rows, chosen.json.with_suffix(".csv"))
    context = {"temperature": mismatch_engine.TEMPERATURE, "runs": [asdict(result) for result in results]}
    return finish("mismatch", figures, chosen.json, **context)


if __name__ == "__main__":
    raise SystemExit(main())
