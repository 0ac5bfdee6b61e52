"""History, time split, sparkline, and what a terminal shows."""

from __future__ import annotations

import io
import json

from rich.console import Console

from services.console.adapters.chart import draw_rewards
from services.console.cli.view import render, step_line
from services.console.core.history import Event, History, load_history, read_history
from services.console.core.report import duration, outcomes, overhead_share, sparkline, time_split, waiting
from services.console.core.watched import Engine, Watched

STEP = {
    "reward_mean": 0.5,
    "loss": 0.01,
    "response_length_mean": 12.25,
    "truncated_fraction": 0.25,
    "ppo_kl": 0.0,
    "pg_clipfrac": 0.012,
    "kl_loss": 0.002,
    "entropy": 1.2,
    "staleness_mean": 0.5,
    "staleness_max": 1.0,
    "tokens_per_second": 812.0,
    "wait_groups_seconds": 6.0,
    "train_seconds": 3.0,
    "update_weights_seconds": 0.5,
    "commit_seconds": 0.1,
    "other_seconds": 0.4,
    "total_seconds": 10.0,
    "rollout_idle_seconds": 2.0,
    "rollout_generated_token_count": 5000.0,
}


def line(kind: str, step: int, **metrics: float) -> str:
    return json.dumps({"event": 9, "kind": kind, "step": step, "time": 1.0, "message": "m", **metrics})


def test_last_line_of_a_step_counts_and_a_restore_takes_back():
    history = read_history(
        [
            line("eval", -1, **{"held/mean_reward": 0.1, "held/scored_count": 8}),
            line("step", 0, reward_mean=0.2),
            line("step", 1, reward_mean=0.3),
            line("eval", 1, **{"held/mean_reward": 0.4}),
            line("restore", 0, step_count=1.0),
            line("step", 1, reward_mean=0.5),
            '{"kind": "st',
        ]
    )
    assert history.series("reward_mean") == [(1, 0.2), (2, 0.5)]
    assert history.evaluation_series() == {"held": [(0, 0.1)]}
    assert "event" not in history.steps[0]
    assert history.last_event == 6


def test_history_of_a_directory(tmp_path):
    assert load_history(tmp_path).steps == {}
    (tmp_path / "metrics.jsonl").write_text(line("step", 0, reward_mean=1.0) + "\n")
    assert load_history(tmp_path).last == {"reward_mean": 1.0}


def test_time_adds_up():
    parts = time_split([STEP, STEP])
    assert [part.name for part in parts] == ["wait for rollout", "train", "update weights", "other", "commit"]
    assert abs(sum(part.share for part in parts) - 1) < 1e-9
    assert parts[0].seconds == 12.0
    assert abs(overhead_share([STEP]) - 0.05) < 1e-9
    assert time_split([]) == []
    assert overhead_share([]) == 0


def test_who_waits():
    assert waiting(STEP).sentence == "trainer waits for rollout 60% of the time, rollout waits for prompts 20%"
    assert waiting({"total_seconds": 1.0}) is None
    busy = {"total_seconds": 1.0, "rollout_idle_seconds": 0.0, "wait_groups_seconds": 0.01}
    assert waiting(busy).sentence == "nobody waits: generation and training overlap"


def test_outcomes():
    history = History()
    for step, value in ((-1, 0.2), (3, 0.9), (7, 0.8)):
        history.add(Event(step + 2, "eval", step, {"held/mean_reward": value}))
    (outcome,) = outcomes(history)
    assert (outcome.before, outcome.after, outcome.best) == (0.2, 0.8, 0.9)


def test_sparkline_and_durations():
    assert sparkline([]) == ""
    assert sparkline([1, 1]) == "▄▄"
    assert sparkline([0, 1]) == "▁█"
    assert len(sparkline(list(range(100)), width=40)) == 40
    assert [duration(x) for x in (4.21, 187, 3729)] == ["4.2 s", "3:07", "1:02:09"]


def test_line_of_a_step():
    assert step_line(0, 3, STEP) == (
        "step 1/3  reward 0.500  loss 0.0100  length 12.2  KL 0.002  clip 0.012  staleness 1  812 tokens/s"
        "  10.0 s (wait for rollout 60%, train 30%, update weights 5%)"
    )
    assert step_line(0, 3, {"loss": 2.0, "total_seconds": 1.0}) == "step 1/3  loss 2.0000  1.0 s"


def test_panel_shows_what_matters():
    watched = Watched("demo", total_steps=3, step_count=1, version=2, phase="training")
    watched.engines = (Engine("local-0", "ready", 2), Engine("local-1", "dead", 1, restarts=2))
    watched.groups = {"ready": 2, "consumed": 4}
    watched.notes.append("reward is back.")
    watched.add(Event(1, "eval", -1, {"held/mean_reward": 0.25}))
    watched.add(Event(2, "step", 0, STEP))
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(render(watched))
    text = console.export_text().replace("\u00a0", " ")
    for part in (
        "demo", "step 1/3", "training", "0.500", "12.2 tokens, 25% cut", "clipped 0.012", "max 1 versions",
        "812 tokens/s", "500 generated", "wait for rollout 60%", "trainer waits for rollout 60%", "local-0 ready v2",
        "local-1 dead v1 restarted 2×", "ready 2", "reward is back.", "0.250 at step 0",
    ):  # fmt: skip
        assert part in text, part
    console.print(render(Watched("empty")))


def test_chart(tmp_path):
    history = History()
    assert not draw_rewards(history, tmp_path / "none.png", "t")
    history.add(Event(1, "step", 0, {"reward_mean": 0.5}))
    history.add(Event(2, "eval", 0, {"held/mean_reward": 0.5}))
    assert draw_rewards(history, tmp_path / "reward.png", "t")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
