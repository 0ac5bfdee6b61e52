"""Progress of a run for those who ask: phase, counters and a numbered history.

Event numbers are the line numbers of the run's metrics file, from 1, so that a restarted trainer continues them.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Phase(enum.IntEnum):
    """What the trainer does; numbers equal the proto's."""

    IDLE = 1
    LOADING = 2
    WAITING_FOR_ENGINES = 3
    UPDATING_WEIGHTS = 4
    WAITING_FOR_GROUPS = 5
    TRAINING = 6
    SAVING = 7
    EVALUATING = 8
    ENDED = 9


@dataclass(frozen=True)
class Event:
    """One entry of a run's history. `number` from 1."""

    number: int
    kind: str
    step: int
    metrics: Mapping[str, float]
    message: str


@dataclass
class Progress:
    """Mutable state of one run. Only the event loop's thread touches it."""

    run_id: str
    run_dir: str = ""
    phase: Phase = Phase.LOADING
    step_count: int = 0
    total_step_count: int = 0
    policy_version: int = 0
    reason: str = ""
    succeeded: bool = False
    events: list[Event] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        """True when the trainer is done with the run, whatever the outcome."""
        return self.phase is Phase.ENDED

    def enter(self, phase: Phase) -> None:
        """Changes the phase and wakes those who watch."""
        self.phase = phase
        self._wake()

    def end(self, *, succeeded: bool, reason: str) -> None:
        """The last change."""
        self.succeeded = succeeded
        self.reason = reason
        self.enter(Phase.ENDED)

    def add(self, event: Event) -> None:
        """Appends to the history."""
        self.events.append(event)
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def next_change(self) -> asyncio.Event:
        """Set at the first change after this was read."""
        return self._changed

    async def wait_change(self, timeout: float, change: asyncio.Event | None = None) -> None:
        """Returns at `change` (the next one when not given), or after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for((change or self._changed).wait(), timeout)
