"""A run on a terminal: one panel that is renewed in place, or one line per step where there is no terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.console.core.report import Part, duration, sparkline, time_split, waiting
from services.console.core.watched import Watched

_COLORS = {
    "wait for rollout": "yellow",
    "train": "green",
    "update weights": "blue",
    "checkpoint": "magenta",
    "evaluate": "cyan",
}
_ENGINE_COLORS = {"ready": "green", "updating": "blue", "dead": "red"}
_RECENT = 20
"""Steps over which time is averaged."""


def number(value: float | None, digits: int = 3) -> str:
    """A number for a table; a dash when there is none."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    return f"{value:.{digits}f}" if abs(value) >= 10**-digits else f"{value:.1e}"


def _bar(parts: list[Part], width: int = 44) -> Text:
    """Shares as one coloured bar."""
    bar = Text()
    for part in parts:
        bar.append("█" * max(round(part.share * width), 0), style=_COLORS.get(part.name, "bright_black"))
    return bar


def _legend(parts: list[Part], least: float = 0.01) -> Text:
    text = Text()
    for part in parts:
        if part.share >= least:
            text.append("■\u00a0", style=_COLORS.get(part.name, "bright_black"))
            # Hard spaces, so that lines break between parts.
            text.append(f"{part.name} {part.share:.0%}".replace(" ", "\u00a0") + "   ")
    return text


def _quality(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Rows about the last step: label and text."""
    rows = []
    if "response_length_mean" in metrics:
        cut = metrics.get("truncated_fraction")
        text = f"{metrics['response_length_mean']:.1f} tokens"
        rows.append(("response", text + (f", {cut:.0%} cut at the limit" if cut is not None else "")))
    if "reward_mean" in metrics:
        kl = f"KL to reference {number(metrics['kl_loss'])}   " if metrics.get("kl_loss") else ""
        rows.append(
            (
                "policy",
                f"{kl}KL of update {number(metrics.get('ppo_kl'))}   clipped {number(metrics.get('pg_clipfrac'))}"
                f"   entropy {number(metrics.get('entropy'))}",
            )
        )
        rows.append(
            (
                "staleness",
                f"mean {number(metrics.get('staleness_mean'), 1)}, max {metrics.get('staleness_max', 0):.0f} versions",
            )
        )
    if "loss" in metrics:
        rows.append(("loss", f"{number(metrics['loss'], 4)}   gradient norm {number(metrics.get('grad_norm'))}"))
    if "total_seconds" in metrics:
        speed = f"{metrics.get('tokens_per_second', 0):,.0f} tokens/s trained"
        made, total = metrics.get("rollout_generated_token_count"), metrics["total_seconds"]
        speed += f", {made / total:,.0f} generated" if made and total else ""
        rows.append(("speed", f"{speed}   {duration(total)} a step"))
    return rows


def _reward_row(watched: Watched) -> Text | None:
    rewards = [value for _, value in watched.history.series("reward_mean")]
    if not rewards:
        return None
    text = Text(f"{rewards[-1]:.3f}  ", style="bold")
    text.append(sparkline(rewards), style="green")
    text.append(f"  from {rewards[0]:.3f}", style="bright_black")
    return text


def _evaluation_rows(watched: Watched) -> list[tuple[str, str]]:
    rows = []
    for dataset, values in watched.history.evaluation_series().items():
        first = f"   (step {values[0][0]}: {values[0][1]:.3f})" if len(values) > 1 else ""
        rows.append((f"eval {dataset}", f"{values[-1][1]:.3f} at step {values[-1][0]}{first}"))
    return rows


def _engines(watched: Watched) -> Text | None:
    if not watched.engines:
        return None
    text = Text()
    for engine in watched.engines:
        text.append(f"{engine.engine_id} ", style="bright_black")
        text.append(engine.state, style=_ENGINE_COLORS.get(engine.state, "yellow"))
        text.append(f" v{engine.version}")
        text.append(f" restarted {engine.restarts}×" if engine.restarts else "")
        text.append("   ")
    return text


def render(watched: Watched) -> RenderableType:
    """The panel."""
    head = Table.grid(padding=(0, 2))
    left = f"step {watched.step_count}/{watched.total_steps or '?'}"
    bar = ProgressBar(total=max(watched.total_steps, 1), completed=watched.step_count, width=32)
    rest = f"about {duration(watched.remaining)} left" if watched.remaining is not None else ""
    head.add_row(Text(left, style="bold"), bar, Text(watched.phase, style="cyan"), Text(rest, style="bright_black"))
    body = Table.grid(padding=(0, 2))
    body.add_column(style="bright_black", min_width=9)
    body.add_column()
    reward, engines = _reward_row(watched), _engines(watched)
    if reward:
        body.add_row("reward", reward)
    for label, text in [*_evaluation_rows(watched), *_quality(watched.history.last)]:
        body.add_row(label, text)
    recent = [metrics for _, metrics in sorted(watched.history.steps.items())][-_RECENT:]
    if parts := time_split(recent):
        body.add_row("time", _bar(parts))
        body.add_row("", _legend(parts))
    if recent and (who := waiting(recent[-1])):
        body.add_row("waiting", who.sentence)
    if watched.groups:
        body.add_row("groups", "   ".join(f"{name} {count}" for name, count in watched.groups.items()))
    if engines:
        body.add_row("engines", engines)
    for note in [*watched.problems, *watched.notes]:
        body.add_row("note", Text(note, style="yellow"))
    title = f"[bold]{watched.run_id}[/]  weights v{watched.version}  {duration(watched.elapsed)}"
    return Panel(Group(head, Text(""), body), title=title, title_align="left", border_style="bright_black")


def step_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """One line about a step (from 0) for logs and pipes."""
    parts = [f"step {step + 1}/{total}"]
    if "reward_mean" in metrics:
        parts.append(f"reward {metrics['reward_mean']:.3f}")
    if "loss" in metrics:
        parts.append(f"loss {number(metrics['loss'], 4)}")
    if "response_length_mean" in metrics:
        parts.append(f"length {metrics['response_length_mean']:.1f}")
    if "reward_mean" in metrics:
        if metrics.get("kl_loss"):
            parts.append(f"KL {number(metrics['kl_loss'])}")
        parts.append(f"clip {number(metrics.get('pg_clipfrac'))}")
        parts.append(f"staleness {metrics.get('staleness_max', 0):.0f}")
    if "tokens_per_second" in metrics:
        parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
    split = [part for part in time_split([metrics]) if part.share >= 0.05]
    shares = ", ".join(f"{part.name} {part.share:.0%}" for part in split)
    parts.append(f"{duration(metrics.get('total_seconds', 0.0))}" + (f" ({shares})" if shares else ""))
    return "  ".join(parts)
