"""The controller: attempts, restarts, stops, refusals."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from services.common.errors import ServiceError
from services.trainer.core.controller import Factories, TrainerController
from services.trainer.core.ports import RanksFailed
from services.trainer.core.progress import Phase
from tests.support.trainer_world import (
    SETTINGS,
    MemoryBuffer,
    MemoryFiles,
    MemoryJournal,
    MemoryRanks,
    MemoryRollout,
    World,
    make_spec,
)


class Trainer:
    """A controller over a world. `ranks` are those it made; `break_ranks(ranks)` is called on each new set."""

    def __init__(self, world: World, break_ranks=lambda number, ranks: None) -> None:
        self.world = world
        self.ranks: list[MemoryRanks] = []

        def make(spec, run_dir) -> MemoryRanks:
            made = MemoryRanks(world)
            break_ranks(len(self.ranks), made)
            self.ranks.append(made)
            return made

        factories = Factories(ranks=make, journal=MemoryJournal, device=lambda setting: "cpu")
        self.controller = TrainerController(
            MemoryBuffer(world), MemoryRollout(world), MemoryFiles(world), factories, lambda device: SETTINGS
        )

    async def until_ended(self):
        """Progress of run r after its end."""
        progress = self.controller.progress("r")
        for _ in range(500):
            if progress.ended:
                return progress
            await progress.wait_change(0.02)
        raise AssertionError(f"the run is still in {progress.phase.name}")


def died(command: str):
    """Breaks every set of ranks in one command."""

    def broken(number: int, ranks: MemoryRanks) -> None:
        ranks.die_in[command] = RanksFailed(0, f"Rank 0 was ended by signal 9 in {command}.", answered=False)

    return broken


async def test_a_run_from_start_to_end(tmp_path):
    trainer = Trainer(World(make_spec(tmp_path)))
    progress = await trainer.controller.start_run("r")
    assert progress.phase is Phase.LOADING
    assert (await trainer.controller.start_run("r")) is progress, "starting twice is starting once"
    progress = await trainer.until_ended()
    assert progress.succeeded
    assert progress.step_count == 4
    assert trainer.world.state == "FINISHED"
    assert all(ranks.stopped for ranks in trainer.ranks)


async def test_two_runs_in_sequence(tmp_path):
    world = World(make_spec(tmp_path, trainer={"save_interval": 2}))
    trainer = Trainer(world)
    await trainer.controller.start_run("r")
    await trainer.until_ended()
    with pytest.raises(ServiceError, match="ended as FINISHED") as caught:
        await trainer.controller.start_run("r")
    assert caught.value.reason == "RUN_FINISHED"
    world.state, world.spec = "ACTIVE", make_spec(tmp_path, steps=6, trainer={"save_interval": 2})
    await trainer.controller.start_run("r")
    progress = await trainer.until_ended()
    assert progress.step_count == 6
    assert len(trainer.ranks) == 2


async def test_dead_ranks_start_anew_from_the_checkpoint(tmp_path):
    world = World(make_spec(tmp_path, trainer={"save_interval": 1}))

    def broken(number: int, ranks: MemoryRanks) -> None:
        if number == 0:
            original = ranks._TrainStep

            def train(command):
                if command.step == 2:
                    ranks.failure = RanksFailed(0, "Rank 0 was ended by signal 9.", answered=False)
                    raise ranks.failure
                return original(command)

            ranks._TrainStep = train

    trainer = Trainer(world, broken)
    await trainer.controller.start_run("r")
    progress = await trainer.until_ended()
    assert progress.succeeded
    assert len(trainer.ranks) == 2
    assert trainer.ranks[1].history == [f"{group}:{index}" for group in range(8) for index in range(2)]
    assert any("start anew from the last checkpoint" in event.message for event in progress.events)


async def test_a_store_that_forgot_steps_takes_the_run_back_to_the_checkpoint_it_remembers(tmp_path):
    world = World(make_spec(tmp_path, trainer={"save_interval": 1}))

    def power_loss(number: int, ranks: MemoryRanks) -> None:
        original = ranks._TrainStep

        def train(command):
            if number == 0 and command.step == 2:
                world.committed = 0
                world.checkpoint = (0, next(path for path, (steps, _) in world.files.items() if steps == 1))
                world.consumed = {ordinal: step for ordinal, step in world.consumed.items() if step == 0}
            return original(command)

        ranks._TrainStep = train

    trainer = Trainer(world, power_loss)
    await trainer.controller.start_run("r")
    progress = await trainer.until_ended()
    assert progress.succeeded
    assert len(trainer.ranks) == 2
    assert Counter(trainer.ranks[1].history) == Counter(f"{group}:{index}" for group in range(8) for index in range(2))
    assert any("goes back to the checkpoint that the buffer remembers" in event.message for event in progress.events)


async def test_ranks_that_always_die_end_the_run_with_the_cause(tmp_path):
    trainer = Trainer(World(make_spec(tmp_path)), died("TrainStep"))
    await trainer.controller.start_run("r")
    progress = await trainer.until_ended()
    assert not progress.succeeded
    assert "failed 3 times without a step in between" in progress.reason
    assert "signal 9 in TrainStep" in progress.reason
    assert len(trainer.ranks) == 3
    assert trainer.world.state == "FAILED"
    assert trainer.world.reason == progress.reason


async def test_a_model_that_cannot_be_loaded_is_not_tried_again(tmp_path):
    def broken(number: int, ranks: MemoryRanks) -> None:
        ranks.die_in["Setup"] = RanksFailed(0, "Rank 0 failed in Setup: no config.json in hf.", answered=True)

    trainer = Trainer(World(make_spec(tmp_path)), broken)
    await trainer.controller.start_run("r")
    progress = await trainer.until_ended()
    assert "no config.json in hf" in progress.reason
    assert len(trainer.ranks) == 1


async def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_checkpoint(tmp_path):
    world = World(make_spec(tmp_path, trainer={"save_interval": 1}))

    def broken(number: int, ranks: MemoryRanks) -> None:
        original = ranks._TrainStep

        def train(command):
            if command.step < 2:
                return original(command)
            text = (
                "Rank 0 failed in TrainStep: The loss of optimizer step 2 is infinite or not a number for sample 4:1."
            )
            ranks.failure = RanksFailed(0, text, answered=True, cause="LOSS_NOT_FINITE")
            raise ranks.failure

        ranks._TrainStep = train

    trainer = Trainer(world, broken)
    await trainer.controller.start_run("r")
    progress = await trainer.until_ended()
    assert "not a number for sample 4:1" in progress.reason
    assert len(trainer.ranks) == 1, "the same would happen again"
    assert world.state == "FAILED"
    assert world.checkpoint[0] == 1
    assert world.checkpoint[1] in world.files


async def test_a_newer_trainer_takes_the_run_over_quietly(tmp_path):
    world = World(make_spec(tmp_path))
    world.supply = 4
    older, newer = Trainer(world), Trainer(world)
    await older.controller.start_run("r")
    while world.committed < 1:
        await asyncio.sleep(0.01)
    await newer.controller.start_run("r")
    progress = await older.until_ended()
    assert "a newer trainer holds the run" in progress.reason
    assert world.state == "ACTIVE"
    world.supply = 100
    assert (await newer.until_ended()).succeeded


async def test_stop_run_waits_saves_and_says_so(tmp_path):
    world = World(make_spec(tmp_path))
    world.supply = 4
    trainer = Trainer(world)
    await trainer.controller.start_run("r")
    while world.committed < 1:
        await asyncio.sleep(0.01)
    progress = await trainer.controller.stop_run("r", 5.0)
    assert progress.ended
    assert world.state == "STOPPED"
    assert world.checkpoint[0] == 1


async def test_shutdown_leaves_the_run_to_the_next_trainer(tmp_path):
    world = World(make_spec(tmp_path))
    world.supply = 4
    trainer = Trainer(world)
    await trainer.controller.start_run("r")
    while world.committed < 1:
        await asyncio.sleep(0.01)
    await trainer.controller.shutdown(5.0)
    assert world.state == "ACTIVE"
    assert world.checkpoint[0] == 1
    world.supply = 100
    successor = Trainer(world)
    assert await successor.controller.resume_newest()
    assert (await successor.until_ended()).succeeded


async def test_refusals(tmp_path):
    world = World(make_spec(tmp_path))
    world.supply = 0
    trainer = Trainer(world)
    with pytest.raises(ServiceError) as unknown:
        await trainer.controller.start_run("other")
    assert unknown.value.reason == "RUN_NOT_FOUND"
    with pytest.raises(ServiceError, match="has not been asked to start run r"):
        trainer.controller.progress("r")
    assert trainer.controller.progress("").phase is Phase.IDLE
    await trainer.controller.start_run("r")
    with pytest.raises(ServiceError) as busy:
        await trainer.controller.start_run("other")
    assert busy.value.reason == "BUSY"
    await trainer.controller.stop_run("r", 5.0)


async def test_export_of_a_run_that_ended_uses_its_checkpoint(tmp_path):
    world = World(make_spec(tmp_path))
    trainer = Trainer(world)
    with pytest.raises(ServiceError, match="has no checkpoint"):
        await trainer.controller.export("r", "/out")
    await trainer.controller.start_run("r")
    await trainer.until_ended()
    assert await trainer.controller.export("r", "/out") == ("/out", 4)
    assert trainer.ranks[-1].history == trainer.ranks[0].history
    assert trainer.ranks[-1].stopped


async def test_export_while_a_run_goes_on(tmp_path):
    world = World(make_spec(tmp_path))
    world.supply = 4
    trainer = Trainer(world)
    await trainer.controller.start_run("r")
    while world.committed < 1:
        await asyncio.sleep(0.01)
    assert await trainer.controller.export("r", "/out") == ("/out", 2)
    await trainer.controller.stop_run("r", 5.0)
