"""Numeric verdict: a run whose trainer and ranks were killed ends with the very weights of a run that nobody disturbed.

Supervised training, and GRPO with max_staleness 0: every batch is made by the weights of its step, in the order of the
data, and the simulated engine answers by the bytes of its weights, whatever their version's number. Asynchronous
training takes what is ready, so that no two runs have equal batches: there only the ledger and the reward can be
compared (`benchmarks.soak`).
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tetrarch.buffer.v1 import run_pb2

from services.common.run_spec import RunSpec
from tests.support.embedded import Embedded, embedded_tiers_up

SECONDS = 200.0
KINDS = {
    "sft": {"trainer": {"loss_type": "sft_loss"}, "rollout": {"n_samples_per_prompt": 1}},
    "grpo": {},
}
STRIKES = {
    "sft": ("trainer.after_optimizer", "trainer.after_commit_step"),
    "grpo": ("trainer.before_optimizer", "rank.mid_checkpoint"),
}


async def undisturbed(tiers: Embedded, spec: RunSpec) -> dict[str, bytes]:
    """Weights of a run that is left alone."""
    await tiers.begin(spec)
    run = await tiers.end_of(spec, SECONDS)
    assert run.state == run_pb2.RUN_STATE_FINISHED, run.reason
    return exported(spec)


async def disturbed(tiers: Embedded, spec: RunSpec, points: tuple[str, ...]) -> dict[str, bytes]:
    """Weights of a run of which a process is killed at every point in turn."""
    await tiers.begin(spec)
    await tiers.steps(spec, 1, SECONDS)
    for point in points:
        os.kill((await tiers.caught(point, SECONDS))["pid"], signal.SIGKILL)
    run = await tiers.end_of(spec, SECONDS)
    assert run.state == run_pb2.RUN_STATE_FINISHED, run.reason
    restores = [entry["step"] for entry in tiers.history(spec) if entry["kind"] == "restore"]
    assert len(restores) == len(points) + 1
    return exported(spec)


def exported(spec: RunSpec) -> dict[str, bytes]:
    """Bytes of the exported weights, by file."""
    files = {path.name: path.read_bytes() for path in (Path(spec.directory) / "hf").glob("*.safetensors")}
    assert files
    return files


async def compare(directory: Path, kind: str) -> None:
    """Both runs on the same tiers."""
    async with embedded_tiers_up(directory) as tiers:
        whole = await undisturbed(tiers, tiers.spec(f"{kind}-whole", **KINDS[kind]))
        struck = await disturbed(tiers, tiers.spec(f"{kind}-struck", **KINDS[kind]), STRIKES[kind])
        assert struck == whole, kind
        first = (tiers.model / "model.safetensors").read_bytes()
        assert first not in whole.values(), f"{kind} changed nothing"


@pytest.mark.timeout(600)
async def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    await asyncio.gather(*(compare(tmp_path / kind, kind) for kind in KINDS))
