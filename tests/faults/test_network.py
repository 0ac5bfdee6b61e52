"""A whole run over two hosts that do not hear each other for a while, and whose disks fill: it says what is the matter,
goes on by itself and loses nothing.

The hosts are network namespaces, the disks tmpfs; without the right to make them these tests are skipped. Partitions of
30 s are rows of `benchmarks.recovery`; here they are short, and leases shorter still.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.recovery.disks import DisksWorld
from benchmarks.recovery.hosts import HostsWorld
from benchmarks.recovery.ledger import Ledger
from benchmarks.recovery.world import WORLDS, Shape, world
from tests.support.engine import write_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")
LEASE_SECONDS, SILENCE, FULL_SECONDS = 2.5, 3.0, 2.0


class HostsOnSmallDisks(HostsWorld, DisksWorld):
    """Two hosts; the disks are on the first."""


WORLDS["hosts on small disks"] = HostsOnSmallDisks


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made(tmp_path_factory):
    """A run over two hosts, some steps old."""
    directory = tmp_path_factory.mktemp("hosts")
    shape = Shape(where="hosts on small disks", more=(("rollout", "lease_ttl", LEASE_SECONDS),))
    try:
        async with world(directory, shape, write_checkpoint(directory / "model")) as found:
            yield found
    except RuntimeError as error:  # NotPermitted, or the mount's
        pytest.skip(str(error))


async def silence(made: HostsWorld, seconds: float) -> float:
    """Cuts the hosts apart for so long; → when they met again."""
    began = time.time()
    made.network.partition()
    try:
        await made.until(lambda: time.time() > began + seconds, seconds + 5, "the end of the silence")
    finally:
        made.network.heal()
    return time.time()


async def meet_again(made: HostsWorld, healed: float) -> None:
    """Steps are trained and every engine has their weights, soon after the hosts met again."""
    await made.until(lambda: len(made.history.since(healed, "step")) >= 3, 40, "steps after the silence")
    await made.until(made.serving, 20, "engines with the last weights")


@pytest.mark.parametrize("point", ["", "engine.bucket", "trainer.mid_transfer"])
async def test_a_partition_at_any_moment(made, point):
    lives = await made.incarnations()
    if point:
        await made.caught(point, 60)
    made.network.partition()
    made.disarm(point or "none")
    await meet_again(made, await silence(made, SILENCE))
    assert await made.incarnations() == lives, "no engine is restarted"


async def latest(made: DisksWorld) -> Path:
    """The checkpoint that `latest` names, which must be complete."""
    root = made.disks["checkpoints"].path
    named = root / (await asyncio.to_thread((root / "latest").read_text)).strip()
    assert await asyncio.to_thread((named / "metadata.json").exists)
    return named


async def goes_on(made: DisksWorld, at: float) -> None:
    """Steps and a checkpoint after a moment."""
    await made.until(lambda: len(made.history.since(at, "step")) >= 2, 40, "steps")
    await made.until(lambda: made.history.since(at, "checkpoint"), 40, "a checkpoint")


async def test_the_disk_of_the_checkpoints(made):
    disk = made.disks["checkpoints"]
    await asyncio.to_thread(disk.fill)
    at = time.time()
    said = await made.until(lambda: made.history.since(at, "notice"), 40, "a sentence")
    assert "goes on without a checkpoint" in said[0]["message"]
    assert str(disk.path) in said[0]["message"]
    assert (await made.run()).checkpoint_step + 1 == int((await latest(made)).name.removeprefix("step_"))
    await made.until(lambda: len(made.history.since(said[0]["time"], "step")) >= 3, 40, "steps with a full disk")
    assert not [path for path in await asyncio.to_thread(lambda: list(disk.path.glob(".step_*"))) if path.is_file()]
    await asyncio.to_thread(disk.make_room)
    await goes_on(made, time.time())
    await latest(made)


async def test_the_disk_of_the_store(made):
    disk = made.disks["store"]
    await asyncio.to_thread(disk.fill)
    at = time.time()
    await made.until(lambda: made.wrote("trainer", at, "takes no writes"), 40, "a sentence")
    node = await made.until(made.node, 10, "the node")
    assert node.problem == "" or str(disk.path) in node.problem
    await asyncio.sleep(FULL_SECONDS)
    assert (await made.run()).reason == "", "the run waits"
    await asyncio.to_thread(disk.make_room)
    await goes_on(made, time.time())


async def test_the_disk_of_the_history(made):
    disk = made.disks["history"]
    await asyncio.to_thread(disk.fill)
    at = time.time()
    await made.until(lambda: made.wrote("trainer", at, "cannot be written (No space left on device)"), 40, "a sentence")
    committed = (await made.run()).committed_step

    async def further() -> bool:
        return (await made.run()).committed_step >= committed + 3

    await made.until(further, 40, "steps that cannot be written down")
    await asyncio.to_thread(disk.make_room)
    await goes_on(made, time.time())
    steps = [entry["step"] for entry in made.history.read() if entry["kind"] == "step"]
    assert steps == list(range(len(steps))), "no line is missing"


async def test_nothing_was_lost_and_nothing_trained_twice(made):
    """Leases were over in every silence, so that prompts were given out again."""
    verdict = await Ledger(made).close()
    assert verdict.drawn > 0
    assert (verdict.lost, verdict.doubled, verdict.faults) == (0, 0, ())
    assert (await made.run()).reason == ""
    assert all(made.supervisor.pid(name) for name in made.lines)
    assert not made.notes, "nobody died of it"
