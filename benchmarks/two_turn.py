"""`python -m benchmarks.two_turn`: GRPO through a two-turn generate function with a tool, on SGLang: does it train?"""

from __future__ import annotations

import statistics

from benchmarks.report import Figure, finish, parser
from benchmarks.workspace import fresh_id, sft_workspace, train

STEPS = 30
PATTERN = '{"pattern": "[0-9]{3}$"}'


def main() -> int:
    """Command line entry."""
    chosen = parser(__doc__).parse_args()
    workspace = sft_workspace(1)
    run_id = fresh_id(workspace, "two-turn")
    flags = ["--custom-generate-function-path", "examples.checked_draft.generate.generate", "--max-turns", "2"]
    flags += ["--rm-options", PATTERN, "--num-rollout", str(STEPS), "--eval-interval", str(STEPS)]
    run = train(workspace, workspace.grpo(run_id, *flags, "--no-eval-before-train"), run_id)
    rewards = [value for _, value in run.history.series("reward_mean")]
    steps = run.history.steps.values()
    responses = sum(step["response_length_mean"] * step["sample_count"] for step in steps)
    trained = sum(step["trained_tokens"] for step in steps)
    figures = [
        Figure("mean reward, first 3 steps", statistics.fmean(rewards[:3])),
        Figure("mean reward, last 3 steps", statistics.fmean(rewards[-3:])),
        Figure("gain", statistics.fmean(rewards[-3:]) - statistics.fmean(rewards[:3]), "", ">= 0.2"),
        Figure("share of response tokens that are trained (the tool's are not)", trained / responses, "", "<= 0.98"),
        Figure("|trainer - engine| log-prob, mean, worst step", max(s["log_prob_abs_diff_mean"] for s in steps), "nat"),
        Figure(f"{STEPS} steps", sum(step["total_seconds"] for step in steps), "s"),
    ]
    return finish("two_turn", figures, chosen.json)


if __name__ == "__main__":
    raise SystemExit(main())
