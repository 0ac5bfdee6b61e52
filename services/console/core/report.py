"""Where the time of a run went, and what came of it: numbers for tables, without a terminal.

The trainer's clock divides a step into parts that do not overlap; `other` is the rest, so parts add up to the wall.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.console.core.history import History

PARTS: tuple[tuple[str, str], ...] = (
    ("wait_groups_seconds", "wait for rollout"),
    ("train_seconds", "train"),
    ("update_weights_seconds", "update weights"),
    ("save_seconds", "checkpoint"),
    ("eval_seconds", "evaluate"),
    ("save_samples_seconds", "keep samples"),
    ("plan_seconds", "plan"),
    ("commit_seconds", "commit"),
    ("other_seconds", "other"),
)
"""Parts of a step in order of display: metric and name."""

_OVERHEAD = ("plan_seconds", "commit_seconds", "other_seconds")


@dataclass(frozen=True)
class Part:
    """Seconds of one part and their share of the whole (0 to 1)."""

    name: str
    seconds: float
    share: float


def time_split(steps: Sequence[Mapping[str, float]]) -> list[Part]:
    """Parts of the time of steps, largest first, those without time left out."""
    total = sum(step.get("total_seconds", 0.0) for step in steps)
    sums = [(name, sum(step.get(metric, 0.0) for step in steps)) for metric, name in PARTS]
    return sorted(
        (Part(name, seconds, seconds / total) for name, seconds in sums if total and seconds / total >= 0.0005),
        key=lambda part: -part.seconds,
    )


def overhead_share(steps: Sequence[Mapping[str, float]]) -> float:
    """Share of the time in which nothing was generated, trained, sent, saved or evaluated."""
    total = sum(step.get("total_seconds", 0.0) for step in steps)
    return sum(step.get(name, 0.0) for step in steps for name in _OVERHEAD) / total if total else 0.0


@dataclass(frozen=True)
class Waiting:
    """Who waits for whom, as shares (0 to 1) of a step's wall clock."""

    trainer_for_rollout: float
    rollout_for_prompts: float

    @property
    def sentence(self) -> str:
        """For the user."""
        if self.trainer_for_rollout < 0.1 and self.rollout_for_prompts < 0.1:
            return "nobody waits: generation and training overlap"
        trainer = f"trainer waits for rollout {self.trainer_for_rollout:.0%} of the time"
        return f"{trainer}, rollout waits for prompts {self.rollout_for_prompts:.0%}"


def waiting(step: Mapping[str, float], node_count: int = 1) -> Waiting | None:
    """Who waited in a step; None for a step without rollout."""
    total = step.get("total_seconds", 0.0)
    if not total or "rollout_idle_seconds" not in step:
        return None
    idle = step["rollout_idle_seconds"] / (total * max(node_count, 1))
    return Waiting(min(step.get("wait_groups_seconds", 0.0) / total, 1.0), min(max(idle, 0.0), 1.0))


@dataclass(frozen=True)
class Outcome:
    """First and last evaluation of a data set, and the best."""

    dataset: str
    before: float
    after: float
    best: float


def outcomes(history: History) -> list[Outcome]:
    """What evaluations say, by data set."""
    return [
        Outcome(dataset, values[0][1], values[-1][1], max(value for _, value in values))
        for dataset, values in history.evaluation_series().items()
    ]


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve one line high; more values than columns are averaged."""
    if not values:
        return ""
    count = min(width, len(values))
    bounds = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    if high - low < 1e-9:
        return _BLOCKS[3] * count
    return "".join(_BLOCKS[round((mean - low) / (high - low) * (len(_BLOCKS) - 1))] for mean in means)


def duration(seconds: float) -> str:
    """As in 4.2 s, 3:07 or 1:02:09."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
