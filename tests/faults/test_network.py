"""Two hosts that do not hear each other for a while, and a whole run over them: it goes on by itself and loses nothing.

The hosts are network namespaces; without the right to make them these tests are skipped. The 30 s partitions are rows
of `benchmarks.recovery`; here they are short, and leases shorter still.
"""

from __future__ import annotations

import time

import pytest
import pytest_asyncio

from benchmarks.recovery import hosts
from benchmarks.recovery.ledger import Ledger
from benchmarks.recovery.world import Shape, world
from tests.support.engine import write_checkpoint
from tests.support.netns import NotPermitted

pytestmark = pytest.mark.asyncio(loop_scope="module")
SILENCE, LEASE = 3.0, 2.5
SHAPE = Shape(where=hosts.NAME, more=(("rollout", "lease_ttl", LEASE),))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made(tmp_path_factory):
    """A run over two hosts, some steps old."""
    directory = tmp_path_factory.mktemp("hosts")
    try:
        async with world(directory, SHAPE, write_checkpoint(directory / "model")) as found:
            yield found
    except NotPermitted as error:
        pytest.skip(str(error))


async def silence(made: hosts.HostsWorld, seconds: float) -> float:
    """Cuts the hosts apart for so long; → when they met again."""
    began = time.time()
    made.network.partition()
    try:
        await made.until(lambda: time.time() > began + seconds, seconds + 5, "the end of the silence")
    finally:
        made.network.heal()
    return time.time()


async def goes_on(made: hosts.HostsWorld, healed: float) -> None:
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
    await goes_on(made, await silence(made, SILENCE))
    assert await made.incarnations() == lives, "no engine is restarted"


async def test_nothing_was_lost_and_nothing_trained_twice(made):
    """Leases were over in every silence, so that prompts were given out again."""
    verdict = await Ledger(made).close()
    assert verdict.drawn > 0
    assert (verdict.lost, verdict.doubled, verdict.faults) == (0, 0, ())
    assert (await made.run()).reason == ""
