"""The end of a run on a terminal: what came of it, where the time went, where the files are."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.console.adapters.chart import draw_rewards
from services.console.core.history import History
from services.console.core.report import duration, outcomes, overhead_share, sparkline, time_split

_FILES = (
    ("metrics.jsonl", "metrics of every step"),
    ("tensorboard", "the same for TensorBoard"),
    ("reward.png", "reward curve"),
    ("hf", "the model, Hugging Face format"),
    ("checkpoints", "checkpoints of the trainer"),
    ("run.yaml", "settings as resolved"),
    ("logs", "logs of every tier"),
)


def show_summary(console: Console, run_id: str, directory: Path, history: History) -> None:
    """Prints the tables and writes reward.png."""
    steps = [metrics for _, metrics in sorted(history.steps.items())]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bright_black", min_width=9)
    table.add_column()
    for outcome in outcomes(history):
        best = f"   best {outcome.best:.3f}" if outcome.best > max(outcome.after, outcome.before) else ""
        text = f"before [bold]{outcome.before:.3f}[/]   after [bold]{outcome.after:.3f}[/]{best}"
        table.add_row(f"eval {outcome.dataset}", text)
    if rewards := [value for _, value in history.series("reward_mean")]:
        table.add_row("reward", f"first {rewards[0]:.3f}   last {rewards[-1]:.3f}   {sparkline(rewards)}")
    if losses := [value for _, value in history.series("loss")]:
        table.add_row("loss", f"first {losses[0]:.4f}   last {losses[-1]:.4f}")
    if steps:
        total = sum(step.get("total_seconds", 0.0) for step in steps)
        table.add_row("steps", f"{len(steps)} in {duration(total)}, {duration(total / len(steps))} each")
        split = [f"{part.name} {duration(part.seconds)} ({part.share:.0%})" for part in time_split(steps)]
        # Hard spaces, so that lines break between parts.
        table.add_row("time", "   ".join(text.replace(" ", "\u00a0") for text in split))
        table.add_row(
            "overhead", f"{overhead_share(steps):.1%} of the time is neither generation, training nor transfer"
        )
    if directory.is_dir() and steps:
        draw_rewards(history, directory / "reward.png", f"{run_id}: reward")
    for name, what in _FILES:
        if (directory / name).exists():
            table.add_row("file", f"{directory / name}   [bright_black]{what}[/]", style=None)
    console.print()
    console.print(table, soft_wrap=True)
