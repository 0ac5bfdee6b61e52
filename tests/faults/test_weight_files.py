"""Runs whose weights travel in files: the same weights whatever way they took, and engines that need no trainer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tetrarch.buffer.v1 import run_pb2
from tetrarch.rollout.v1 import engine_pb2

from services.common.run_spec import RunSpec
from services.common.weight_files.manifest import read_manifest, versions_in
from tests.faults.test_same_weights import exported
from tests.support.embedded import Embedded, embedded_tiers_up

SECONDS = 120.0
SLOW = {
    "rollout": {
        "num_rollout": 4,
        "simulated": {"tokens_per_second": 60.0, "mean_response_len": 1e6, "tokens_follow": "weights"},
    }
}


def files_of(tiers: Embedded) -> Path:
    return tiers.directory / "weights"


def by_files(tiers: Embedded, **more: object) -> dict:
    return {"update_weight_transport": "disk", "update_weight_disk_dir": str(files_of(tiers)), **more}


def told(tiers: Embedded, spec: RunSpec) -> list[str]:
    """Notices, without the one at the end."""
    lines = [entry["message"] for entry in tiers.history(spec) if entry["kind"] == "notice"]
    return [line for line in lines if not line.startswith("Hugging Face checkpoint")]


async def finished(tiers: Embedded, spec: RunSpec) -> dict[str, bytes]:
    run = await tiers.end_of(spec, SECONDS)
    assert run.state == run_pb2.RUN_STATE_FINISHED, run.reason
    return exported(spec)


async def engine(tiers: Embedded) -> engine_pb2.Engine:
    ((only,),) = [node.engines for node in await tiers.clients.nodes()]
    return only


async def all_ways_end_alike(tiers: Embedded) -> None:
    """With a rate so small that many float32 elements do not move, deltas are worth writing."""
    small, short = {"lr": 2e-10}, {"num_rollout": 3}
    collective = tiers.spec("collective", trainer=small, rollout=short)
    await tiers.begin(collective)
    wanted = await finished(tiers, collective)
    full = tiers.spec("full", trainer=small | by_files(tiers), rollout=short)
    await tiers.begin(full)
    assert await finished(tiers, full) == wanted
    assert len(versions_in(files_of(tiers) / "full")) == 1  # the published one
    more = {"update_weight_mode": "delta", "update_weight_disk_keep_files": True}
    delta = tiers.spec("delta", trainer=small | by_files(tiers, **more), rollout=short)
    await tiers.begin(delta)
    assert await finished(tiers, delta) == wanted
    kept = files_of(tiers) / "delta"
    modes = [read_manifest(kept / f"version-{version:06d}").mode for version in versions_in(kept)]
    assert modes[0] == "full"
    assert modes.count("delta") >= 2
    assert not told(tiers, delta)


async def a_directory_that_goes_and_comes_back(tiers: Embedded) -> None:
    spec = tiers.spec("fallback", trainer=by_files(tiers), **SLOW)
    await tiers.begin(spec)
    await tiers.steps(spec, 1, SECONDS)
    here, away = files_of(tiers), files_of(tiers).with_name("away")
    here.rename(away)
    here.write_text("no directory")
    await tiers.until(lambda: any("go over the collective" in line for line in told(tiers, spec)), SECONDS, "a word")
    here.unlink()
    away.rename(here)
    await tiers.until(lambda: any("written again" in line for line in told(tiers, spec)), SECONDS, "another word")
    await finished(tiers, spec)
    assert len(told(tiers, spec)) == 2


async def an_engine_without_a_trainer(tiers: Embedded) -> None:
    keep = {"update_weight_disk_dir": str(files_of(tiers))}
    spec = tiers.spec("alone", trainer=keep, **SLOW)
    await tiers.begin(spec)
    await tiers.steps(spec, 2, SECONDS)
    held = await tiers.caught("trainer.before_prepare")
    published = (await tiers.clients.find_run("alone")).policy_version
    before = await engine(tiers)
    assert published in versions_in(files_of(tiers) / "alone")
    os.kill(held["pid"], signal.SIGSTOP)  # a trainer that is down, and not started again yet
    os.kill(before.pid, signal.SIGKILL)

    async def serves_again() -> bool:
        now = await engine(tiers)
        return now.incarnation != before.incarnation and now.state == engine_pb2.ENGINE_STATE_READY

    await tiers.until(serves_again, 40.0, "the engine's return without a trainer")
    assert (await engine(tiers)).weight_version == published
    os.kill(held["pid"], signal.SIGKILL)
    tiers.let_go("trainer.before_prepare")
    await finished(tiers, spec)
    assert (await tiers.clients.find_run("alone")).policy_version > published


@pytest.mark.timeout(400)
async def test_every_way_for_weights_leads_to_the_same_ones(tmp_path):
    async with embedded_tiers_up(tmp_path) as tiers:
        await all_ways_end_alike(tiers)


@pytest.mark.timeout(400)
async def test_what_breaks_takes_another_way(tmp_path):
    async with embedded_tiers_up(tmp_path) as tiers:
        await a_directory_that_goes_and_comes_back(tiers)
        await an_engine_without_a_trainer(tiers)
