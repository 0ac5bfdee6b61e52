"""`python -m benchmarks.parity`: trainer against engine on the same weights, at every step of a synchronous run.

One update per rollout, so at every step the policy that is trained is the one that generated: log-probs must agree,
ppo_kl must vanish and nothing may be clipped. Every weight update compares checksums of what the engine holds.
"""

from __future__ import annotations

from benchmarks.report import Figure, finish, parser
from benchmarks.workspace import fresh_id, sft_workspace, train

STEPS = 10


def main() -> int:
    """Command line entry."""
    chosen = parser(__doc__).parse_args()
    workspace = sft_workspace(1)
    run_id = fresh_id(workspace, "parity")
    flags = ("--num-rollout", str(STEPS), "--num-steps-per-rollout", "1", "--eval-interval", str(STEPS))
    run = train(workspace, workspace.grpo(run_id, *flags), run_id)

    def worst(name: str) -> float:
        return max(abs(value) for _, value in run.history.series(name))

    updates = run.history.updates.values()
    figures = [
        Figure("|trainer - engine| log-prob, mean, worst step", worst("log_prob_abs_diff_mean"), "nat", "<= 1e-4"),
        Figure("|trainer - engine| log-prob, max, worst step", worst("log_prob_abs_diff_max"), "nat"),
        Figure("ppo_kl, worst step", worst("ppo_kl"), "", "<= 1e-8"),
        Figure("clip fraction, worst step", worst("pg_clipfrac"), "", "== 0"),
        Figure("staleness, worst step", worst("staleness_max"), "versions", "== 0"),
        Figure("weight updates", len(updates), "", f">= {STEPS}"),
        Figure(
            "tensors verified by checksum, fewest in an update",
            min(u["update_verified_tensor_count"] for u in updates),
            "",
            ">= 1",
        ),
        Figure("engines left out of an update", sum(u["update_failed_engine_count"] for u in updates), "", "== 0"),
    ]
    return finish("parity", figures, chosen.json, run_dir=str(run.run_dir.name))


if __name__ == "__main__":
    raise SystemExit(main())
