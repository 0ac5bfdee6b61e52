"""The training loop: order of calls, and a death at every one of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import pytest

from services.common.errors import ServiceError
from services.trainer.core.loop import Outcome, TrainingLoop
from services.trainer.core.progress import Progress
from services.trainer.core.records import EvalResult
from tests.support.trainer_rollout import MemoryRollout
from tests.support.trainer_world import SETTINGS, Crash, MemoryBuffer, MemoryRanks, World, make_spec


async def train(
    world: World, stop: asyncio.Event | None = None, progress: Progress | None = None
) -> tuple[Outcome, MemoryRanks, Progress]:
    """One trainer process over the world, to the end of the run."""
    progress = progress or Progress("r", run_dir=str(Path(world.spec.directory)))
    ports, ranks = world.ports(progress)
    try:
        session = await MemoryBuffer(world).begin_session("r")
        loop = TrainingLoop(session, world.spec, ports, SETTINGS, progress, stop or asyncio.Event())
        return await loop.run(), ranks, progress
    finally:
        await ranks.stop()


def expected_history(world: World) -> list[str]:
    """Every sample of the run's batches once, in order."""
    spec = world.spec.rollout
    groups = range(spec.num_rollout * spec.rollout_batch_size)
    return [f"{group}:{index}" for group in groups for index in range(spec.n_samples_per_prompt)]


KINDS = {
    "synchronous": {"rollout": {"eval_interval": 2, "rollout_num_gpus": 2}, "trainer": {"save_interval": 2}},
    "push every 2nd": {"trainer": {"save_interval": 3, "update_weights_interval": 2, "max_staleness": 1}},
    "no checkpoints": {"trainer": {"save": None}},
    "supervised": {"trainer": {"save_interval": 1, "loss_type": "sft_loss"}},
    "critic first": {"trainer": {"save_interval": 2, "advantage_estimator": "ppo", "num_critic_only_steps": 2}},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_undisturbed_run(tmp_path, kind):
    world = World(make_spec(tmp_path, **KINDS[kind]))
    outcome, ranks, progress = await train(world)
    assert outcome is Outcome.FINISHED
    assert Counter(ranks.history) == Counter(expected_history(world))
    assert [event.step for event in progress.events if event.kind == "step"] == [0, 1, 2, 3]
    assert ranks.groups == set(ranks.joined), "one group an engine serves all updates"
    assert ranks.staged_as == list(range(1, world.version + 1)), "ranks know as which version their weights travel"


async def test_while_only_the_critic_is_trained_no_weights_travel(tmp_path):
    world = World(make_spec(tmp_path, **KINDS["critic first"]))
    _, ranks, progress = await train(world)
    assert ranks.updates == [False, False, True, True]
    assert world.log.count("StageWeights") == world.version == 3, "before the first step, and after the last two"
    assert [event.step for event in progress.events if event.kind == "update_weights"] == [-1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
async def test_death_at_any_call_trains_every_group_once(tmp_path, kind):
    measured = World(make_spec(tmp_path, **KINDS[kind]))
    await train(measured)
    for moment in range(1, measured.calls + 1, 1 if kind == "synchronous" else 3):
        world = World(make_spec(tmp_path, **KINDS[kind]), crash_at=moment)
        with pytest.raises(Crash):
            await train(world)
        where = f"death at call {moment}, {world.log[-1]}"
        outcome, ranks, _ = await train(world)
        assert outcome is Outcome.FINISHED, where
        assert Counter(ranks.history) == Counter(expected_history(world)), where
        assert world.consumed.keys() == set(range(8)), where
        assert world.committed == 3, where
        if kind != "supervised" and world.published:
            assert {held[0] for held in world.held.values()} == {world.published}, where


async def test_two_deaths_in_a_row(tmp_path):
    changes = {"trainer": {"save_interval": 1}}
    measured = World(make_spec(tmp_path, steps=3, **changes))
    await train(measured)
    for first in range(1, measured.calls, 5):
        world = World(make_spec(tmp_path, steps=3, **changes), crash_at=first)
        with pytest.raises(Crash):
            await train(world)
        world.crash_at = world.calls + 12
        with contextlib.suppress(Crash):  # a run that was nearly done ends before
            await train(world)
        world.crash_at = None
        _, ranks, _ = await train(world)
        assert Counter(ranks.history) == Counter(expected_history(world)), f"first death at {first}"


async def test_order_of_one_step(tmp_path):
    world = World(make_spec(tmp_path, steps=1, trainer={"save_interval": 1}, rollout={"eval_interval": 1}))
    await train(world)
    names = [name for name in world.log if name.split()[0] in ORDER]
    assert names == ORDER_OF_ONE_STEP


ORDER = {"Setup", "restore_run", "reserve_version", "commit", "publish_version", "evaluate", "take_batch", "TrainStep"}
ORDER |= {"commit_step", "SaveCheckpoint", "record_checkpoint", "ExportHf"}
ORDER_OF_ONE_STEP = [
    "Setup",
    "restore_run",
    *("reserve_version", "commit n-0", "publish_version", "evaluate held"),
    *("take_batch", "TrainStep", "commit_step"),
    *("reserve_version", "commit n-0", "publish_version"),
    *("SaveCheckpoint", "record_checkpoint"),
    "evaluate held",
    "ExportHf",
]


async def test_an_engine_that_restarts_during_the_first_evaluation_gets_the_weights(tmp_path, monkeypatch):
    world = World(make_spec(tmp_path, steps=1, rollout={"eval_interval": 1}))
    held = []

    async def evaluate(self: MemoryRollout, *_: object) -> EvalResult:
        if not held:  # it waits for the engine, as a node's evaluation does
            world.held.clear()
            world.add_engine("n-0")
            async with asyncio.timeout(10):
                while not world.held:
                    await asyncio.sleep(0.02)
        held.append(world.held["n-0"][0])
        return EvalResult("held", 0.5, 10, 0, 4.0, 0.1, 1, 1, 0.1)

    monkeypatch.setattr(MemoryRollout, "evaluate", evaluate)
    outcome, _, _ = await train(world)
    assert outcome is Outcome.FINISHED
    assert held == [1, world.version]


async def test_stop_saves_what_was_trained(tmp_path):
    world, stop = World(make_spec(tmp_path)), asyncio.Event()
    world.supply = 4
    task = asyncio.create_task(train(world, stop))
    while world.committed < 1:
        await asyncio.sleep(0.01)
    stop.set()
    outcome, ranks, progress = await task
    assert outcome is Outcome.STOPPED
    assert world.checkpoint[0] == 1
    assert progress.step_count == 2
    world.supply = 100
    _, ranks, progress = await train(world)
    assert Counter(ranks.history) == Counter(expected_history(world))
    assert [event.step for event in progress.events if event.kind == "step"] == [2, 3]


async def test_batch_timeout_says_who_does_what(tmp_path):
    world = World(make_spec(tmp_path, trainer={"batch_timeout": 0.05}))
    world.supply, world.problem = 2, "the reward service does not answer."
    with pytest.raises(ServiceError, match="the reward service does not answer") as caught:
        await train(world)
    assert caught.value.reason == "BATCH_TIMEOUT"
    assert "No 2 groups for step 1" in caught.value.message
    assert "3 are ready" in caught.value.message
    assert "4 STALE" in caught.value.message
    assert "n-0 READY at version 2" in caught.value.message
    assert world.checkpoint[0] == 0, "what was trained is kept"
    world.supply = 100
    _, ranks, _ = await train(world)
    assert Counter(ranks.history) == Counter(expected_history(world))


async def test_data_may_end_before_the_last_step(tmp_path):
    world = World(make_spec(tmp_path, trainer={"save_interval": 3}))
    world.prompts = 5
    outcome, _, progress = await train(world)
    assert outcome is Outcome.FINISHED
    assert progress.step_count == 2
    assert world.checkpoint[0] == 1
    assert any("the data ended after 2 of 4 steps" in event.message for event in progress.events)


async def test_no_engine_is_named_with_what_the_nodes_say(tmp_path):
    world = World(make_spec(tmp_path))
    world.engines.clear()
    world.problem = "SGLang did not start: no module named sglang"
    progress = Progress("r", run_dir=str(tmp_path))
    with pytest.raises(ServiceError, match="no module named sglang") as caught:
        await train(world, progress=progress)
    assert caught.value.reason == "NO_ENGINE"
    told = [event for event in progress.events if "no module named sglang" in event.message]
    assert len(told) == 1, "the user sees the cause while the run waits, once"


async def test_a_trainer_that_starts_again_waits_for_no_engine_while_another_serves(tmp_path):
    world = World(make_spec(tmp_path, rollout={"rollout_num_gpus": 2}))
    await train(world)
    del world.engines["n-1"]  # it restarts
    world.state = "ACTIVE"
    world.spec = make_spec(tmp_path, steps=6, rollout={"rollout_num_gpus": 2})
    async with asyncio.timeout(5):
        await train(world)
    assert world.committed == 5


async def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    world = World(make_spec(tmp_path, trainer={"save_interval": 2}))
    await train(world)
    save = world.spec.trainer.save
    other = World(make_spec(tmp_path))
    other.files, other.latest = world.files, world.latest
    other.markers = {save: type(world.markers[save])("older", 0)}
    with pytest.raises(ServiceError, match="holds checkpoints of run older") as caught:
        await train(other)
    assert caught.value.reason == "CHECKPOINT_FOREIGN"


async def test_loaded_weights_count_steps_of_their_own(tmp_path):
    """A run that starts from another run's checkpoint begins at step 0, and resumes with the right offset."""
    first = World(make_spec(tmp_path / "one", trainer={"save_interval": 2}))
    await train(first)
    load = first.checkpoint[1]
    changes = {"trainer": {"save_interval": 2, "load": load}}
    measured = World(make_spec(tmp_path / "two", **changes), files=dict(first.files))
    _, ranks, progress = await train(measured)
    assert ranks.steps == 8
    assert progress.step_count == 4
    for moment in range(1, measured.calls + 1, 5):
        world = World(make_spec(tmp_path / "two", **changes), files=dict(first.files), crash_at=moment)
        with pytest.raises(Crash):
            await train(world)
        _, ranks, _ = await train(world)
        assert Counter(ranks.history) == Counter(expected_history(world) * 2), f"death at {moment}"


@pytest.mark.parametrize("steps", [1, 4])
async def test_a_store_that_was_lost_is_noticed(tmp_path, steps):
    world = World(make_spec(tmp_path, steps=steps, trainer={"save_interval": 1}))
    await train(world)
    empty = World(make_spec(tmp_path), files=world.files, latest=world.latest, markers=world.markers)
    with pytest.raises(ServiceError, match="the buffer's store was lost or replaced") as caught:
        await train(empty)
    assert caught.value.reason == "CHECKPOINT_AHEAD"


async def test_a_store_that_forgot_its_last_steps_takes_the_trainer_back_to_the_checkpoint_it_remembers(tmp_path):
    world = World(make_spec(tmp_path, trainer={"save_interval": 1}), crash_at=None)
    await train(world)
    remembered = next(path for path, (steps, _) in world.files.items() if steps == 2)
    # A power loss: steps 2 and 3 were committed, and their checkpoints recorded, in the last second of the store.
    world.state, world.committed, world.checkpoint = "ACTIVE", 1, (1, remembered)
    world.consumed = {ordinal: step for ordinal, step in world.consumed.items() if step <= 1}
    _, ranks, progress = await train(world)
    assert progress.step_count == 4
    assert Counter(ranks.history) == Counter(expected_history(world))
