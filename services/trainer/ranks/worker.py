"""Carries out commands: one method per command, in terms of this package's parts. Knows nothing of sockets.

The commands of `commands.ASIDE` may come on any thread at any time; the others come one at a time, and find the
weights gathered that an earlier one staged.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from services.common.devices import COLLECTIVE_VARIABLES
from services.common.errors import Code, ServiceError
from services.common.records import Sample
from services.common.run_spec import RunSpec
from services.trainer.core import commands
from services.trainer.core.critic import critic_spec
from services.trainer.ranks import runtime
from services.trainer.ranks.timing import PartTimer

if TYPE_CHECKING:
    from services.trainer.ranks.critic import CriticTrainer


class RankWorker:
    """State of a rank between commands. Modules that import megatron are imported in `Setup` or later, when the
    process has been prepared for its device."""

    def __init__(self, rank: int, world_size: int, master_address: str, master_port: int) -> None:
        self._rank, self._world = rank, (rank, world_size, master_port, master_address)
        self._step_count = 0
        self._ready = False
        self._staging = None
        self._staged = None
        self._critic: CriticTrainer | None = None
        self._handlers: dict[type, Callable] = {
            commands.Setup: self._setup,
            commands.Load: self._load,
            commands.TrainStep: self._train_step,
            commands.ComputeValues: self._compute_values,
            commands.TrainCritic: self._train_critic,
            commands.ListWeights: self._list_weights,
            commands.StageWeights: self._stage_weights,
            commands.Checksums: self._checksums,
            commands.JoinGroups: lambda c: self._groups.join(c.groups, c.timeout),
            commands.SendWeights: lambda c: self._groups.send(self._need_staged(), c.group_names, c.timeout),
            commands.GroupErrors: lambda c: self._groups.errors(c.group_names),
            commands.LeaveGroups: lambda c: self._groups.leave(c.group_names),
            commands.WriteFiles: lambda c: self._files.begin(self._need_staged(), c),
            commands.FilesWritten: lambda c: self._files.state,
            commands.ReleaseWeights: self._release_weights,
            commands.SaveCheckpoint: self._save_checkpoint,
            commands.ExportHf: self._export_hf,
            commands.Shutdown: self._shutdown,
        }

    def execute(self, command: commands.Command) -> commands.Result | commands.Failure:
        """Answer of a command; never raises."""
        try:
            self._check_order(command)
            if self._staging is not None and not isinstance(command, commands.ASIDE):
                staging, self._staging = self._staging, None
                staging.finish()
            return commands.Result(self._handlers[type(command)](command))
        except ServiceError as error:
            return commands.Failure(error.message, traceback.format_exc(), error.reason)
        except Exception as error:
            lines = str(error).strip().splitlines() or ["no message"]
            text = f"Rank {self._rank} failed in {type(command).__name__}: {type(error).__name__}: {lines[0]}"
            return commands.Failure(text, traceback.format_exc())

    def _check_order(self, command: commands.Command) -> None:
        if not self._ready and not isinstance(command, (commands.Setup, commands.Shutdown)):
            raise _wrong_order(f"{type(command).__name__} before Setup")

    def _setup(self, command: commands.Setup) -> commands.SetupResult:
        if self._ready:
            raise _wrong_order("Setup was sent twice")
        start = time.perf_counter()
        spec = RunSpec.model_validate_json(command.spec_json)
        if command.critic:
            spec = critic_spec(spec)
        trainer = spec.trainer
        layout = runtime.Layout(
            *self._world[:3], trainer.tensor_model_parallel_size, self._world[3], trainer.context_parallel_size
        )
        self._device = runtime.start(layout, command.device, spec.trainer.seed)
        from megatron.core import parallel_state

        from services.checksums import compute
        from services.trainer.ranks import policy as policies
        from services.trainer.ranks.critic import CriticTrainer
        from services.trainer.ranks.fetch import SampleSource
        from services.trainer.ranks.groups import WeightGroups
        from services.trainer.ranks.train import StepTrainer
        from services.trainer.ranks.weight_files import VersionFiles

        self._spec = spec
        self._policy = policies.build_policy(spec, self._device, values=command.critic)
        if command.critic:
            self._critic = CriticTrainer(spec, self._policy, self._device)
        else:
            policies.add_companions(spec, self._policy, self._device)
            self._trainer = StepTrainer(spec, self._policy, self._device)
        self._source = SampleSource(() if command.critic else spec.trainer.side_payloads)
        self._groups = WeightGroups(self._device)
        self._files = VersionFiles()
        compute.prepare(self._device)
        self._ready = True
        cuda = command.device == "cuda"
        return commands.SetupResult(
            torch_version=torch.__version__,
            nccl_version=".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
            backends=("nccl", "gloo") if cuda else ("gloo",),
            collective_env={k: os.environ[k] for k in COLLECTIVE_VARIABLES if cuda and k in os.environ},
            parameter_count=self._policy.parameter_count(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            tensor_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            seconds=time.perf_counter() - start,
        )

    def _load(self, command: commands.Load) -> commands.LoadResult:
        from services.trainer.ranks.checkpoint import load_checkpoint, load_critic

        load = load_critic if self._critic else load_checkpoint
        counters = load(self._policy, command.path, new_run=command.new_run)
        self._step_count = counters.step_count
        return commands.LoadResult(counters.step_count, counters.optimizer_steps)

    def _check_step(self, step: int) -> None:
        if step != self._step_count:
            raise _wrong_order(f"step {step} was asked for, but step {self._step_count} comes next")

    def _fetch(self, command: commands.TrainStep | commands.ComputeValues, timer: PartTimer) -> dict[str, Sample]:
        """This rank's samples."""
        from megatron.core import parallel_state

        with timer.part("fetch"):
            wanted = command.plan.sample_ids(parallel_state.get_data_parallel_rank())
            return self._source.fetch(command.buffer_address, command.run_id, wanted)

    def _compute_values(self, command: commands.ComputeValues) -> commands.ValuesResult:
        self._check_step(command.step)
        timer = PartTimer()
        with timer.part("total"):
            samples = self._fetch(command, timer)
            values = self._need_critic().values(samples, command.plan, command.advantages, timer)
        return commands.ValuesResult(values, timer.seconds)

    def _train_critic(self, command: commands.TrainCritic) -> commands.TrainResult:
        self._check_step(command.step)
        timer = PartTimer()
        with timer.part("total"):
            metrics = self._need_critic().train(command.returns, timer)
        self._step_count += 1
        return commands.TrainResult(metrics, timer.seconds)

    def _need_critic(self) -> CriticTrainer:
        if self._critic is None:
            raise _wrong_order("these are the actor's ranks; send it to the critic's")
        return self._critic

    def _train_step(self, command: commands.TrainStep) -> commands.TrainResult:
        self._check_step(command.step)
        timer = PartTimer()
        with timer.part("total"):
            samples = self._fetch(command, timer)
            work = self._trainer.prepare(samples, command.plan, command.advantages, command.values, timer)
            returns = self._trainer.returns(work)
            metrics = self._trainer.update(work, timer) if command.update else self._trainer.untouched(work)
        self._step_count += 1
        self._policy.beside.end_step(self._policy.model, self._step_count)
        return commands.TrainResult(metrics, timer.seconds, returns)

    def _list_weights(self, _command: commands.ListWeights) -> tuple[commands.TensorSpec, ...]:
        from services.trainer.ranks.model.hf_weights import list_weights

        return list_weights(self._policy.model, self._policy.hf)

    def _stage_weights(self, command: commands.StageWeights) -> commands.BucketPlan | None:
        from services.trainer.ranks.weights import Staging

        self._policy.beside.pushed_as(command.version, self._policy.optimizer_steps)
        # A group that is still sent to, or a file that is written, reads the old bytes: theirs are then left to it.
        before = None if self._groups.at_work or self._files.reads_staged else self._staged
        self._staged = None  # else free the old version before the new one is gathered
        self._staging = Staging(self._policy.model, self._policy.hf, command.bucket_bytes, self._device, before)
        self._staged = self._staging.staged
        return None if self._staged is None else self._staged.plan

    def _need_staged(self):
        staged = self._staged
        if staged is None:
            raise _wrong_order("no weights are staged on this rank; send StageWeights first, and this to rank 0")
        return staged

    def _checksums(self, command: commands.Checksums) -> dict[str, str]:
        return self._need_staged().checksums(command.rules, command.algorithm)

    def _release_weights(self, _command: commands.ReleaseWeights) -> None:
        self._staged = None

    def _save_checkpoint(self, command: commands.SaveCheckpoint) -> commands.SaveResult:
        from services.trainer.ranks.checkpoint import save_checkpoint, save_critic

        if command.step_count != self._step_count:
            raise _wrong_order(f"a checkpoint of {command.step_count} steps, but {self._step_count} were trained")
        start = time.perf_counter()
        try:
            if self._critic:
                path = save_critic(self._policy, command.path, command.step_count)
            else:
                path = save_checkpoint(self._policy, command.path, command.step_count, with_critic=command.with_critic)
        except ServiceError as error:
            if error.reason != "CHECKPOINT_FAILED":
                raise
            return commands.SaveResult(command.path, time.perf_counter() - start, error.message)
        return commands.SaveResult(str(path), time.perf_counter() - start)

    def _export_hf(self, command: commands.ExportHf) -> commands.ExportResult:
        from services.trainer.ranks.export import export_hf

        source = self._spec.rollout.hf_checkpoint
        return commands.ExportResult(command.path, export_hf(self._policy.model, self._policy.hf, source, command.path))

    def _shutdown(self, _command: commands.Shutdown) -> None:
        if self._ready:
            self._groups.leave_all()
            self._source.close()
            self._ready = False
        if dist.is_initialized():
            dist.destroy_process_group()


def _wrong_order(what: str) -> ServiceError:
    return ServiceError(Code.FAILED_PRECONDITION, "COMMAND_OUT_OF_ORDER", f"The command cannot be carried out: {what}.")
