"""Values of the reward service.

Invariant: an `Outcome` has a reward or a reason, never both and never neither.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Unscored(enum.Enum):
    """Why an item has no reward."""

    TIMEOUT = "TIMEOUT"
    """It was not scored in its time."""
    GRADER_ERROR = "GRADER_ERROR"
    """The grader raised, crashed, or cannot judge this item."""
    INVALID_REWARD = "INVALID_REWARD"
    """The grader returned something that is not a finite number."""


@dataclass(frozen=True)
class Item:
    """A response to be scored; `metadata` is the prompt's, decoded."""

    item_id: str
    prompt: str
    response: str
    label: str
    group_id: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Reward of one item, or the reason why there is none. `seconds` is the time of the grader alone."""

    reward: float | None = None
    reason: Unscored | None = None
    message: str = ""
    details: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        assert (self.reward is None) != (self.reason is None)


@dataclass(frozen=True)
class Task:
    """Work for one worker: items scored by one grader. `grouped` gives all of them to one call."""

    grader: str
    items: tuple[Item, ...]
    options: dict[str, Any] = field(default_factory=dict)
    custom_path: str = ""
    grouped: bool = False

    @property
    def code_key(self) -> str:
        """What a worker must have imported for this task."""
        return self.custom_path or self.grader


@dataclass(frozen=True)
class Job:
    """A batch as asked for. An empty `grader` means: each item's metadata names it as `rm_type`."""

    grader: str
    items: tuple[Item, ...]
    options: dict[str, Any] = field(default_factory=dict)
    custom_path: str = ""
    grouped: bool = False


def unscored(reason: Unscored, message: str, seconds: float = 0.0) -> Outcome:
    """Outcome without a reward."""
    return Outcome(reason=reason, message=message, seconds=seconds)
