"""Rows of the failure table, each once: the victim is struck at its moment, the run goes on, and at the end no prompt
is lost and none was trained twice.

The strikes are those of `benchmarks.recovery`, which measures what they cost; here the world is quicker and what is
waited for is that everything works again. Other moments are struck in `test_versions`, `test_same_weights` (trainer,
engines), `test_buffer_restarts`, `test_network`, `test_connections` and `test_disk`.
"""

from __future__ import annotations

import pytest
import pytest_asyncio

from benchmarks.recovery.measure import Measured, Row
from benchmarks.recovery.rows import ROWS
from benchmarks.recovery.world import Shape, World, world
from tests.support.engine import write_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUICK = {"tokens_per_second": 400.0, "mean_response_len": 1e6, "response_len_spread": 0.0}
SHAPE = Shape(engine_count=4, more=(("rollout", "simulated", QUICK), ("rollout", "rollout_health_check_interval", 0.5)))
STRUCK = (
    "engines-two-of-four",
    "engine-committed",
    "engine-stop",
    "router",
    "reward",
    "plugin",
    "buffer-commit",
    "buffer-put",
    "store",
    "node-put",
    "trainer-after-checkpoint",
    "trainer-before-prepare",
    "rank",
)
STEPS_AFTER, SECONDS = 2, 30.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made(tmp_path_factory):
    """A run of four engines, some steps old."""
    directory = tmp_path_factory.mktemp("recovery")
    async with world(directory, SHAPE, write_checkpoint(directory / "model")) as found:
        yield Measured(found)


def row(name: str) -> Row:
    """A row of the table."""
    return next(one for one in ROWS if one.name == name)


async def steps_after(found: World, count: int) -> None:
    """The run makes some steps from now on."""
    done = len(found.history.read())
    await found.until(
        lambda: sum(entry["kind"] == "step" for entry in found.history.read()[done:]) >= count, SECONDS, "steps"
    )


@pytest.mark.parametrize("name", STRUCK)
async def test_a_process_dies_and_the_run_goes_on(made, name):
    one = await made.repeat(row(name), None)
    assert one.engines_restarted_needlessly == 0
    if name.startswith("engine"):
        assert one.detect_seconds <= row(name).bars["detect_seconds"]
    if one.others_seconds is not None:
        assert one.others_seconds <= row(name).bars["others_seconds"]
    await steps_after(made.world, STEPS_AFTER)


async def test_no_prompt_was_lost_and_none_trained_twice(made):
    verdict = await made.ledger.close()
    assert verdict.drawn > 0
    assert (verdict.lost, verdict.doubled, verdict.faults) == (0, 0, ())
