"""The ranks of an actor and of its critic as one set of ranks, for a loop that knows of one.

Two worlds of processes: they share no communicator, no layout and no device, only what passes through here. A step:
the critic's values of the batch → the actor's step, in which advantages are taken against them → the returns it found,
on which the critic is trained. Implements `ports.Ranks`.

Invariants: what ends one ends both, as soon as it is known; a checkpoint holds both, of the same step, or there is none
(the critic's part is written first and joined in by the rename that makes the whole visible); both are loaded from the
same directory, and refused when they disagree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from services.common.fault_points import reach_async
from services.trainer.core.commands import (
    Command,
    ComputeValues,
    Load,
    LoadResult,
    SaveCheckpoint,
    SaveResult,
    Setup,
    TrainCritic,
    TrainResult,
    TrainStep,
    ValuesResult,
)
from services.trainer.core.ports import RanksFailed, WatchedRanks


class ActorCritic:
    """Both as `ports.Ranks`; a rank's number is an actor's.

    Args:
        actor, critic: not started.
    """

    def __init__(self, actor: WatchedRanks, critic: WatchedRanks) -> None:
        self._actor, self._critic = actor, critic

    @property
    def failure(self) -> RanksFailed | None:
        """Why they cannot be used any more; None while they can."""
        return self._actor.failure or self._critic.failure

    async def start(self) -> None:
        """Starts all processes. Raises RanksFailed."""
        await self._both(self._actor.start(), self._critic.start())

    async def stop(self) -> None:
        """Ends all processes."""
        await asyncio.gather(self._actor.stop(), self._critic.stop())

    async def call(self, rank: int, command: Command, timeout: float) -> Any:
        """An actor's answer. Raises RanksFailed."""
        return await self._watched(self._actor.call(rank, command, timeout))

    async def call_all(self, command: Command, timeout: float) -> list[Any]:
        """The actor's answers by rank. Raises RanksFailed."""
        if isinstance(command, Setup):
            critic = self._critic.call_all(replace(command, critic=True), timeout)
            return (await self._both(self._actor.call_all(command, timeout), critic))[0]
        if isinstance(command, Load):
            return await self._load(command, timeout)
        if isinstance(command, TrainStep):
            return await self._train(command, timeout)
        if isinstance(command, SaveCheckpoint):
            return await self._save(command, timeout)
        return await self._watched(self._actor.call_all(command, timeout))

    async def _load(self, command: Load, timeout: float) -> list[LoadResult]:
        results, critic = await self._both(
            self._actor.call_all(command, timeout), self._critic.call_all(command, timeout)
        )
        if critic[0].step_count != results[0].step_count:
            text = f"the actor of {command.path} has {results[0].step_count} steps, its critic {critic[0].step_count}"
            raise RanksFailed(0, f"{text}; they are of different checkpoints.", answered=True)
        return results

    async def _train(self, command: TrainStep, timeout: float) -> list[TrainResult]:
        assert command.critic_plan, "the batch is dealt to the critic too"
        asked = ComputeValues(
            command.step, command.run_id, command.buffer_address, command.critic_plan, command.advantages
        )
        found: list[ValuesResult] = await self._watched(self._critic.call_all(asked, timeout))
        await reach_async("critic.valued")
        told = replace(command, values=_union([result.values for result in found]), critic_plan=None)
        results: list[TrainResult] = await self._watched(self._actor.call_all(told, timeout))
        await reach_async("critic.before_training")
        returns = TrainCritic(command.step, _union([result.returns for result in results]))
        trained: list[TrainResult] = await self._watched(self._critic.call_all(returns, timeout))
        seconds = {"critic_values": _slowest(found), "critic_train": _slowest(trained)}
        first = results[0]
        merged = replace(first, metrics={**first.metrics, **trained[0].metrics}, seconds={**first.seconds, **seconds})
        return [replace(result, returns={}) for result in (merged, *results[1:])]

    async def _save(self, command: SaveCheckpoint, timeout: float) -> list[SaveResult]:
        part: list[SaveResult] = await self._watched(self._critic.call_all(command, timeout))
        if part[0].problem:
            return part
        await reach_async("critic.saved")
        whole = await self._watched(self._actor.call_all(replace(command, with_critic=True), timeout))
        return [replace(result, seconds=result.seconds + part[0].seconds) for result in whole]

    async def _both(self, actor: Coroutine, critic: Coroutine) -> list[Any]:
        """Both results; the first failure ends both."""
        works = [asyncio.ensure_future(self._watched(work)) for work in (actor, critic)]
        try:
            return list(await asyncio.gather(*works))
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _watched(self, work: Coroutine) -> Any:
        """Result of `work`, unless ranks of either side fail first, those too that have nothing to do with it."""
        if self.failure:
            work.close()
            raise self.failure
        task = asyncio.ensure_future(work)
        watches = [asyncio.ensure_future(ranks.failed()) for ranks in (self._actor, self._critic)]
        try:
            await asyncio.wait([task, *watches], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise next(watch.result() for watch in watches if watch.done())
        finally:
            for waiting in (task, *watches):
                waiting.cancel()
            await asyncio.gather(task, *watches, return_exceptions=True)


def _union(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Every sample's numbers, from the rank that had it."""
    return {sample_id: numbers for part in parts for sample_id, numbers in part.items()}


def _slowest(results: Sequence[ValuesResult | TrainResult]) -> float:
    return max(result.seconds["total"] for result in results)
