"""A run that only generates, and the files of its steps."""

from __future__ import annotations

import json

import pytest

from services.common.errors import ServiceError
from services.trainer.core.loop import Outcome
from tests.support.trainer_world import Crash, World, make_spec
from tests.unit.trainer.test_loop import train

ONLY = {"debug_rollout_only": True, "rollout_num_gpus": 2, "eval_interval": 3}


def make_world(tmp_path, crash_at: int | None = None, **trainer) -> World:
    keys = ONLY | {"save_debug_rollout_data": str(tmp_path / "kept")}
    return World(make_spec(tmp_path, rollout=keys, trainer={"save_interval": 1} | trainer), crash_at=crash_at)


@pytest.mark.parametrize("interval", [1, 3])
async def test_a_run_that_only_generates_takes_every_step_and_trains_none(tmp_path, interval):
    world = make_world(tmp_path, update_weights_interval=interval)
    outcome, ranks, progress = await train(world)
    assert outcome is Outcome.FINISHED
    assert ranks.history == []
    assert (world.committed, set(world.consumed)) == (3, set(range(8)))
    assert not world.files
    assert "ExportHf" not in world.log
    assert world.version == 1, "the weights are pushed once"
    assert world.log.count("publish_version") == 1 + 4 // interval + (interval == 3), "and admission moves on"
    steps = [event for event in progress.events if event.kind == "step"]
    assert [event.step for event in steps] == [0, 1, 2, 3]
    assert all(event.metrics["staleness_max"] == 0 and event.metrics["total_tokens"] == 32 for event in steps)
    assert all("reward_mean" in event.metrics and "loss" not in event.metrics for event in steps)
    assert "loss" not in steps[0].message
    assert sum(event.kind == "eval" for event in progress.events) == 3


async def test_it_goes_on_after_its_last_commit(tmp_path):
    measured = make_world(tmp_path)
    await train(measured)
    for moment in range(1, measured.calls + 1, 2):
        world = make_world(tmp_path, crash_at=moment)
        with pytest.raises(Crash):
            await train(world)
        done = world.committed
        outcome, ranks, progress = await train(world)
        where = f"death at call {moment}, {world.log[-1]}"
        assert outcome is Outcome.FINISHED, where
        assert [e.step for e in progress.events if e.kind == "step"] == list(range(done + 1, 4)), where
        assert (ranks.history, world.committed, len(world.consumed)) == ([], 3, 8), where


async def test_every_committed_step_has_its_file(tmp_path):
    path = str(tmp_path / "deep" / "s{rollout_id}.jsonl")
    world = World(make_spec(tmp_path, rollout={"save_debug_rollout_data": path}))
    _, ranks, progress = await train(world)
    assert len(ranks.history) == 16, "a run that trains keeps them too"
    files = sorted((tmp_path / "deep").iterdir())
    assert [file.name for file in files] == ["s0.jsonl", "s1.jsonl", "s2.jsonl", "s3.jsonl"]
    rows = [json.loads(line) for line in files[2].read_text().splitlines()]
    assert rows == [{"group_id": "4", "step": 3}, {"group_id": "5", "step": 3}]
    order = [name for name in world.log if name in ("take_batch", "group_rows", "TrainStep", "commit_step")]
    assert order[:4] == ["take_batch", "group_rows", "TrainStep", "commit_step"]
    assert all("save_samples_seconds" in e.metrics for e in progress.events if e.kind == "step")


async def test_a_place_that_takes_no_file_ends_the_run_with_its_name(tmp_path):
    (tmp_path / "kept").write_text("in the way")
    world = make_world(tmp_path)
    with pytest.raises(ServiceError, match=r"save_debug_rollout_data is '.*kept/0\.jsonl': it cannot be written"):
        await train(world)
    assert world.committed == -1


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"debug_rollout_only": True, "load_debug_rollout_data": "f.jsonl"}, "load_debug_rollout_data does not"),
        ({"save_debug_rollout_data": "f.jsonl"}, 'needs "{rollout_id}"'),
        ({"save_debug_rollout_data": "f{rollout_id}.pt"}, "neither .jsonl nor .parquet"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, rollout, words):
    with pytest.raises(ValueError, match=words):
        make_spec(tmp_path, rollout=rollout)
