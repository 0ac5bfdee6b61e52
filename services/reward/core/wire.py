"""Tasks and outcomes as JSON-ready dicts, for the line between a pool and its workers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from services.reward.core.records import Item, Outcome, Task, Unscored


def task_to_dict(task: Task) -> dict[str, Any]:
    """Dict of a task."""
    return asdict(task)


def task_from_dict(data: dict[str, Any]) -> Task:
    """Task of a dict."""
    return Task(**{**data, "items": tuple(Item(**item) for item in data["items"])})


def outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    """Dict of an outcome."""
    return {
        "reward": outcome.reward,
        "reason": outcome.reason.value if outcome.reason else None,
        "message": outcome.message,
        "details": outcome.details,
        "seconds": outcome.seconds,
    }


def outcome_from_dict(data: dict[str, Any]) -> Outcome:
    """Outcome of a dict."""
    return Outcome(**{**data, "reason": Unscored(data["reason"]) if data["reason"] else None})
