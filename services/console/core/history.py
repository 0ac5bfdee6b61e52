"""What is known of a run so far: steps, evaluations and notices, from events or from metrics.jsonl.

Invariant: a step or evaluation that happened again (after a restore) replaces the earlier one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
_OWN_KEYS = ("event", "kind", "step", "time", "message")
"""Keys of a line that are not metrics."""


@dataclass(frozen=True)
class Event:
    """One entry of a run's history. `step` counts from 0; -1 is before the first."""

    number: int
    kind: str
    step: int
    metrics: Mapping[str, float]
    message: str = ""


@dataclass
class History:
    """Events sorted by what they say. Keys of `steps` and `evaluations` are steps."""

    steps: dict[int, Mapping[str, float]] = field(default_factory=dict)
    evaluations: dict[int, Mapping[str, float]] = field(default_factory=dict)
    updates: dict[int, Mapping[str, float]] = field(default_factory=dict)
    last_event: int = 0

    def add(self, event: Event) -> None:
        """Takes one event in."""
        self.last_event = max(self.last_event, event.number)
        places = {"step": self.steps, "eval": self.evaluations, "update_weights": self.updates}
        if event.kind == "restore":
            # Steps after the checkpoint happen again, with other results.
            for place in places.values():
                for step in [step for step in place if step > event.step]:
                    del place[step]
        elif event.kind in places:
            places[event.kind][event.step] = event.metrics

    def series(self, name: str) -> list[tuple[int, float]]:
        """(steps done, value) of one metric of the steps, in order."""
        return [(step + 1, metrics[name]) for step, metrics in sorted(self.steps.items()) if name in metrics]

    def evaluation_series(self) -> dict[str, list[tuple[int, float]]]:
        """(steps done, mean reward) by data set, in order."""
        found: dict[str, list[tuple[int, float]]] = {}
        for step, metrics in sorted(self.evaluations.items()):
            for name, value in metrics.items():
                dataset, _, what = name.rpartition("/")
                if what == "mean_reward":
                    found.setdefault(dataset, []).append((step + 1, value))
        return found

    @property
    def last(self) -> Mapping[str, float]:
        """Metrics of the last step; empty before the first."""
        return self.steps[max(self.steps)] if self.steps else {}


def parse_line(number: int, line: str) -> Event | None:
    """The event of one line of metrics.jsonl; None for a line cut by a crash."""
    try:
        row: Any = json.loads(line)
        metrics = {
            name: float(value)
            for name, value in row.items()
            if name not in _OWN_KEYS and isinstance(value, int | float)
        }
        return Event(number, str(row["kind"]), int(row["step"]), metrics, str(row.get("message", "")))
    except (ValueError, KeyError, AttributeError, TypeError):
        return None


def read_history(lines: Iterable[str]) -> History:
    """History out of the lines of metrics.jsonl."""
    history = History()
    for number, line in enumerate(lines, start=1):
        if event := parse_line(number, line):
            history.add(event)
    return history


def load_history(run_directory: str | Path) -> History:
    """History of a run's directory; empty when it has no metrics yet."""
    try:
        with (Path(run_directory) / METRICS_FILE).open(encoding="utf-8", errors="replace") as stream:
            return read_history(stream)
    except FileNotFoundError:
        return History()
