"""`python -m benchmarks.staleness`: max_staleness 0, 1 and 4: does each learn, is the bound kept, how long?"""

from __future__ import annotations

from benchmarks.report import Figure, finish, parser
from benchmarks.workspace import fresh_id, sft_workspace, train


def main() -> int:
    """Command line entry."""
    arguments = parser(__doc__)
    arguments.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 4])
    arguments.add_argument("--steps", type=int, default=50)
    chosen = arguments.parse_args()
    workspace = sft_workspace(1)
    figures: list[Figure] = []
    for bound in chosen.bounds:
        run_id = fresh_id(workspace, f"staleness-{bound}")
        flags = ["--num-rollout", str(chosen.steps), "--eval-interval", str(chosen.steps)]
        flags += ["--max-staleness", str(bound), "--use-rollout-logprobs", "--save-interval", str(chosen.steps)]
        run = train(workspace, workspace.grpo(run_id, *flags), run_id)
        steps = [seconds for _, seconds in run.history.series("total_seconds")]
        stale = [value for _, value in run.history.series("staleness_max")]
        mean = [value for _, value in run.history.series("staleness_mean")]
        figures += [
            Figure(f"max_staleness {bound}: accuracy before", run.accuracies[0], "", "<= 0.6"),
            Figure(f"max_staleness {bound}: accuracy after", run.accuracies[-1], "", ">= 0.85"),
            Figure(f"max_staleness {bound}: staleness, largest", max(stale), "versions", f"<= {bound}"),
            Figure(f"max_staleness {bound}: staleness, mean", sum(mean) / len(mean), "versions"),
            Figure(f"max_staleness {bound}: {len(steps)} steps", sum(steps), "s"),
            Figure(f"max_staleness {bound}: whole command", run.seconds, "s"),
        ]
    return finish("staleness", figures, chosen.json)


if __name__ == "__main__":
    raise SystemExit(main())
