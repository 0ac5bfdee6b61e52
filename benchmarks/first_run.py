"""`python -m benchmarks.first_run [--seeds 1 2 3]`: the demo as a user runs it: time, accuracy before and after."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.report import Figure, finish, parser
from benchmarks.workspace import BENCH_DIR, history_of
from examples.first_run.__main__ import ROOT


def main() -> int:
    """Command line entry."""
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    chosen = arguments.parse_args()
    figures: list[Figure] = []
    curves = {}
    for seed in chosen.seeds:
        known = set(BENCH_DIR.glob("first-run-*"))
        started = time.monotonic()
        command = [sys.executable, "-m", "examples.first_run", "--seed", str(seed), "--dir", str(BENCH_DIR)]
        subprocess.run(command, cwd=ROOT, check=True)
        seconds = time.monotonic() - started
        (made,) = set(BENCH_DIR.glob("first-run-*")) - known
        (made / f"seed-{seed}").touch()
        history = history_of(made / "grpo")
        curve = history.evaluation_series()["heldout"]
        rewards = [value for _, value in history.series("reward_mean")]
        curves[seed] = {"heldout": curve, "reward_mean": rewards}
        figures += [
            Figure(f"seed {seed}: demo", seconds, "s", "<= 600"),
            Figure(f"seed {seed}: held-out accuracy before (greedy)", curve[0][1], "", "<= 0.6"),
            Figure(f"seed {seed}: held-out accuracy after (greedy)", curve[-1][1], "", ">= 0.9"),
            Figure(f"seed {seed}: mean reward, first 3 steps (sampled)", sum(rewards[:3]) / 3),
            Figure(f"seed {seed}: mean reward, last 3 steps (sampled)", sum(rewards[-3:]) / 3),
        ]
    return finish("first_run", figures, chosen.json, curves=curves)


if __name__ == "__main__":
    raise SystemExit(main())
