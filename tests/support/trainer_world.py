"""A run's outside for tests of the trainer's core: buffer, ranks, engines and checkpoints in memory.

What survives a trainer's death (the buffer's state, files, engines) is kept in the `World`; ranks are made anew. The
world counts awaited calls, so that a test can let the trainer die before or after any of them.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import Code, ServiceError
from services.common.records import SampleStatus
from services.common.run_spec import RunSpec
from services.trainer.core import commands
from services.trainer.core.buckets import TensorSpec, plan_buckets
from services.trainer.core.loop import Ports
from services.trainer.core.ports import CheckpointMarker, RanksFailed
from services.trainer.core.progress import Progress
from services.trainer.core.records import (
    Batch,
    EngineState,
    EngineView,
    GroupCounts,
    Run,
    SampleHeader,
    Session,
)
from services.trainer.core.settings import LoopSettings
from tests.support.trainer_journal import MemoryJournal
from tests.support.trainer_rollout import MemoryRollout

WEIGHTS = (TensorSpec("a", "float32", (4,)), TensorSpec("b", "float32", (8,)), TensorSpec("c", "float32", (2,)))
SETTINGS = LoopSettings(
    buffer_address="buffer:1",
    address="127.0.0.1",
    device="cpu",
    setup_timeout=5.0,
    step_timeout=5.0,
    save_timeout=5.0,
    engines_timeout=2.0,
    eval_timeout=2.0,
    take_wait=0.01,
)


class Crash(Exception):
    """The trainer process dies here."""


def make_spec(tmp_path: Any, *, steps: int = 4, batch: int = 2, samples: int = 2, **changes: dict) -> RunSpec:
    """A run of a few steps; `changes` by group."""
    groups: dict[str, Any] = {
        "run_id": "r",
        "run_dir": str(tmp_path),
        "data": {"prompt_data": "p.jsonl", "label_key": "label", "eval_prompt_data": ["held", "e.jsonl"]},
        "rollout": {
            "hf_checkpoint": "hf",
            "num_rollout": steps,
            "rollout_batch_size": batch,
            "n_samples_per_prompt": samples,
        },
        "trainer": {"save": str(tmp_path / "save"), "batch_timeout": 1.0, "update_timeout": 2.0},
    }
    for group, keys in changes.items():
        groups[group] |= keys
    return RunSpec.model_validate(groups)


@dataclass
class World:
    """Everything that outlives a trainer."""

    spec: RunSpec
    state: str = "ACTIVE"
    reason: str = ""
    epoch: int = 0
    committed: int = -1
    checkpoint: tuple[int, str] = (-1, "")
    consumed: dict[int, int] = field(default_factory=dict)
    """Ordinal → step."""
    reserved: list[int] = field(default_factory=list)
    prompts: int = 1000
    supply: int = 1000
    """Groups that rollout makes ready in all."""
    version: int = 0
    published: int = 0
    published_by: int = 0
    files: dict[str, tuple[int, list]] = field(default_factory=dict)
    latest: dict[str, str] = field(default_factory=dict)
    markers: dict[str, CheckpointMarker] = field(default_factory=dict)
    engines: dict[str, EngineView] = field(default_factory=dict)
    held: dict[str, tuple[int, list]] = field(default_factory=dict)
    """Engine → (version, history of the weights it holds)."""
    problem: str = ""
    full_at: tuple[int, ...] = ()
    """Steps done at which the disk refuses a checkpoint."""
    calls: int = 0
    crash_at: int | None = None
    log: list[str] = field(default_factory=list)
    faults: dict[tuple[str, str], ServiceError] = field(default_factory=dict)
    """(call, engine) → error of that call."""

    def __post_init__(self) -> None:
        for number in range(self.spec.rollout.engine_count):
            self.add_engine(f"n-{number}")

    def add_engine(self, engine_id: str) -> None:
        """A fresh engine: up, without a verified version."""
        self.engines[engine_id] = EngineView(engine_id, "n:1", "i1", EngineState.STALE, 1, 0, ("gloo",))

    def tick(self, what: str = "") -> None:
        """A point at which the trainer may die."""
        if what:
            self.log.append(what)
        self.calls += 1
        if self.calls == self.crash_at:
            raise Crash(what or self.log[-1])

    def run_record(self) -> Run:
        """The run as the buffer tells it."""
        spec, active = self.spec.model_dump_json(), self.state == "ACTIVE"
        return Run("r", active, self.state, self.reason, self.committed, *self.checkpoint, self.published, spec)

    def ports(self, progress: Progress) -> tuple[Ports, MemoryRanks]:
        """The outside of a new trainer process."""
        ranks = MemoryRanks(self)
        return Ports(MemoryBuffer(self), ranks, MemoryRollout(self), MemoryFiles(self), MemoryJournal(progress)), ranks


class MemoryBuffer:
    """The buffer's contract towards the trainer, over unlimited prompts."""

    def __init__(self, world: World) -> None:
        self.world = world

    def _check(self, epoch: int) -> None:
        if epoch != self.world.epoch:
            raise ServiceError(Code.FAILED_PRECONDITION, "FENCED", "A newer trainer holds run r.")

    async def get_run(self, run_id: str) -> Run:
        if run_id != "r":
            raise ServiceError(Code.NOT_FOUND, "RUN_NOT_FOUND", f"Run {run_id} is not known.")
        return self.world.run_record()

    async def active_runs(self) -> list[Run]:
        return [self.world.run_record()] if self.world.state == "ACTIVE" else []

    async def begin_session(self, run_id: str) -> Session:
        self.world.tick("begin_session")
        self.world.epoch += 1
        self.world.tick()
        return Session(self.world.epoch, self.world.run_record())

    async def finish_run(self, run_id: str, epoch: int, state: str, reason: str) -> Run:
        self._check(epoch)
        if self.world.state == "ACTIVE":
            self.world.state, self.world.reason = state, reason
        return self.world.run_record()

    async def take_batch(self, run_id: str, epoch: int, step: int, group_count: int, max_wait: float) -> Batch | None:
        world = self.world
        world.tick("take_batch")
        self._check(epoch)
        supervised = world.spec.trainer.loss_type == "sft_loss"
        assert supervised or world.published_by == epoch, "weights are pushed before a batch is taken"
        assert step == world.committed + 1, "steps are taken in order"
        if not world.reserved:
            free = [o for o in range(world.prompts) if o not in world.consumed]
            if len(free) < group_count:
                raise ServiceError(Code.FAILED_PRECONDITION, "DATA_EXHAUSTED", "The data of run r has ended.")
            if len(world.consumed) + group_count > world.supply:
                await asyncio.sleep(max_wait)
                return None
            world.reserved = free[:group_count]
        world.tick()
        return self._manifest()

    def _manifest(self) -> Batch:
        version = self.world.published
        count = self.world.spec.rollout.n_samples_per_prompt
        samples = [
            SampleHeader(f"{o}:{i}", f"{o}", 3, 5, 5, float(i), version, version, SampleStatus.COMPLETED)
            for o in self.world.reserved
            for i in range(count)
        ]
        return Batch(tuple(samples), 0, 0, version)

    async def commit_step(self, run_id: str, epoch: int, step: int) -> int:
        world = self.world
        world.tick("commit_step")
        self._check(epoch)
        if step != world.committed + 1:
            raise ServiceError(Code.FAILED_PRECONDITION, "STEP_OUT_OF_ORDER", f"Step {step} does not come next.")
        world.consumed |= dict.fromkeys(world.reserved, step)
        world.reserved, world.committed = [], step
        world.tick()
        return len(world.consumed)

    async def record_checkpoint(self, run_id: str, epoch: int, step: int, path: str) -> None:
        self.world.tick("record_checkpoint")
        self._check(epoch)
        assert path in self.world.files, "a checkpoint is recorded after it was written"
        assert step <= self.world.committed
        self.world.checkpoint = (step, path)
        self.world.tick()

    async def restore_run(self, run_id: str, epoch: int, step: int) -> tuple[int, int]:
        world = self.world
        world.tick("restore_run")
        self._check(epoch)
        if step > world.committed or step < world.checkpoint[0]:
            raise ServiceError(Code.FAILED_PRECONDITION, "STEP_NOT_RESTORABLE", f"Step {step} cannot be restored.")
        given = [o for o, s in world.consumed.items() if s > step]
        for ordinal in given:
            del world.consumed[ordinal]
        world.reserved, world.committed = [], step
        world.tick()
        return len(given), 0

    async def reserve_version(self, run_id: str, epoch: int) -> int:
        self.world.tick("reserve_version")
        self._check(epoch)
        self.world.version += 1
        self.world.tick()
        return self.world.version

    async def publish_version(self, run_id: str, epoch: int, version: int, step_count: int) -> None:
        world = self.world
        world.tick("publish_version")
        self._check(epoch)
        if version == world.published and world.published_by == epoch:
            assert step_count == world.committed + 1, "the present version again: after one more step"
            return
        assert version > world.published, "versions only grow"
        assert any(held[0] == version for held in world.held.values()), "an engine serves what is published"
        world.published, world.published_by = version, epoch
        world.tick()

    async def group_rows(self, run_id: str, group_ids: list[str], step: int) -> list[dict[str, Any]]:
        self.world.tick("group_rows")
        assert group_ids == [str(ordinal) for ordinal in self.world.reserved], "tokens are kept until the commit"
        return [{"group_id": group_id, "step": step} for group_id in group_ids]

    async def counts(self, run_id: str) -> GroupCounts:
        return GroupCounts(1, 2, 3, 0, len(self.world.consumed), {"STALE": 4})


class MemoryRanks:
    """Ranks whose weights are the list of what they were trained on."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.history: list[str] | None = None
        self.steps = 0
        self.failure: RanksFailed | None = None
        self.staged: list[str] | None = None
        self.groups: set[str] = set()
        self.joined: list[str] = []  # ever, in order
        self.busy = False
        self.stopped = False
        self.errors: dict[str, str] = {}  # by group
        self.die_in: dict[str, RanksFailed] = {}
        self.updates: list[bool] = []  # by step
        self.staged_as: list[int] = []  # versions

    async def start(self) -> None:
        self.world.tick("ranks.start")

    async def stop(self) -> None:
        self.stopped = True

    async def call_all(self, command: Any, timeout: float) -> list[Any]:
        return [await self.call(0, command, timeout)]

    async def call(self, rank: int, command: Any, timeout: float) -> Any:
        name = type(command).__name__
        if self.failure:
            raise self.failure
        aside = isinstance(command, commands.ASIDE)
        assert aside or not self.busy, f"{name} while another command runs"
        self.busy = self.busy or not aside
        try:
            self.world.tick(name)
            await asyncio.sleep(0)
            if name in self.die_in:
                self.failure = self.die_in[name]
                raise self.failure
            value = getattr(self, f"_{name}")(command)
            self.world.tick()
            return value
        finally:
            self.busy = self.busy and aside

    def _Setup(self, command: commands.Setup) -> commands.SetupResult:
        self.history = []
        return commands.SetupResult("2.13", "", ("gloo",), {}, 14, 1, 0, 1, 0.0)

    def _Load(self, command: commands.Load) -> commands.LoadResult:
        if command.path not in self.world.files:
            self.failure = RanksFailed(0, f"Rank 0 failed in Load: {command.path} is not there.", answered=True)
            raise self.failure
        assert command.new_run == (command.path == self.world.spec.trainer.load), "only `load` is another run's"
        self.steps, history = self.world.files[command.path]
        self.history = copy.copy(history)
        return commands.LoadResult(self.steps, self.steps)

    def _TrainStep(self, command: commands.TrainStep) -> commands.TrainResult:
        assert command.step == self.steps, "steps follow each other"
        assert self.history is not None
        self.history += command.plan.sample_ids(0)
        self.updates.append(command.update)
        self.steps += 1
        return commands.TrainResult({"loss": 0.5, "total_tokens": 32.0}, {"total": 0.01, "fetch": 0.002})

    def _SaveCheckpoint(self, command: commands.SaveCheckpoint) -> commands.SaveResult:
        assert command.step_count == self.steps
        path = f"{command.path}/step_{command.step_count:06d}"
        if command.step_count in self.world.full_at:
            return commands.SaveResult(command.path, 0.01, f"{path} could not be written: the disk is full")
        self.world.files[path] = (self.steps, list(self.history or []))
        self.world.tick()
        self.world.latest[command.path] = path
        return commands.SaveResult(path, 0.01)

    def _ExportHf(self, command: commands.ExportHf) -> commands.ExportResult:
        return commands.ExportResult(command.path, 56)

    def _StageWeights(self, command: commands.StageWeights) -> Any:
        self.staged = list(self.history or [])
        self.staged_as.append(command.version)
        return plan_buckets(WEIGHTS, 16)

    def _Checksums(self, command: commands.Checksums) -> dict[str, str]:
        return {name: f"sum of {len(self.staged or [])}" for name in command.rules}

    def _JoinGroups(self, command: commands.JoinGroups) -> None:
        self.groups |= {group.name for group in command.groups}
        self.joined += [group.name for group in command.groups]

    def _SendWeights(self, command: commands.SendWeights) -> None:
        assert self.staged is not None, "weights are staged before they are sent"
        assert set(command.group_names) <= self.groups, "they go to groups that were joined"

    def _GroupErrors(self, command: commands.GroupErrors) -> dict[str, str | None]:
        return {name: self.errors.get(name) for name in command.group_names}

    def _LeaveGroups(self, command: commands.LeaveGroups) -> None:
        self.groups -= set(command.group_names)


class MemoryFiles:
    """Checkpoint directories."""

    def __init__(self, world: World) -> None:
        self.latest, self.marker, self.mark = world.latest.get, world.markers.get, world.markers.__setitem__
        self.check_export = lambda directory: None
