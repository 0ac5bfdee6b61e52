"""A run's history on disk and for those who watch: metrics.jsonl, TensorBoard events, Prometheus. No torch.

Implements `ports.Journal`. metrics.jsonl has one JSON object a line: `event` (its line number), `kind`, `step`, `time`
(Unix seconds), `message`, and every metric by name. Lines are only appended; a line of kind "restore" says that the
run went on from its step, so that for every step the last line counts. A line cut by a crash is removed at the
next start. While the disk is full, lines wait in memory: the run goes on.
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

from services.common.errors import Code, ServiceError
from services.common.telemetry import get_logger
from services.trainer.adapters.charts import Charts
from services.trainer.core.progress import Event, Progress

log = get_logger(__name__)

FILE_NAME = "metrics.jsonl"
_OWN_KEYS = ("event", "kind", "step", "time", "message")
_FLUSH_SECONDS = 5.0

_VALUE = Gauge("tetrarch_trainer_value", "Latest value of a metric of the run", ["run_id", "name"])
_STEPS = Gauge("tetrarch_trainer_step_count", "Steps done", ["run_id"])
_SECONDS = Counter("tetrarch_trainer_seconds", "Seconds of steps, by part", ["part"])
_EVENTS = Counter("tetrarch_trainer_events", "Entries of the history, by kind", ["kind"])
_ENGINES = Counter("tetrarch_trainer_update_engines", "Engines of weight updates, by what came of it", ["outcome"])
_BYTES = Counter("tetrarch_trainer_update_bytes", "Bytes of weights that engines took and verified")
_OUTCOMES = {
    "committed": "update_engine_count",
    "failed": "update_failed_engine_count",
    "late": "update_late_engine_count",
}


class RunJournal:
    """The history of one run.

    Args:
        progress: receives every entry as an event.

    Raises:
        ServiceError: RUN_DIR_NOT_WRITABLE.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        directory = Path(progress.run_dir)
        self._path = directory / FILE_NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for event in read_events(self._path):
                progress.add(event)
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "RUN_DIR_NOT_WRITABLE",
                f"run_dir {directory} on the trainer's host cannot be written: {error.strerror or error}.",
                path=directory,
            ) from error
        self._unwritten = b""
        self._told = False
        self._charts = Charts(directory / "tensorboard")
        self._synced = 0.0

    def write(self, kind: str, step: int, metrics: Mapping[str, float], message: str) -> None:
        """Appends one entry. A disk that is full costs no entry: the file gets it when there is room."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        event = self._add(kind, step, finite, message)
        self._chart(event)
        _observe(self._progress, event)
        problem = self._flush(sync=event.kind != "step")
        if problem and not self._told:
            text = f"{self._path} cannot be written ({problem}): its lines wait in memory until there is room"
            log.warning(text)
            self._add("notice", step, {}, text)
        self._told = bool(problem)

    def _add(self, kind: str, step: int, metrics: Mapping[str, float], message: str) -> Event:
        event = Event(len(self._progress.events) + 1, kind, step, metrics, message)
        line: dict[str, Any] = {"event": event.number, "kind": event.kind, "step": event.step, "time": time.time()}
        line |= {"message": event.message} | dict(event.metrics)
        self._unwritten += json.dumps(line).encode() + b"\n"
        self._progress.add(event)
        return event

    def _flush(self, *, sync: bool) -> str:
        """Writes what waits; → why it cannot, or an empty string."""
        now = time.monotonic()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
            # A crash of the host may cost seconds of history, never a step: the checkpoint has its own sync.
            if sync or now - self._synced > _FLUSH_SECONDS:
                os.fsync(self._file)
                self._synced = now
        except OSError as error:
            return error.strerror or str(error)
        return ""

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
        try:
            self._charts.write(entry)
        except OSError as error:
            log.debug("a chart has a gap", step=steps, error=str(error))

    def close(self) -> None:
        """Writes what waits and closes the files; what cannot be written is lost, and said so."""
        if problem := self._flush(sync=True):
            lines = self._unwritten.count(b"\n")
            log.warning(f"the last {lines} lines of {self._path} are lost: it cannot be written ({problem})")
        os.close(self._file)
        self._charts.close()


def _observe(progress: Progress, event: Event) -> None:
    _EVENTS.labels(event.kind).inc()
    _STEPS.labels(progress.run_id).set(progress.step_count)
    if event.kind == "update_weights":
        for outcome, name in _OUTCOMES.items():
            _ENGINES.labels(outcome).inc(event.metrics.get(name, 0.0))
        _BYTES.inc(event.metrics.get("update_bytes", 0.0) * event.metrics.get("update_engine_count", 0.0))
    if event.kind not in ("step", "update_weights"):
        return
    for name, value in event.metrics.items():
        _VALUE.labels(progress.run_id, name).set(value)
        if event.kind == "step" and name.endswith("_seconds"):
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
