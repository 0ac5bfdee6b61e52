"""The history of a run in a test of the trainer's core."""

from __future__ import annotations

from typing import Any

from services.trainer.core.progress import Event, Progress


class MemoryJournal:
    """History that goes to the progress alone."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def write(self, kind: str, step: int, metrics: Any, message: str) -> None:
        self.progress.add(Event(len(self.progress.events) + 1, kind, step, dict(metrics), message))

    def close(self) -> None: ...
