"""PPO struck at every moment at which actor and critic could come apart: the run ends with the very weights of a run
that nobody disturbed, and at no time is there a checkpoint with one of the two.

Who stands at a point is killed: a rank of either side, or the controller with all ranks.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tetrarch.buffer.v1 import run_pb2

from services.common.run_spec import RunSpec
from tests.faults.test_same_weights import SECONDS, exported, undisturbed
from tests.support.embedded import Embedded, embedded_tiers_up

PPO = {
    "trainer": {
        "advantage_estimator": "ppo",
        "critic_lr": 3e-3,
        "num_critic_only_steps": 1,
        "kl_coef": 0.01,
        "lambd": 0.9,
        "normalize_advantages": True,
    }
}
STRIKES: tuple[tuple[str, dict[str, str]], ...] = (
    ("critic.valued", {}),
    ("rank.mid_checkpoint", {"part": "critic"}),
    ("critic.saved", {}),
    ("rank.mid_checkpoint", {"part": "actor"}),
    ("rank.critic_joined", {}),
    ("critic.before_training", {}),
    ("critic.before_optimizer", {}),
    ("rank.before_latest", {}),
)
"""Between deaths of ranks with no step in between, of which three end a run, the controller is struck."""
OF_CRITIC = ("value_loss", "explained_variance", "value_mean", "critic_grad_norm")


def last_step(tiers: Embedded, spec: RunSpec) -> dict[str, Any]:
    """The critic's numbers of the last step, which follow from all its training before."""
    *_, last = (entry for entry in tiers.history(spec) if entry["kind"] == "step")
    return {name: last[name] for name in OF_CRITIC}


def whole_checkpoints(spec: RunSpec) -> int:
    """Checkpoints that can be seen; all of them have both parts."""
    found = list(Path(spec.trainer.save).glob("step_*"))
    for path in found:
        assert (path / "metadata.json").exists(), path
        assert (path / "critic" / "metadata.json").exists(), path
    return len(found)


@pytest.mark.timeout(900)
async def test_a_struck_run_ends_as_an_undisturbed_one(tmp_path):
    async with embedded_tiers_up(tmp_path) as tiers:
        whole = tiers.spec("ppo-whole", **PPO)
        weights = await undisturbed(tiers, whole)
        assert whole_checkpoints(whole) == 3
        spec = tiers.spec("ppo-struck", **PPO)
        await tiers.begin(spec)
        await tiers.steps(spec, 1, SECONDS)
        for point, labels in STRIKES:
            os.kill((await tiers.caught(point, SECONDS, **labels))["pid"], signal.SIGKILL)
            whole_checkpoints(spec)
        run = await tiers.end_of(spec, SECONDS)
        assert run.state == run_pb2.RUN_STATE_FINISHED, run.reason
        assert exported(spec) == weights
        assert last_step(tiers, spec) == last_step(tiers, whole)
        assert whole_checkpoints(spec) == 3
        assert [entry["kind"] for entry in tiers.history(spec)].count("restore") == len(STRIKES) + 1
