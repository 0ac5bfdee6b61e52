"""Learning curves of several runs: a picture with one panel for each name, and a table."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COLUMNS = 4
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")


@dataclass(frozen=True)
class Curve:
    """A run of a panel. values: by step; heldout: (steps done, value)."""

    panel: str
    label: str
    values: Sequence[float]
    heldout: Sequence[tuple[int, float]]


def draw(curves: Sequence[Curve], path: Path, what: Mapping[str, str] | None = None, columns: int = COLUMNS) -> None:
    """Writes a PNG: values as lines, held-out rewards as points. `what`: what values are, by panel, if not rewards."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = list(dict.fromkeys(curve.panel for curve in curves))
    rows = max(math.ceil(len(panels) / columns), 1)
    size = (3.4 * min(columns, max(len(panels), 1)), 2.8 * rows)
    width = min(columns, max(len(panels), 1))
    figure, axes = plt.subplots(rows, width, figsize=size, dpi=110, layout="constrained", squeeze=False)
    for place in axes.flat[len(panels) :]:
        place.remove()
    for place, panel in zip(axes.flat, panels, strict=False):
        shown = [curve for curve in curves if curve.panel == panel]
        for color, curve in zip(COLORS * len(shown), shown, strict=False):
            steps = range(1, len(curve.values) + 1)
            place.plot(steps, curve.values, color=color, linewidth=0.9, alpha=0.7, label=curve.label)
            if curve.heldout:
                place.plot(*zip(*curve.heldout, strict=True), color=color, marker="o", markersize=4, linestyle=":")
        place.set_title(panel)
        place.set_xlabel("steps done")
        place.set_ylabel((what or {}).get(panel, "mean reward"))
        if panel not in (what or {}):
            place.set_ylim(-0.02, 1.02)
        place.grid(visible=True, alpha=0.25)
        place.legend(frameon=False, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def write_table(
    runs: Sequence[tuple[str, Sequence[tuple[int, float]], Mapping[str, Sequence[float]]]], path: Path
) -> None:
    """Writes a CSV, one row a step and run. runs: name, (steps done, held-out reward), metrics by step."""
    names = sorted({name for _, _, series in runs for name in series})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["run", "steps_done", "heldout", *names])
        for run, heldout, series in runs:
            scores = dict(heldout)
            for done in range(max(map(len, series.values()), default=0) + 1):
                values = [
                    series[name][done - 1] if done and len(series.get(name, ())) >= done else "" for name in names
                ]
                writer.writerow([run, done, scores.get(done, ""), *values])
