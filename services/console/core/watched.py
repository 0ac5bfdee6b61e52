"""A run as it is watched: the newest progress, the history, and what rollout and buffer report.

Knows neither terminal nor gRPC.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.console.core.history import Event, History

PHASES = {
    1: "idle",
    2: "loading the model",
    3: "waiting for engines",
    4: "updating weights",
    5: "waiting for groups",
    6: "training",
    7: "saving",
    8: "evaluating",
    9: "ended",
}
"""Phases of the trainer by number of the contract."""


@dataclass(frozen=True)
class Engine:
    """An engine as its node reports it. `state` in lower case."""

    engine_id: str
    state: str
    version: int
    restarts: int = 0


@dataclass
class Watched:
    """Mutable; belongs to one event loop."""

    run_id: str
    total_steps: int = 0
    step_count: int = 0
    version: int = 0
    phase: str = "starting"
    history: History = field(default_factory=History)
    engines: tuple[Engine, ...] = ()
    groups: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=4))
    started: float = field(default_factory=time.monotonic)
    first_step_at: tuple[float, int] | None = None

    def advance(self, phase: int, step_count: int, total: int, version: int) -> None:
        """Takes the trainer's progress in."""
        if self.first_step_at is None and phase in (5, 6):
            self.first_step_at = (time.monotonic(), step_count)
        self.phase, self.step_count, self.version = PHASES.get(phase, "starting"), step_count, version
        self.total_steps = total or self.total_steps

    def add(self, event: Event) -> None:
        """Takes an event in."""
        self.history.add(event)

    @property
    def elapsed(self) -> float:
        """Seconds since this console began to watch."""
        return time.monotonic() - self.started

    @property
    def remaining(self) -> float | None:
        """Seconds to the last step at the pace so far; None while unknown."""
        if self.first_step_at is None:
            return None
        began, first = self.first_step_at
        done = self.step_count - first
        return (time.monotonic() - began) / done * (self.total_steps - self.step_count) if done > 0 else None
