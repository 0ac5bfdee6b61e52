"""Rank 0 of a trainer without a model: the real groups, staged buckets and checksums, over tensors that a test gives.

In this process, as `services.trainer.core.ports.Ranks`. `alter` is the test's hand in the wire: what goes out over a
group may be other bytes than those that were staged and whose checksums are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from services.common.process import free_port
from services.trainer.core import commands
from services.trainer.core.buckets import TensorSpec, plan_buckets
from services.trainer.core.ports import Rollout
from services.trainer.core.weights import UpdateSettings, WeightUpdater
from services.trainer.ranks.groups import WeightGroups
from services.trainer.ranks.weights import StagedWeights

SETUP = commands.SetupResult(torch.__version__, "", ("gloo",), {}, 0, 1, 0, 1, 0.0)
Tensors = dict[str, torch.Tensor]


@dataclass
class Altered:
    """Buckets that are not those that were staged: a `groups.Source`."""

    buckets: list[torch.Tensor]

    def gathered(self, index: int) -> bool:
        return True

    def mark(self, index: int) -> None:
        return None


class WeightRank:
    """The rank.

    Args:
        tensors: what the next StageWeights stages.
    """

    failure = None

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.groups = WeightGroups(torch.device("cpu"))
        self.alter: Callable[[str, StagedWeights], Any] | None = None
        """Group and staged weights → what is sent over it."""
        self.staged: StagedWeights | None = None

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self.groups.leave_all()

    async def call_all(self, command: Any, timeout: float) -> list[Any]:
        return [await self.call(0, command, timeout)]

    async def call(self, rank: int, command: Any, timeout: float) -> Any:
        return await asyncio.to_thread(getattr(self, f"_{type(command).__name__}"), command)

    def _StageWeights(self, command: commands.StageWeights) -> commands.BucketPlan:
        specs = [
            TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]
        plan = plan_buckets(specs, command.bucket_bytes)
        sizes = [sum(spec.size_bytes for spec in bucket) for bucket in plan.buckets]
        self.staged = StagedWeights(plan, [torch.empty(size, dtype=torch.uint8) for size in sizes])
        for index, bucket in enumerate(plan.buckets):
            for spec in bucket:
                self.staged.view(spec).copy_(self.tensors[spec.name])
            self.staged.filled(index)
        return plan

    def _Checksums(self, command: commands.Checksums) -> dict[str, str]:
        return self.staged.checksums(command.rules, command.algorithm)

    def _JoinGroups(self, command: commands.JoinGroups) -> None:
        self.groups.join(command.groups, command.timeout)

    def _SendWeights(self, command: commands.SendWeights) -> None:
        for name in command.group_names:
            source = self.alter(name, self.staged) if self.alter else self.staged
            self.groups.send(source, [name], command.timeout)

    def _GroupErrors(self, command: commands.GroupErrors) -> dict[str, str | None]:
        return self.groups.errors(command.group_names)

    def _LeaveGroups(self, command: commands.LeaveGroups) -> None:
        self.groups.leave(command.group_names)


def altered(change: Callable[[StagedWeights], None]) -> Callable[[str, StagedWeights], Altered | StagedWeights]:
    """For `WeightRank.alter`: the first engine is sent a copy that `change` was at, the others what was staged."""

    def alter(group: str, staged: StagedWeights) -> Altered | StagedWeights:
        if not group.endswith("-0"):
            return staged
        copy = StagedWeights(staged.plan, [bucket.clone() for bucket in staged.buckets])
        change(copy)
        return Altered(copy.buckets)

    return alter


def updater(rank: WeightRank, rollout: Rollout, run_id: str, session: int, **changes: Any) -> WeightUpdater:
    """The real updater over a rank."""
    values = {
        "run_id": run_id,
        "session_epoch": session,
        "bucket_bytes": 100_000,
        "group_size": 1,
        "timeout": 30.0,
        "join_timeout": 30.0,
        "stage_timeout": 30.0,
        "address": "127.0.0.1",
        "free_port": free_port,
    }
    return WeightUpdater(rank, rollout, SETUP, UpdateSettings(**(values | changes)))
