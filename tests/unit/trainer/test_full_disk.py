"""A disk that takes no checkpoint: training goes on and loses nothing; only the last checkpoint must be written."""

from __future__ import annotations

from collections import Counter

import pytest

from services.common.errors import ServiceError
from services.trainer.core.loop import Outcome
from services.trainer.core.progress import Progress
from tests.support.trainer_world import Crash, World, make_spec
from tests.unit.trainer.test_loop import expected_history, train

EVERY_STEP = {"save_interval": 1}


async def test_the_run_goes_on_and_says_what_is_full(tmp_path):
    world = World(make_spec(tmp_path, trainer=EVERY_STEP), full_at=(2, 3))
    outcome, ranks, progress = await train(world)
    assert outcome is Outcome.FINISHED
    assert Counter(ranks.history) == Counter(expected_history(world))
    (first, second) = [event.message for event in progress.events if event.kind == "notice" and "disk" in event.message]
    assert "goes on without a checkpoint" in first
    assert "step_000002 could not be written" in first
    assert "step_000003" in second
    assert sorted(world.files) == [f"{world.spec.trainer.save}/step_{step:06d}" for step in (1, 4)]


async def test_a_death_meanwhile_goes_back_to_the_last_good_checkpoint(tmp_path):
    measured = World(make_spec(tmp_path, trainer=EVERY_STEP), full_at=(2, 3))
    await train(measured)
    for call in range(2, measured.calls, 3):
        world = World(make_spec(tmp_path, trainer=EVERY_STEP), full_at=(2, 3), crash_at=call)
        with pytest.raises(Crash):
            await train(world)
        world.full_at, world.crash_at = (), None
        _, ranks, _ = await train(world)
        assert Counter(ranks.history) == Counter(expected_history(world)), world.log


async def test_the_last_checkpoint_must_be_written(tmp_path):
    world = World(make_spec(tmp_path, trainer=EVERY_STEP), full_at=(4,))
    progress = Progress("r", run_dir=str(tmp_path))
    with pytest.raises(ServiceError, match="step_000004 could not be written") as caught:
        await train(world, progress=progress)
    assert caught.value.reason == "CHECKPOINT_FAILED"
    world.full_at = ()
    outcome, ranks, progress = await train(world)
    assert outcome is Outcome.FINISHED
    assert Counter(ranks.history) == Counter(expected_history(world))
    assert [event.step for event in progress.events if event.kind == "step"] == [3], "one step is done again"
