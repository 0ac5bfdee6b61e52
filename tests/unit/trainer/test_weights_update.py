"""Weight updates: groups as failure domains, late joiners, fencing epochs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.errors import Code, ServiceError
from services.trainer.core import fleet as fleets
from services.trainer.core import update_report
from services.trainer.core import weights as updates
from services.trainer.core.commands import ChecksumRule, Setup, SetupResult
from services.trainer.core.fleet import EngineFleet, FleetSettings
from services.trainer.core.ports import RanksFailed
from services.trainer.core.progress import Progress
from services.trainer.core.records import EngineState
from services.trainer.core.weights import UpdateSettings, WeightUpdater
from tests.support.trainer_world import World, make_spec


class Scene:
    """An updater and a fleet over a world with some engines."""

    def __init__(self, tmp_path: Path, engines: int, group_size: int = 1) -> None:
        spec = make_spec(tmp_path, rollout={"rollout_num_gpus": engines})
        self.world = World(spec)
        ports, self.ranks = self.world.ports(Progress("r", run_dir=str(tmp_path)))
        self.ranks.history, self.rollout, self.journal = [], ports.rollout, ports.journal
        setup = SetupResult("2.13", "", ("gloo",), {}, 14, 1, 0, 1, 0.0)
        settings = UpdateSettings("r", 7, 16, group_size, 2.0, 2.0, 2.0, "127.0.0.1", iter(range(9000, 9999)).__next__)
        self.updater = WeightUpdater(self.ranks, self.rollout, setup, settings)
        self.lock = asyncio.Lock()
        self.fleet = EngineFleet(self.rollout, self.updater, self.lock, self.journal, FleetSettings("r", engines, 0.5))
        self.published: list[int] = []

    async def push(self, version: int):
        """A full push that publishes."""

        async def publish(pushed: int) -> None:
            self.published.append(pushed)

        return await self.fleet.push(version, version - 1, publish, lambda: None)

    def fail(self, call: str, engine: str, why: str = "it is gone") -> None:
        """That call of that engine fails from now on."""
        error = ServiceError(Code.UNAVAILABLE, "ENGINE_UNAVAILABLE", f"Engine {engine}: {why}.")
        self.world.faults[(call, engine)] = error


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(fleets, "_POLL_SECONDS", 0.01)


async def test_all_engines_get_the_staged_weights(tmp_path):
    scene = Scene(tmp_path, engines=3)
    scene.ranks.history = ["x"] * 5
    report = await scene.push(1)
    assert sorted(report.committed) == ["n-0", "n-1", "n-2"]
    assert report.bucket_count == 4 or report.bucket_count == 3
    assert report.pause_seconds == 0.25
    assert scene.published == [1]
    assert set(scene.world.held.values()) == {(1, 5)}
    assert len(scene.ranks.groups) == 3
    parts = {"prepare", "checksums", "transfer", "commit", "stragglers", "stage", "publish"}
    assert report.seconds.keys() == parts
    assert (report.wire_seconds, report.staged_count) == (0.125, 3)


@pytest.mark.parametrize("call", ["prepare", "transfer", "commit"])
async def test_one_broken_engine_does_not_stop_the_others(tmp_path, call):
    scene = Scene(tmp_path, engines=3)
    scene.fail(call, "n-1")
    report = await scene.push(1)
    assert sorted(report.committed) == ["n-0", "n-2"]
    assert report.failed == {"n-1": "Engine n-1: it is gone."}
    assert scene.published == [1]
    assert [engine for engine, _ in scene.rollout.aborted] == ["n-1"]
    assert len(scene.ranks.groups) == 2, "the broken one was left"


async def test_engines_that_share_a_group_share_its_fate(tmp_path):
    scene = Scene(tmp_path, engines=4, group_size=2)
    scene.fail("transfer", "n-0")
    report = await scene.push(1)
    assert sorted(report.committed) == ["n-2", "n-3"]
    assert "its weight group broke" in report.failed["n-1"]


async def test_groups_outlive_updates(tmp_path):
    scene = Scene(tmp_path, engines=2)
    assert (await scene.push(1)).new_group_count == 2
    assert (await scene.push(2)).new_group_count == 0
    assert scene.ranks.joined == ["r-7000001-0", "r-7000001-1"]
    assert scene.rollout.groups[2:] == scene.rollout.groups[:2], "Prepare names the same groups"
    assert set(scene.world.held.values()) == {(2, 0)}


async def test_a_restarted_engine_gets_a_new_group_and_the_others_keep_theirs(tmp_path):
    scene = Scene(tmp_path, engines=2)
    await scene.push(1)
    scene.world.engines["n-1"] = replace(scene.world.engines["n-1"], incarnation="i2", state=EngineState.STALE)
    report = await scene.push(2)
    assert sorted(report.committed) == ["n-0", "n-1"]
    assert scene.ranks.joined[2:] == ["r-7000002-0"]
    assert scene.ranks.groups == {"r-7000001-0", "r-7000002-0"}, "the dead process's group was left"


async def test_the_group_of_an_engine_that_is_gone_is_left(tmp_path):
    scene = Scene(tmp_path, engines=2)
    await scene.push(1)
    del scene.world.engines["n-1"]
    await scene.push(2)
    assert scene.ranks.groups == {"r-7000001-0"}


@pytest.mark.parametrize("call", ["prepare", "transfer", "commit"])
async def test_a_failure_ends_a_group_that_stood(tmp_path, call):
    scene = Scene(tmp_path, engines=2)
    await scene.push(1)
    scene.fail(call, "n-1")
    await scene.push(2)
    assert scene.ranks.groups == {"r-7000001-0"}
    scene.world.faults.clear()
    report = await scene.push(3)
    assert sorted(report.committed) == ["n-0", "n-1"]
    assert scene.ranks.joined[2:] == ["r-7000003-0"], "the old name is not used again"


async def test_a_late_member_of_a_shared_group_leaves_it(tmp_path):
    scene = Scene(tmp_path, engines=2, group_size=2)
    await scene.push(1)
    scene.world.engines["n-1"] = replace(scene.world.engines["n-1"], state=EngineState.STALE, weight_version=0)
    (report,) = await scene.fleet.catch_up()
    assert report.committed == ["n-1"]
    assert scene.ranks.groups == {"r-7000002-0"}, "an engine is in one group"
    report = await scene.push(2)
    assert sorted(report.committed) == ["n-0", "n-1"]
    assert scene.ranks.groups == {"r-7000002-0", "r-7000003-0"}


async def test_what_our_side_knows_of_a_broken_transfer_is_told(tmp_path):
    scene = Scene(tmp_path, engines=2, group_size=2)
    scene.fail("transfer", "n-0")
    scene.ranks.errors["r-7000001-0"] = "no memory"
    await scene.updater.stage()
    report = await scene.updater.push(1, await scene.fleet.engines())
    assert report.failed["n-1"] == "its weight group broke: Engine n-0: it is gone.; the trainer's side: no memory"


async def test_a_transfer_that_cannot_begin_on_our_side_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(updates, "_LOOK_SECONDS", 0.01)
    scene = Scene(tmp_path, engines=2)
    hang(scene, "n-0")
    scene.ranks.errors["r-7000001-0"] = "no memory"
    report = await scene.push(1)
    assert (report.committed, report.failed) == (["n-1"], {"n-0": "no memory"})
    assert report.late == []


def hang(scene: Scene, engine_id: str) -> asyncio.Event:
    """Transfers of an engine end when the event is set, with an error."""
    transfer, hanging = scene.rollout.transfer, asyncio.Event()

    async def slow(engine, epoch, timeout):
        if engine.engine_id == engine_id:
            await hanging.wait()
            scene.fail("transfer", engine_id, "it was silent")
        return await transfer(engine, epoch, timeout)

    scene.rollout.transfer = slow
    return hanging


async def until(condition) -> None:
    """Waits a little for something that happens beside."""
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def test_a_slow_group_delays_no_other_one(tmp_path):
    scene = Scene(tmp_path, engines=2)
    await scene.push(1)
    hanging = hang(scene, "n-0")
    pushing = asyncio.create_task(scene.push(2))
    await until(lambda: scene.world.held["n-1"][0] == 2)  # it serves while the other hangs
    assert not pushing.done()
    hanging.set()
    report = await pushing
    assert (report.committed, list(report.failed)) == (["n-1"], ["n-0"])


async def test_a_straggler_is_left_and_caught_up_later(tmp_path, monkeypatch):
    monkeypatch.setattr(update_report, "_LEAST_PATIENCE", 0.05)
    scene = Scene(tmp_path, engines=4)
    await scene.push(1)
    hanging = hang(scene, "n-2")
    report = await scene.push(2)
    assert sorted(report.committed) == ["n-0", "n-1", "n-3"]
    assert report.late == ["n-2"]
    assert "when the others had the version" in report.failed["n-2"]
    assert scene.published == [1, 2]
    assert report.total_seconds < 1
    assert "r-7000001-2" not in scene.ranks.groups, "its group was left"
    await until(lambda: ("n-2", 7_000_002) in scene.rollout.aborted)
    hanging.set()
    scene.world.faults.clear()
    scene.rollout.transfer = type(scene.rollout).transfer.__get__(scene.rollout)
    (report,) = await scene.fleet.catch_up()
    assert report.committed == ["n-2"]
    assert scene.world.held["n-2"] == (2, 0)


async def test_an_engine_that_stays_slow_does_not_cost_every_update_the_same_patience(tmp_path, monkeypatch):
    monkeypatch.setattr(update_report, "_LEAST_PATIENCE", 1.0)
    scene = Scene(tmp_path, engines=2)
    await scene.push(1)
    hanging = hang(scene, "n-0")
    first, second = await scene.push(2), await scene.push(3)
    assert first.late == second.late == ["n-0"]
    assert first.total_seconds > 1.0 > second.total_seconds
    hanging.set()
    scene.rollout.transfer = type(scene.rollout).transfer.__get__(scene.rollout)
    assert len((await scene.push(4)).committed) == 2
    hang(scene, "n-0")
    assert (await scene.push(5)).total_seconds > 1.0, "it is waited for again"


async def test_slow_engines_are_waited_for_as_long_as_nobody_has_the_version(tmp_path, monkeypatch):
    monkeypatch.setattr(update_report, "_LEAST_PATIENCE", 0.01)
    scene = Scene(tmp_path, engines=2)
    prepare = scene.rollout.prepare

    async def slow(engine, request, timeout):
        await asyncio.sleep(0.3 if engine.engine_id == "n-0" else 0.4)
        return await prepare(engine, request, timeout)

    scene.rollout.prepare = slow
    report = await scene.push(1)
    assert sorted(report.committed) == ["n-0", "n-1"], "three times 0.3 s are enough for the second"


async def test_epochs_grow_over_updates_and_sessions(tmp_path):
    scene = Scene(tmp_path, engines=2)
    await scene.push(1)
    await scene.push(2)
    assert scene.rollout.epochs == [7_000_001, 7_000_001, 7_000_002, 7_000_002]


async def test_nothing_is_published_when_no_engine_has_the_weights(tmp_path):
    scene = Scene(tmp_path, engines=1)
    scene.fail("commit", "n-0", "other bytes than were sent")
    with pytest.raises(ServiceError, match="other bytes than were sent") as caught:
        await scene.push(1)
    assert caught.value.reason == "NO_ENGINE"
    assert scene.published == []


async def test_a_push_waits_for_an_engine_that_restarts(tmp_path):
    scene = Scene(tmp_path, engines=1)
    scene.world.engines["n-0"] = replace(scene.world.engines["n-0"], state=EngineState.DEAD)

    async def restart() -> None:
        await asyncio.sleep(0.05)
        scene.world.add_engine("n-0")

    task = asyncio.create_task(restart())
    report = await scene.push(1)
    await task
    assert report.committed == ["n-0"]


async def test_late_joiner_gets_the_published_version_not_a_newer_one(tmp_path):
    scene = Scene(tmp_path, engines=2)
    scene.fail("transfer", "n-1")
    await scene.push(1)
    scene.ranks.history += ["trained", "meanwhile"]
    assert scene.world.engines["n-1"].state is EngineState.STALE
    scene.world.faults.clear()
    (report,) = await scene.fleet.catch_up()
    assert report.committed == ["n-1"]
    assert scene.world.held["n-1"] == (1, 0)
    assert scene.published == [1]
    assert await scene.fleet.catch_up() == []


async def test_late_joiners_do_not_wait_for_a_training_step(tmp_path):
    scene = Scene(tmp_path, engines=1)
    await scene.push(1)
    scene.ranks.history += ["trained"]
    scene.world.add_engine("n-1")
    background = asyncio.create_task(scene.fleet.catch_up_forever())
    async with scene.lock:  # the ranks are at work
        scene.ranks.busy = True
        await until(lambda: "n-1" in scene.world.held)
    background.cancel()
    assert scene.world.held["n-1"] == (1, 0)


async def test_a_full_push_ends_what_late_joiners_are_at(tmp_path):
    scene = Scene(tmp_path, engines=1)
    await scene.push(1)
    scene.world.add_engine("n-1")
    hang(scene, "n-1")
    background = asyncio.create_task(scene.fleet.catch_up_forever())
    await until(lambda: "r-7000002-0" in scene.ranks.groups)
    scene.rollout.transfer = type(scene.rollout).transfer.__get__(scene.rollout)
    report = await scene.push(2)
    assert sorted(report.committed) == ["n-0", "n-1"]
    assert ("n-1", 7_000_002) in scene.rollout.aborted
    assert "r-7000002-0" not in scene.ranks.groups
    background.cancel()
    assert set(scene.world.held.values()) == {(2, 0)}


async def test_a_late_joiner_that_hangs_holds_up_no_other(tmp_path):
    scene = Scene(tmp_path, engines=1)
    await scene.push(1)
    scene.world.add_engine("n-1")
    hang(scene, "n-1")
    background = asyncio.create_task(scene.fleet.catch_up_forever())
    await until(lambda: "r-7000002-0" in scene.ranks.groups)
    scene.world.add_engine("n-2")
    await until(lambda: "n-2" in scene.world.held)
    assert "n-1" not in scene.world.held
    background.cancel()
    await asyncio.gather(background, return_exceptions=True)
    assert "r-7000002-0" not in scene.ranks.groups


async def test_a_broken_engine_is_not_asked_all_the_time(tmp_path):
    scene = Scene(tmp_path, engines=1)
    await scene.push(1)
    scene.world.add_engine("n-1")
    scene.fail("prepare", "n-1")
    (report,) = await scene.fleet.catch_up()
    assert report.failed.keys() == {"n-1"}
    assert await scene.fleet.catch_up() == [], "it is left alone for a while"


async def test_engines_that_cannot_join_are_not_asked(tmp_path):
    scene = Scene(tmp_path, engines=4)
    for engine_id, state in (("n-1", EngineState.STARTING), ("n-2", EngineState.DEAD), ("n-3", EngineState.DRAINING)):
        scene.world.engines[engine_id] = replace(scene.world.engines[engine_id], state=state)
    report = await scene.push(1)
    assert report.committed == ["n-0"]
    assert report.failed == {}


async def test_an_engine_that_serves_unverified_is_named_once(tmp_path):
    scene = Scene(tmp_path, engines=2)
    scene.rollout.rules["n-1"] = {}
    assert [sorted((await scene.push(version)).committed) for version in (1, 2)] == [["n-0", "n-1"]] * 2
    (told,) = [event.message for event in scene.journal.progress.events if event.kind == "notice"]
    assert told.startswith("engine n-1 cannot say what it holds")


async def test_an_engine_of_another_model_is_named(tmp_path):
    scene = Scene(tmp_path, engines=2)
    scene.rollout.rules["n-1"] = {"z": ChecksumRule(("z",))}
    report = await scene.push(1)
    assert report.committed == ["n-0"]
    assert "would check z by tensor z, which the trainer does not send" in report.failed["n-1"]


async def test_an_engine_without_our_backend_is_named(tmp_path):
    scene = Scene(tmp_path, engines=2)
    scene.world.engines["n-1"] = replace(scene.world.engines["n-1"], backends=("nccl",))
    report = await scene.push(1)
    assert report.committed == ["n-0"]
    assert "no collective backend of the trainer: it offers nccl, the trainer gloo" in report.failed["n-1"]


async def test_engines_are_told_when_the_ranks_die(tmp_path):
    scene = Scene(tmp_path, engines=2)
    scene.ranks.die_in["SendWeights"] = RanksFailed(0, "Rank 0 was ended by signal 9.", answered=False)
    with pytest.raises(RanksFailed):
        await scene.push(1)
    assert sorted(engine for engine, _ in scene.rollout.aborted) == ["n-0", "n-1"]
    assert scene.published == []


async def test_setup_is_not_needed_twice(tmp_path):
    """The memory ranks obey the order that real ones demand."""
    scene = Scene(tmp_path, engines=1)
    assert (await scene.ranks.call_all(Setup("{}", "cpu"), 1.0))[0].backends == ("gloo",)
