"""The training loop: one attempt at a run, from the session's begin to the last step.

Synchronous and asynchronous training are the same loop: how far rollout may run ahead is decided by the buffer's
admission (`max_staleness`). Invariants, in the order that makes a death at any point harmless:
- Weights are pushed and published before a batch is taken, so every sample's version is known to the run.
- A step is committed after it was trained; a checkpoint is recorded after it was written; what lies between a
  checkpoint and the death is given back by RestoreRun and trained again from the restored weights.
- A version is reserved before it is pushed, so no number is used twice.
A run that only generates (`debug_rollout_only`) takes and commits steps without training them: its weights are pushed
once and published again with every step, and it goes on from its last commit, since there is nothing to save.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import Code, ServiceError
from services.common.run_spec import RunSpec
from services.common.telemetry import get_logger
from services.trainer.core.algorithms.estimators import estimator
from services.trainer.core.batches import NodeDeltas, StepInputs, schedule_settings, step_inputs, train_metrics
from services.trainer.core.commands import ExportHf, Setup, SetupResult, TrainResult, TrainStep
from services.trainer.core.engines import OpenStore, make_fleet
from services.trainer.core.evaluation import eval_message, eval_metrics, evaluate
from services.trainer.core.fleet import EngineFleet
from services.trainer.core.ports import Buffer, CheckpointFiles, Journal, Ranks, RanksFailed, Rollout
from services.trainer.core.progress import Phase, Progress
from services.trainer.core.records import Batch, Session
from services.trainer.core.reports import batch_timeout, step_message, update_message, update_metrics
from services.trainer.core.restore import CheckpointPlaces, Restored, restore, resume_untrained, save_checkpoint
from services.trainer.core.samples_kept import keep_samples
from services.trainer.core.settings import LoopSettings
from services.trainer.core.timing import StepClock

log = get_logger(__name__)

_PATIENCE_SECONDS = 10.0
"""A wait for a batch that is longer than this may have a cause that the user should see."""


@dataclass(frozen=True)
class Ports:
    """Everything outside."""

    buffer: Buffer
    ranks: Ranks
    rollout: Rollout
    files: CheckpointFiles
    journal: Journal
    open_weights: OpenStore | None = None
    """Directories of weights as files."""


class Outcome(enum.Enum):
    """How an attempt ended without an error."""

    FINISHED = "all steps are done"
    STOPPED = "it was asked to stop"


class StopRequested(Exception):
    """Ends a wait when the run was asked to stop."""


class TrainingLoop:
    """One attempt at a run.

    Args:
        session: this trainer's hold on the run.
        spec: the run's settings.
        ports: the outside.
        settings: deadlines and places.
        progress: updated on the way.
        stop: set by whoever wants the run to stop after the step in progress.
    """

    def __init__(
        self,
        session: Session,
        spec: RunSpec,
        ports: Ports,
        settings: LoopSettings,
        progress: Progress,
        stop: asyncio.Event,
    ) -> None:
        self._session = session
        self._spec = spec
        self._ports = ports
        self._settings = settings
        self._progress = progress
        self._stop = stop
        self._run_id = session.run.run_id
        self._engineless = spec.engineless
        self._rollout_only = spec.rollout.debug_rollout_only
        self._clock = StepClock()
        self._deltas = NodeDeltas()
        self.ranks_lock = asyncio.Lock()
        """Held by whoever uses the ranks."""
        self._setup: SetupResult | None = None
        self._restored = Restored(0, 0, "", 0)
        self._saved_step_count = -1
        self._published_step_count = -1
        self._fleet: EngineFleet | None = None

    @property
    def save_directory(self) -> str:
        """Where this run's checkpoints are."""
        return self._spec.trainer.save or str(Path(self._progress.run_dir) / "checkpoints")

    async def run(self) -> Outcome:
        """Trains until the last step, a stop, or an error.

        Raises:
            ServiceError: FENCED, RANKS_FAILED (see `RanksFailed`), NO_ENGINE, BATCH_TIMEOUT, or another's error.
        """
        try:
            await self._load()
            if self._engineless or self._restored.step_count >= self._spec.rollout.num_rollout:
                return await self._train()
            catch_up = await self._start_engines()
            try:
                await self._first_evaluation()
                return await self._train()
            finally:
                catch_up.cancel()
                await asyncio.gather(catch_up, return_exceptions=True)
        except StopRequested:
            return await self._stopped()

    # -- before the first step

    async def _load(self) -> None:
        self._progress.enter(Phase.LOADING)
        estimator(self._spec.trainer)  # a function that cannot be imported ends the run before anything is started
        setup = Setup(self._session.run.spec_json, self._settings.device)
        async with self.ranks_lock:
            await self._ports.ranks.start()
            try:
                self._setup = (await self._ports.ranks.call_all(setup, self._settings.setup_timeout))[0]
            except RanksFailed as error:
                if not error.answered:
                    raise
                raise ServiceError(
                    Code.FAILED_PRECONDITION, "MODEL_NOT_LOADED", f"The model cannot be loaded: {error.message}"
                ) from error
            places = CheckpointPlaces(self.save_directory, self._spec.trainer.load)
            ports = self._ports
            go_on = resume_untrained if self._rollout_only else restore
            self._restored = await go_on(
                self._session, places, ports.ranks, ports.buffer, ports.files, self._settings.setup_timeout
            )
        done = self._restored.step_count
        self._saved_step_count = done if self._restored.path else -1
        self._progress.step_count = done
        place = f" ({self._restored.path})" if self._restored.path else ""
        text = f"goes on from step {done}{place}" if done else "starts from the first step"
        self._write("restore", done - 1, {"step_count": float(done)}, f"run {self._run_id} {text}")

    async def _start_engines(self) -> asyncio.Task:
        """First push; → the task that brings late joiners up, also while there is an evaluation."""
        assert self._setup
        ports = self._ports
        outside = (ports.ranks, ports.rollout, ports.journal, ports.open_weights)
        self._fleet = make_fleet((self._session, self._spec), outside, self._setup, self._settings, self.ranks_lock)
        self._progress.enter(Phase.WAITING_FOR_ENGINES)
        await self._fleet.wait_for_engines(self._check)
        await self._update_weights()
        return asyncio.create_task(self._fleet.catch_up_forever(), name="late joiners")

    async def _first_evaluation(self) -> None:
        assert self._fleet
        wanted = self._spec.trainer.eval_before_train and self._spec.rollout.eval_interval
        if wanted and self._progress.step_count == 0:
            await self._evaluate()
        self._deltas.look(await self._fleet.nodes())

    # -- the steps

    async def _train(self) -> Outcome:
        total = self._spec.rollout.num_rollout
        self._clock.lap()
        for step in range(self._restored.step_count, total):
            self._check()
            try:
                await self._step(step)
            except ServiceError as error:
                if error.reason != "DATA_EXHAUSTED":
                    await self._rescue(error)
                    raise
                text = f"the data ended after {step} of {total} steps: {error.message}"
                self._write("notice", step - 1, {}, text)
                break
        await self._finish()
        return Outcome.FINISHED

    async def _step(self, step: int) -> None:
        ports, epoch = self._ports, self._session.epoch
        with self._clock.part("wait_groups"):
            batch = await self._take_batch(step)
        if template := self._spec.rollout.save_debug_rollout_data:
            with self._clock.part("save_samples"):
                await keep_samples(ports.buffer, self._run_id, template, step, batch)
        with self._clock.part("plan"):
            inputs = await self._plan(batch)
        metrics = dict(inputs.metrics)
        if self._rollout_only:
            metrics["total_tokens"] = float(sum(sample.length for sample in batch.samples))
        else:
            self._progress.enter(Phase.TRAINING)
            with self._clock.part("train"):
                metrics |= train_metrics(await self._train_step(step, inputs))
        with self._clock.part("commit"):
            await ports.buffer.commit_step(self._run_id, epoch, step)
        done = step + 1
        self._progress.step_count = done
        # Engines first: they generate while the checkpoint is written.
        if not self._engineless and done % self._spec.trainer.update_weights_interval == 0:
            with self._clock.part("update_weights"):
                metrics |= await self._update_weights()
        if self._due(self._spec.trainer.save_interval, done):
            with self._clock.part("save"):
                await self._save(must=False)
        if self._fleet and self._due(self._spec.rollout.eval_interval, done):
            with self._clock.part("eval"):
                await self._evaluate()
        await self._report(step, metrics)

    async def _plan(self, batch: Batch) -> StepInputs:
        assert self._setup
        shape = schedule_settings(self._spec, self._setup.data_parallel_size)
        if self._spec.trainer.custom_advantage_function_path:
            return await asyncio.to_thread(step_inputs, batch, self._spec, shape)  # nobody knows how long it takes
        return step_inputs(batch, self._spec, shape)

    async def _take_batch(self, step: int) -> Batch:
        self._progress.enter(Phase.WAITING_FOR_GROUPS)
        count = self._spec.rollout.rollout_batch_size
        began = time.monotonic()
        while True:
            self._check()
            batch = await self._ports.buffer.take_batch(
                self._run_id, self._session.epoch, step, count, self._settings.take_wait
            )
            if batch is not None:
                return batch
            waited = time.monotonic() - began
            if waited > self._spec.trainer.batch_timeout:
                raise await self._batch_timeout(step, count, waited)
            if self._fleet and waited > _PATIENCE_SECONDS:
                await self._fleet.tell_problems()

    async def _batch_timeout(self, step: int, count: int, waited: float) -> ServiceError:
        counts = await self._ports.buffer.counts(self._run_id)
        return batch_timeout((self._run_id, step, count), waited, counts, await self._ports.rollout.nodes())

    async def _train_step(self, step: int, inputs: StepInputs) -> list[TrainResult]:
        command = TrainStep(
            step=self._restored.first_step + step,
            run_id=self._run_id,
            buffer_address=self._settings.buffer_address,
            plan=inputs.plan,
            advantages=inputs.advantages,
            update=step >= self._spec.trainer.num_critic_only_steps,
            critic_plan=inputs.critic_plan,
        )
        async with self.ranks_lock:
            return await self._ports.ranks.call_all(command, self._settings.step_timeout)

    async def _report(self, step: int, metrics: dict[str, float]) -> None:
        if self._fleet:
            metrics |= self._deltas.look(await self._fleet.nodes())
        metrics |= self._clock.lap()
        tokens, total = metrics.get("total_tokens", 0.0), metrics["total_seconds"]
        metrics["tokens_per_second"] = tokens / total if total else 0.0
        metrics["policy_version"] = float(self._progress.policy_version)
        self._write("step", step, metrics, step_message(step, self._spec.rollout.num_rollout, metrics))

    # -- weights, checkpoints, evaluations

    async def _update_weights(self) -> dict[str, float]:
        """Brings the engines to the ranks' weights; → metrics of it."""
        assert self._fleet
        done, epoch, buffer = self._progress.step_count, self._session.epoch, self._ports.buffer
        unchanged = self._rollout_only or done <= self._spec.trainer.num_critic_only_steps
        if unchanged and self._published_step_count >= 0:
            # The weights are what they were; admission has to move on all the same.
            await buffer.publish_version(self._run_id, epoch, self._progress.policy_version, done)
            self._published_step_count = done
            return {}
        self._progress.enter(Phase.UPDATING_WEIGHTS)
        version = await buffer.reserve_version(self._run_id, epoch)

        async def publish(pushed: int) -> None:
            await buffer.publish_version(self._run_id, epoch, pushed, done)

        report = await self._fleet.push(version, done - 1, publish, self._check)
        self._progress.policy_version = version
        self._published_step_count = done
        metrics = update_metrics(report)
        said = metrics | {"policy_version": float(version)}
        self._write("update_weights", done - 1, said, update_message(version, report))
        return metrics

    async def _save(self, *, must: bool = True) -> None:
        if self._rollout_only:
            return
        self._progress.enter(Phase.SAVING)
        done, ports = self._progress.step_count, self._ports
        async with self.ranks_lock:
            result = await save_checkpoint(
                self._session,
                self._restored,
                done,
                self.save_directory,
                (ports.ranks, ports.buffer, ports.files),
                self._settings.save_timeout,
                must=must,
            )
        if result.problem:
            return self._write("notice", done - 1, {}, f"the run goes on without a checkpoint: {result.problem}")
        self._saved_step_count = done
        self._write("checkpoint", done - 1, {"seconds": result.seconds}, f"checkpoint {result.path}")

    async def _evaluate(self) -> None:
        self._progress.enter(Phase.EVALUATING)
        datasets = list(self._spec.data.eval_datasets)
        try:
            results = await evaluate(
                self._ports.rollout, self._run_id, datasets, self._progress.policy_version, self._settings.eval_timeout
            )
        except ServiceError as error:
            # Training does not depend on it; the gap in the curve is named.
            self._write("notice", self._progress.step_count - 1, {}, f"evaluation failed: {error.message}")
            return
        self._write("eval", self._progress.step_count - 1, eval_metrics(results), eval_message(results))

    # -- the end

    async def _finish(self) -> None:
        done = self._progress.step_count
        trainer, rollout = self._spec.trainer, self._spec.rollout
        if self._fleet and rollout.eval_interval and done and not self._due(rollout.eval_interval, done):
            if self._published_step_count != done:
                await self._update_weights()
            await self._evaluate()
        if trainer.save and done and self._saved_step_count != done:
            await self._save()
        if self._rollout_only:
            return
        self._progress.enter(Phase.SAVING)
        await self.export(str(Path(self._progress.run_dir) / "hf"))

    async def _stopped(self) -> Outcome:
        """A stop costs nothing: what was trained is saved."""
        if self._progress.step_count and self._saved_step_count != self._progress.step_count:
            await self._save(must=False)
        return Outcome.STOPPED

    async def _rescue(self, error: ServiceError) -> None:
        """A run that ends for want of engines or groups, say, keeps what was trained, as a stop does."""
        foreign = ("FENCED", "BUFFER_UNREACHABLE", "STEP_OUT_OF_ORDER")
        ours = not isinstance(error, RanksFailed) and error.reason not in foreign
        done = self._progress.step_count
        if ours and self._spec.trainer.save and done and self._saved_step_count != done:
            with contextlib.suppress(ServiceError):  # the error that ends the run is the one to be told
                await self._save()

    async def export(self, path: str) -> str:
        """Writes the present weights as a Hugging Face checkpoint; → its directory."""
        async with self.ranks_lock:
            result = (await self._ports.ranks.call_all(ExportHf(path), self._settings.save_timeout))[0]
        self._write("notice", self._progress.step_count - 1, {}, f"Hugging Face checkpoint {result.path}")
        return result.path

    # -- small things

    def _check(self) -> None:
        """Between waits: a stop, or ranks that died meanwhile."""
        if self._ports.ranks.failure is not None:
            raise self._ports.ranks.failure
        if self._stop.is_set():
            raise StopRequested

    @staticmethod
    def _due(interval: int | None, done: int) -> bool:
        return interval is not None and done % interval == 0

    def _write(self, kind: str, step: int, metrics: dict[str, float], message: str) -> None:
        self._ports.journal.write(kind, step, metrics, message)
