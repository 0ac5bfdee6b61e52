"""Results of runs that a benchmark makes one after the other: kept as they come, so that it can be ended and go on."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.curves import Curve
from services.console.core.history import History

LAST = 5
"""Steps at the end of a run over which a figure is a mean."""


@dataclass(frozen=True)
class Result:
    """What a run came to. stamp: says what was run, so that a result of something else is not taken for it; heldout:
    (steps done, mean reward); series: metrics by step; failed: why there is nothing else."""

    name: str
    seed: int
    stamp: str
    run_id: str = ""
    seconds: float = 0.0
    heldout: Sequence[tuple[int, float]] = ()
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    failed: str = ""

    def late(self, metric: str) -> float:
        """Mean of a metric over the last steps."""
        return statistics.fmean(self.series[metric][-LAST:])

    def curve(self) -> Curve:
        """Rewards by step and held-out, in the panel of its name; losses where there are no rewards."""
        losses = self.series.get("loss", ())
        rewards = self.series.get("reward_mean")
        held_out = self.heldout if rewards is not None else ()
        return Curve(self.name, f"seed {self.seed}", losses if rewards is None else rewards, held_out)


@dataclass(frozen=True)
class Book:
    """Results in a file of lines; the last of a name and seed counts."""

    path: Path

    def write(self, result: Result) -> None:
        """Adds one and tells of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as out:
            out.write(json.dumps(asdict(result)) + "\n")
        what = f"failed: {result.failed}"
        if not result.failed:
            what = f"{result.heldout[0][1]:.3f} -> {result.heldout[-1][1]:.3f} in {result.seconds:.0f} s"
        print(f"seed {result.seed} {result.name:20} {what}", flush=True)

    def read(self, stamps: Mapping[str, str]) -> dict[tuple[str, int], Result]:
        """Results by name and seed, of what has the stamp it has now."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        results = [Result(**json.loads(line)) for line in lines]
        return {(one.name, one.seed): one for one in results if stamps.get(one.name) == one.stamp}


def series_of(history: History, metrics: Sequence[str]) -> dict[str, list[float]]:
    """Those of the metrics that a run has, by step."""
    found = {name: [value for _, value in history.series(name)] for name in metrics}
    return {name: values for name, values in found.items() if values}
