"""An actor's and a critic's ranks as one set: what passes between them, and how the two stay together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.trainer.core import commands
from services.trainer.core.actor_critic import ActorCritic
from services.trainer.core.ports import RanksFailed
from services.trainer.core.schedule import StepPlan

PLAN, CRITIC_PLAN = StepPlan(()), StepPlan(())
STEP = commands.TrainStep(3, "r", "buffer:1", PLAN, {"a": 1.0, "b": 0.0}, critic_plan=CRITIC_PLAN)
VALUES = {"a": np.array([0.5], np.float32), "b": np.array([0.1, 0.2], np.float32)}
RETURNS = {"a": np.array([1.0], np.float32), "b": np.array([0.0, 0.0], np.float32)}


class Side:
    """Ranks that answer as they are told, and write down who was asked what."""

    def __init__(self, name: str, log: list[tuple[str, Any]]) -> None:
        self.name, self.log = name, log
        self.answers: dict[type, list[Any]] = {}
        self.silent: set[type] = set()
        self.failure: RanksFailed | None = None
        self._failed = asyncio.Event()
        self.stopped = False

    def fail(self) -> None:
        """They die."""
        self.failure = RanksFailed(0, f"{self.name} rank 0 was ended by signal 9.", answered=False)
        self._failed.set()

    async def failed(self) -> RanksFailed:
        await self._failed.wait()
        assert self.failure
        return self.failure

    async def start(self) -> None:
        self.log.append((self.name, "start"))

    async def stop(self) -> None:
        self.stopped = True

    async def call(self, rank: int, command: commands.Command, timeout: float) -> Any:
        return (await self.call_all(command, timeout))[rank]

    async def call_all(self, command: commands.Command, timeout: float) -> list[Any]:
        self.log.append((self.name, command))
        if type(command) in self.silent:
            await asyncio.sleep(60)
        return self.answers.get(type(command), [None])


@pytest.fixture
def log() -> list[tuple[str, Any]]:
    return []


@pytest.fixture
def actor(log) -> Side:
    side = Side("actor", log)
    side.answers = {
        commands.TrainStep: [
            commands.TrainResult({"loss": 1.0}, {"total": 1.0}, {"a": RETURNS["a"]}),
            commands.TrainResult({"loss": 1.0}, {"total": 2.0}, {"b": RETURNS["b"]}),
        ],
        commands.Load: [commands.LoadResult(4, 4)],
        commands.SaveCheckpoint: [commands.SaveResult("save/step_000004", 1.0)],
    }
    return side


@pytest.fixture
def critic(log) -> Side:
    side = Side("critic", log)
    side.answers = {
        commands.ComputeValues: [
            commands.ValuesResult({"b": VALUES["b"]}, {"total": 0.5}),
            commands.ValuesResult({"a": VALUES["a"]}, {"total": 0.25}),
        ],
        commands.TrainCritic: [commands.TrainResult({"explained_variance": 0.7}, {"total": 3.0})],
        commands.Load: [commands.LoadResult(4, 4)],
        commands.SaveCheckpoint: [commands.SaveResult("save", 2.0)],
    }
    return side


async def test_a_step_goes_values_actor_returns(actor, critic, log):
    results = await ActorCritic(actor, critic).call_all(STEP, 5.0)
    (who, asked), (_, told), (last, trained) = log
    assert (who, last) == ("critic", "critic")
    assert asked == commands.ComputeValues(3, "r", "buffer:1", CRITIC_PLAN, STEP.advantages)
    assert told == replace(STEP, values=VALUES, critic_plan=None)
    assert trained == commands.TrainCritic(3, RETURNS)
    assert results[0].metrics == {"loss": 1.0, "explained_variance": 0.7}
    assert results[0].seconds == {"total": 1.0, "critic_values": 0.5, "critic_train": 3.0}
    assert not any(result.returns for result in results), "nobody else needs them"


@pytest.mark.parametrize("phase", [commands.ComputeValues, commands.TrainStep, commands.TrainCritic])
@pytest.mark.parametrize("victim", ["actor", "critic"])
async def test_a_death_on_either_side_ends_the_step_at_once(actor, critic, phase, victim):
    for side in (actor, critic):
        side.silent = {phase}
    both = ActorCritic(actor, critic)
    step = asyncio.create_task(both.call_all(STEP, 60.0))
    await asyncio.sleep(0.02)
    (actor if victim == "actor" else critic).fail()
    with pytest.raises(RanksFailed, match=f"{victim} rank 0 was ended by signal 9"):
        await asyncio.wait_for(step, 2.0)
    assert both.failure
    assert both.failure.message.startswith(victim)
    with pytest.raises(RanksFailed, match=victim):
        await both.call(0, commands.ListWeights(), 5.0)


async def test_setup_names_the_critic(actor, critic, log):
    actor.answers[commands.Setup] = ["the actor's"]
    assert await ActorCritic(actor, critic).call_all(commands.Setup("{}", "cpu"), 5.0) == ["the actor's"]
    assert {(name, command.critic) for name, command in log} == {("actor", False), ("critic", True)}


async def test_parts_of_different_steps_are_refused(actor, critic):
    critic.answers[commands.Load] = [commands.LoadResult(3, 3)]
    with pytest.raises(RanksFailed, match="the actor of save/step_000004 has 4 steps, its critic 3") as caught:
        await ActorCritic(actor, critic).call_all(commands.Load("save/step_000004"), 5.0)
    assert caught.value.answered, "the same would happen again"


async def test_the_critics_part_is_written_before_the_whole(actor, critic, log):
    (result,) = await ActorCritic(actor, critic).call_all(commands.SaveCheckpoint("save", 4), 5.0)
    assert log == [
        ("critic", commands.SaveCheckpoint("save", 4)),
        ("actor", commands.SaveCheckpoint("save", 4, with_critic=True)),
    ]
    assert result == commands.SaveResult("save/step_000004", 3.0)


async def test_a_disk_that_refuses_the_critics_part_leaves_the_actor_unasked(actor, critic, log):
    critic.answers[commands.SaveCheckpoint] = [commands.SaveResult("save", 0.1, "the disk is full")]
    (result,) = await ActorCritic(actor, critic).call_all(commands.SaveCheckpoint("save", 4), 5.0)
    assert result.problem == "the disk is full"
    assert [name for name, _ in log] == ["critic"]


async def test_stop_ends_both(actor, critic):
    await ActorCritic(actor, critic).stop()
    assert actor.stopped
    assert critic.stopped
