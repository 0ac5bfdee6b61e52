"""A run's history on disk and for those who watch: metrics.jsonl, TensorBoard events, Prometheus. No torch.

Implements `ports.Journal`. metrics.jsonl has one JSON object a line: `event` (its line number), `kind`, `step`, `time`
(Unix seconds), `message`, and every metric by name. Lines are only appended; a line of kind "restore" says that the
run went on from its step, so that for every step the last line counts. A line cut by a crash is removed at the
next start.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge
from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from services.trainer.core.progress import Event, Progress

FILE_NAME = "metrics.jsonl"
_OWN_KEYS = ("event", "kind", "step", "time", "message")
_FLUSH_SECONDS = 5.0

_VALUE = Gauge("tetrarch_trainer_value", "Latest value of a metric of the run", ["run_id", "name"])
_STEPS = Gauge("tetrarch_trainer_step_count", "Steps done", ["run_id"])
_SECONDS = Counter("tetrarch_trainer_seconds", "Seconds of steps, by part", ["part"])
_EVENTS = Counter("tetrarch_trainer_events", "Entries of the history, by kind", ["kind"])


class RunJournal:
    """The history of one run.

    Args:
        progress: receives every entry as an event.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        directory = Path(progress.run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        for event in read_events(path):
            progress.add(event)
        self._file = path.open("a", encoding="utf-8")
        self._board = EventFileWriter(str(directory / "tensorboard"), flush_secs=int(_FLUSH_SECONDS))
        self._synced = 0.0

    def write(self, kind: str, step: int, metrics: Mapping[str, float], message: str) -> None:
        """Appends one entry."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        event = Event(len(self._progress.events) + 1, kind, step, finite, message)
        self._append(event)
        self._chart(event)
        _observe(self._progress, event)
        self._progress.add(event)

    def _append(self, event: Event) -> None:
        line: dict[str, Any] = {"event": event.number, "kind": event.kind, "step": event.step, "time": time.time()}
        line |= {"message": event.message} | dict(event.metrics)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        now = time.monotonic()
        # A crash of the host may cost seconds of history, never a step: the checkpoint has its own sync.
        if event.kind != "step" or now - self._synced > _FLUSH_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = now

    def _chart(self, event: Event) -> None:
        """Scalars by `kind/name` over the number of steps done."""
        steps = max(event.step + 1, 0)
        if event.kind == "restore":  # tells TensorBoard to hide what lies beyond
            entry = TensorBoardEvent(wall_time=time.time(), step=steps, session_log=SessionLog(status=SessionLog.START))
        elif event.metrics:
            values = [Summary.Value(tag=f"{event.kind}/{k}", simple_value=v) for k, v in event.metrics.items()]
            entry = TensorBoardEvent(wall_time=time.time(), step=steps, summary=Summary(value=values))
        else:
            return
        self._board.add_event(entry)

    def close(self) -> None:
        """Flushes and closes the files."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._board.close()


def _observe(progress: Progress, event: Event) -> None:
    _EVENTS.labels(event.kind).inc()
    _STEPS.labels(progress.run_id).set(progress.step_count)
    if event.kind != "step":
        return
    for name, value in event.metrics.items():
        _VALUE.labels(progress.run_id, name).set(value)
        if name.endswith("_seconds"):
            _SECONDS.labels(name.removesuffix("_seconds")).inc(max(value, 0.0))


def read_events(path: Path) -> list[Event]:
    """Entries of a metrics file in order; a cut last line is removed from it."""
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) != len(raw):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    events = []
    for number, text in enumerate(whole.decode("utf-8", "replace").splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = {}
        metrics = {k: float(v) for k, v in line.items() if k not in _OWN_KEYS and isinstance(v, (int, float))}
        kind, step = str(line.get("kind", "notice")), int(line.get("step", -1))
        events.append(Event(number, kind, step, metrics, str(line.get("message", ""))))
    return events
