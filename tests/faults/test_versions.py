"""Versions verdict: whoever dies in a weight update, no trained token carries a version that no engine had verified,
one that is newer than what was published when its batch was taken, or one that is older than max_staleness allows.

The tokens come from the files in which the trainer keeps every step's samples, the published versions from the run's
history, the verified ones from the node's log: three witnesses.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tetrarch.buffer.v1 import run_pb2

from benchmarks.soak_verdict import Step, read_steps, verified_versions, versions_of
from services.common.run_spec import RunSpec
from tests.support.embedded import SIMULATED, Embedded, embedded_tiers_up

SECONDS = 120.0
STEPS, MAX_STALENESS = 12, 1
STRIKES = ("engine.bucket", "trainer.mid_transfer", "node.before_commit", "trainer.after_commit")


def spec_of(tiers: Embedded) -> RunSpec:
    """Two engines that decode while weights arrive, so that samples are of two versions."""
    slow = SIMULATED | {"tokens_per_second": 40.0}
    changes = {"num_rollout": STEPS, "rollout_num_gpus": 2, "simulated": slow, "pause_mode": "in_place"}
    changes["save_debug_rollout_data"] = str(tiers.directory / "samples")
    return tiers.spec("versions", rollout=changes, trainer={"max_staleness": MAX_STALENESS})


async def strike(tiers: Embedded, point: str) -> None:
    """SIGKILL to whoever stands at the point; an engine with all its processes."""
    caught = await tiers.caught(point, SECONDS)
    if point.startswith("engine."):
        os.killpg(caught["pgid"], signal.SIGKILL)
    else:
        os.kill(caught["pid"], signal.SIGKILL)
    tiers.let_go(point)


def spans(steps: list[Step]) -> list[list[int]]:
    """Every span of every sample."""
    return [span for step in steps for rows in step.groups.values() for row in rows for span in row["versions"]]


@pytest.mark.timeout(400)
async def test_no_token_of_an_unverified_unpublished_or_too_old_version_is_trained(tmp_path):
    async with embedded_tiers_up(tmp_path) as tiers:
        spec = spec_of(tiers)
        await tiers.begin(spec)
        for point in STRIKES:
            await tiers.steps(spec, 1 + sum(entry["kind"] == "step" for entry in tiers.history(spec)), SECONDS)
            await strike(tiers, point)
        run = await tiers.end_of(spec, SECONDS)
        assert run.state == run_pb2.RUN_STATE_FINISHED, run.reason
        steps = read_steps(Path(spec.rollout.save_debug_rollout_data), STEPS)
        rows = tiers.history(spec)
    found = versions_of(rows, steps, verified_versions(tmp_path / "logs" / "rollout.log"), MAX_STALENESS)
    assert found.tokens == STEPS * 4 * 4 * 12
    assert (found.unverified, found.too_new, found.too_old, found.unlabelled) == (0, 0, 0, 0)
    assert not found.went_back
    assert len({version for version, _, _ in spans(steps)}) > STEPS / 2, "the engines were updated"
    assert sum(entry["kind"] == "restore" for entry in rows) >= 3, "the trainer was killed twice"
