"""Runs one run at a time: attempts, restarts of the ranks, stops, exports.

Knows the outside through ports. Invariants: at most one run owns ranks; a run that ends here has a reason; a run
that a newer trainer took over is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from services.common.errors import Code, ServiceError
from services.common.run_spec import RunSpec
from services.common.telemetry import get_logger
from services.trainer.core.commands import ExportHf, Setup
from services.trainer.core.engines import OpenStore
from services.trainer.core.loop import Outcome, Ports, TrainingLoop
from services.trainer.core.ports import Buffer, CheckpointFiles, Journal, Ranks, RanksFailed, Rollout
from services.trainer.core.progress import Phase, Progress
from services.trainer.core.records import Run
from services.trainer.core.restore import load_ranks
from services.trainer.core.settings import LoopSettings

log = get_logger(__name__)

_HOPELESS = ("LOSS_NOT_FINITE", "GRADIENT_NOT_FINITE", "CUSTOM_LOSS_FAILED", "CUSTOM_CORRECTION_FAILED")
"""Reasons of a rank after which the steps since the checkpoint would only be trained again to the same end."""
MAX_FAILURES = 3
"""Failures in a row without a step in between after which a run is given up."""


@dataclass(frozen=True)
class Factories:
    """What is made anew for every run or attempt. `device` resolves a run's device setting to cpu or cuda."""

    ranks: Callable[[RunSpec, str], Ranks]
    journal: Callable[[Progress], Journal]
    device: Callable[[str], str]
    open_weights: OpenStore | None = None
    """Directories of weights as files."""


@dataclass
class _Active:
    """The run in hand."""

    spec: RunSpec
    progress: Progress
    journal: Journal
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    leave_active: bool = False
    """Whether the stop leaves the run ACTIVE in the buffer, to be resumed by the next trainer."""
    epoch: int = 0
    loop: TrainingLoop | None = None
    task: asyncio.Task | None = None


class TrainerController:
    """The trainer behind its gRPC service.

    Args:
        buffer, rollout, files: the outside.
        factories: ranks and journals of a run.
        settings: places and deadlines; `device` is filled in for every run.
    """

    def __init__(
        self,
        buffer: Buffer,
        rollout: Rollout,
        files: CheckpointFiles,
        factories: Factories,
        settings: Callable[[str], LoopSettings],
    ) -> None:
        self._buffer = buffer
        self._rollout = rollout
        self._files = files
        self._factories = factories
        self._settings = settings
        self._active: _Active | None = None
        self._runs: dict[str, Progress] = {}
        self._lock = asyncio.Lock()

    # -- what the service offers

    async def start_run(self, run_id: str) -> Progress:
        """Starts or resumes a run. Raises RUN_NOT_FOUND, RUN_FINISHED, BUSY."""
        async with self._lock:
            active = self._running()
            if active and active.progress.run_id == run_id:
                return active.progress
            self._refuse_when_busy(active)
            run = await self._buffer.get_run(run_id)
            if not run.active:
                raise ServiceError(
                    Code.FAILED_PRECONDITION,
                    "RUN_FINISHED",
                    f"Run {run_id} ended as {run.state}{f' ({run.reason})' if run.reason else ''}; create it again to"
                    " go on with it.",
                    run_id=run_id,
                )
            spec = RunSpec.model_validate_json(run.spec_json)
            progress = Progress(run_id, run_dir=_directory(spec), total_step_count=spec.rollout.num_rollout)
            active = _Active(spec, progress, self._factories.journal(progress))
            self._active, self._runs[run_id] = active, progress
            active.task = asyncio.create_task(self._drive(active), name=f"run {run_id}")
            return progress

    async def stop_run(self, run_id: str, max_wait: float) -> Progress:
        """Asks a run to stop and waits at most `max_wait` seconds. Raises RUN_NOT_FOUND."""
        progress = self.progress(run_id)
        active = self._running()
        if active and active.progress is progress and active.task:
            active.stop.set()
            await asyncio.wait([active.task], timeout=max_wait)
        return progress

    def progress(self, run_id: str) -> Progress:
        """Progress of a run this process has seen; the active (else the latest) one when `run_id` is empty."""
        if not run_id:
            return self._active.progress if self._active else Progress("", phase=Phase.IDLE)
        if run_id not in self._runs:
            raise ServiceError(
                Code.NOT_FOUND,
                "RUN_NOT_FOUND",
                f"This trainer has not been asked to start run {run_id}.",
                run_id=run_id,
            )
        return self._runs[run_id]

    async def export(self, run_id: str, path: str) -> tuple[str, int]:
        """Writes the weights of the active run, or of a run's last checkpoint; → directory, steps contained."""
        active = self._running()
        if active and active.progress.run_id == run_id:
            if active.loop is None or active.progress.phase is Phase.LOADING:
                raise ServiceError(
                    Code.FAILED_PRECONDITION, "BUSY", f"Run {run_id} is still loading; try again.", retry_seconds=5.0
                )
            # A rank that fails to write would end the attempt, and with it all steps since the checkpoint.
            self._files.check_export(path)
            return await active.loop.export(path), active.progress.step_count
        async with self._lock:
            self._refuse_when_busy(self._running())
            run = await self._buffer.get_run(run_id)
            spec = RunSpec.model_validate_json(run.spec_json)
            if not run.checkpoint_path:
                raise ServiceError(
                    Code.NOT_FOUND,
                    "CHECKPOINT_NOT_FOUND",
                    f"Run {run_id} has no checkpoint (set save); the weights of its end, if it ended, are in"
                    f" {_directory(spec)}/hf.",
                    run_id=run_id,
                )
            self._files.check_export(path)
            return await self._export_checkpoint(run, spec, path), run.checkpoint_step + 1

    async def _export_checkpoint(self, run: Run, spec: RunSpec, path: str) -> str:
        device = self._factories.device(spec.rollout.device)
        settings = self._settings(device)
        ranks = self._factories.ranks(spec, _directory(spec))
        try:
            await ranks.start()
            await ranks.call_all(Setup(run.spec_json, device), settings.setup_timeout)
            await load_ranks(ranks, run.checkpoint_path, settings.setup_timeout)
            return (await ranks.call_all(ExportHf(path), settings.save_timeout))[0].path
        finally:
            await ranks.stop()

    async def resume_newest(self) -> Progress | None:
        """Resumes the newest active run of the buffer, if there is one."""
        runs = await self._buffer.active_runs()
        return await self.start_run(runs[0].run_id) if runs else None

    async def shutdown(self, max_wait: float) -> None:
        """Ends the run in hand after its step, with a checkpoint, and leaves it ACTIVE to be resumed."""
        active = self._running()
        if active is None or active.task is None:
            return
        active.leave_active = True
        active.stop.set()
        done, _ = await asyncio.wait([active.task], timeout=max_wait)
        if not done:
            active.task.cancel()
            await asyncio.gather(active.task, return_exceptions=True)

    # -- a run's life

    def _running(self) -> _Active | None:
        return self._active if self._active and self._active.task and not self._active.task.done() else None

    @staticmethod
    def _refuse_when_busy(active: _Active | None) -> None:
        if active:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "BUSY",
                f"This trainer is busy with run {active.progress.run_id}; stop it, or wait for its end.",
                run_id=active.progress.run_id,
            )

    async def _drive(self, active: _Active) -> None:
        """Attempts until the run ends here."""
        progress = active.progress
        failures, furthest = 0, -1
        while True:
            try:
                outcome = await self._attempt(active)
            except ServiceError as error:
                what, then = _remedy(error)
                if not what:
                    await self._end_by(active, error)
                    return
                failures = 1 if progress.step_count > furthest else failures + 1
                furthest = max(furthest, progress.step_count)
                if failures >= MAX_FAILURES or active.stop.is_set():
                    text = f"{what} {failures} times without a step in between: {error.message}"
                    await self._end(active, "FAILED", text)
                    return
                active.journal.write("notice", progress.step_count - 1, {}, f"{then}: {error.message}")
                log.warning(what, run_id=progress.run_id, error=error.message)
            except Exception as error:
                log.exception("the loop failed", run_id=progress.run_id)
                await self._end(active, "FAILED", f"the trainer failed with {type(error).__name__}: {error}")
                return
            else:
                state, reason = ("FINISHED", "") if outcome is Outcome.FINISHED else ("STOPPED", outcome.value)
                await self._end(active, state, reason)
                return

    async def _attempt(self, active: _Active) -> Outcome:
        """One session with ranks of its own."""
        spec, progress = active.spec, active.progress
        session = await self._buffer.begin_session(progress.run_id)
        active.epoch = session.epoch
        ranks = self._factories.ranks(spec, progress.run_dir)
        ports = Ports(self._buffer, ranks, self._rollout, self._files, active.journal, self._factories.open_weights)
        settings = self._settings(self._factories.device(spec.rollout.device))
        active.loop = TrainingLoop(session, spec, ports, settings, progress, active.stop)
        try:
            return await active.loop.run()
        finally:
            active.loop = None
            await asyncio.shield(ranks.stop())

    async def _end_by(self, active: _Active, error: ServiceError) -> None:
        if error.reason == "FENCED":
            log.warning("a newer trainer holds the run", run_id=active.progress.run_id)
            active.progress.end(succeeded=False, reason=f"a newer trainer holds the run: {error.message}")
            return
        log.error("run failed", run_id=active.progress.run_id, reason=error.reason, error=error.message)
        await self._end(active, "FAILED", error.message)

    async def _end(self, active: _Active, state: str, reason: str) -> None:
        """Tells the buffer, then those who watch."""
        progress = active.progress
        left = state == "STOPPED" and active.leave_active
        if left:
            reason = "this trainer was told to end; the run is still active, start it again to go on"
        if reason:
            text = f"run {progress.run_id} {'pauses' if left else state}: {reason}"
            active.journal.write("notice", progress.step_count - 1, {}, text)
        if not left:
            try:
                await self._buffer.finish_run(progress.run_id, active.epoch, state, reason)
            except ServiceError as error:
                log.warning("the run's end was not recorded", run_id=progress.run_id, error=error.message)
                reason = f"{reason} (not recorded: {error.message})".strip()
        with contextlib.suppress(OSError):
            active.journal.close()
        progress.end(succeeded=state == "FINISHED", reason=reason)


def _remedy(error: ServiceError) -> tuple[str, str]:
    """(what happened, what is done about it) for an error after which the run goes on; ("", "") for others."""
    if isinstance(error, RanksFailed):
        if error.cause in _HOPELESS:
            return "", ""
        return "the ranks failed", "the ranks start anew from the last checkpoint"
    if error.reason == "STEP_OUT_OF_ORDER":
        # Steps of ours that the store has acknowledged are gone from it: it lost power.
        return "the buffer forgot steps", "the run goes back to the checkpoint that the buffer remembers"
    return "", ""


def _directory(spec: RunSpec) -> str:
    return str(Path(os.path.abspath(spec.directory)))
