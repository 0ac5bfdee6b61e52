"""The reward curve as a picture."""

from __future__ import annotations

from pathlib import Path

from services.console.core.history import History


def draw_rewards(history: History, path: Path, title: str) -> bool:
    """Writes a PNG of reward and evaluations over steps; False when there is nothing to draw."""
    rewards, evaluations = history.series("reward_mean"), history.evaluation_series()
    if not rewards and not evaluations:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    if rewards:
        axes.plot(*zip(*rewards, strict=True), color="#4c78a8", linewidth=1.4, label="training batch (mean reward)")
    for color, (dataset, values) in zip(
        ("#f58518", "#54a24b", "#b279a2", "#e45756"), evaluations.items(), strict=False
    ):
        axes.plot(*zip(*values, strict=True), color=color, marker="o", linewidth=1.8, label=f"evaluation: {dataset}")
    axes.set_title(title)
    axes.set_xlabel("steps done")
    axes.set_ylabel("mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)
    return True
