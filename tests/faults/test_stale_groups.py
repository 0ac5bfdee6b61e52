"""Trainers that come and go in mid-update: engines that outlive them are neither restarted nor worn out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psutil
import pytest
from tetrarch.rollout.v1 import engine_pb2

from tests.contract.rollout_v1.conftest import Client, World
from tests.support.node_world import MODES, node_world, run_on
from tests.support.weight_trainer import MOMENTS, TrainerProcess, Where

LIVES = 20
SLACK = {"threads": 2, "descriptors": 4, "megabytes": 30}
"""A group that failed and was not let go costs an engine two threads and five descriptors."""
STALE, READY = engine_pb2.ENGINE_STATE_STALE, engine_pb2.ENGINE_STATE_READY


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    """A node."""
    with node_world(tmp_path_factory.mktemp("world")) as world:
        yield world


def worn(pid: int) -> dict[str, int]:
    """Threads, descriptors and resident megabytes of an engine's processes."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {
        "threads": sum(process.num_threads() for process in processes),
        "descriptors": sum(process.num_fds() for process in processes),
        "megabytes": sum(process.memory_info().rss for process in processes) >> 20,
    }


async def assert_no_more_worn(pid: int, than: dict[str, int]) -> None:
    """Connections are kept open for a next call for a while."""
    for _ in range(20):
        now = worn(pid)
        if all(now[what] <= than[what] + slack for what, slack in SLACK.items()):
            return
        await asyncio.sleep(1.0)
    pytest.fail(f"an engine grew from {than} to {now}")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["simulated", "sglang-cpu"])
async def test_a_trainer_killed_twenty_times_finds_its_engines_as_they_were(mode, world):
    async with run_on(world, mode, update_timeout=20) as client:
        before = await client.engines(STALE, MODES[mode]["rollout_num_gpus"], seconds=240.0)
        pid = before[0].pid
        await lives(client, before, 2)
        first = worn(pid)
        await lives(client, before, LIVES)
        await assert_no_more_worn(pid, first)


async def lives(client: Client, before: list[engine_pb2.Engine], count: int) -> None:
    """Trainers one after the other, of which an orderly one is the last."""
    world = client.world
    where = Where(client.run_id, world.buffer_address, world.node.address, world.checkpoint)
    for life in range(count):
        trainer = TrainerProcess(where, MOMENTS[life % len(MOMENTS)])
        try:
            report = await asyncio.to_thread(trainer.report)
        finally:
            trainer.kill()
        assert not report["failed"], (life, report)
        if MOMENTS[life % len(MOMENTS)] == "committed":
            assert sorted(report["committed"]) == [engine.engine_id for engine in before], (life, report)
        else:
            assert report["pushing"], life
    last = TrainerProcess(where, "committed")
    try:
        report = await asyncio.to_thread(last.report)
    finally:
        last.kill()
    after = list((await client.node()).engines)
    assert [(e.pid, e.incarnation, e.state) for e in after] == [(e.pid, e.incarnation, READY) for e in before]
    assert {engine.weight_version for engine in after} == {report["version"]}
