"""`python -m benchmarks.step_split`: where a synchronous step's seconds go, and what share is not model compute.

Model compute is what the step would cost without Tetrarch: the engine generating the same batch for a bare client
(measured on the same engine right after the run), and the trainer's forward, backward and optimizer.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
from tetrarch.buffer.v1 import registry_service_pb2, registry_service_pb2_grpc
from tetrarch.rollout.v1 import rollout_service_pb2, rollout_service_pb2_grpc

from benchmarks.report import Figure, finish, parser
from benchmarks.workspace import fresh_id, sft_workspace, train
from examples.first_run.__main__ import ROOT, Workspace
from services.common.channel import open_channel
from services.console.state import StateDir

STEPS, WARM_UP, BATCH, SAMPLES = 20, 5, 32, 8
COMPUTE = ("train_forward_backward_seconds", "train_optimizer_seconds", "train_old_log_probs_seconds")


async def engine_url(buffer: str) -> str:
    """Address of the engine that still serves after the run."""
    async with open_channel(buffer, "buffer") as channel:
        registry = registry_service_pb2_grpc.RegistryServiceStub(channel)
        members = (await registry.ListMembers(registry_service_pb2.ListMembersRequest(tier="rollout"))).members
    async with open_channel(members[0].address, "rollout") as channel:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        return (await stub.GetNode(rollout_service_pb2.GetNodeRequest())).node.engines[0].url


async def bare_generation(url: str, prompts: list[str], rounds: int = 5) -> float:
    """Median seconds in which a bare client gets one batch from the engine."""

    async def one(session: aiohttp.ClientSession, prompt: str) -> None:
        sampling = {"temperature": 1.0, "max_new_tokens": 8, "n": SAMPLES}
        body = {"text": prompt, "sampling_params": sampling, "return_logprob": True}
        async with session.post(f"{url}/generate", json=body) as answer:
            answer.raise_for_status()
            await answer.read()

    seconds = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
        for number in range(rounds):
            started = time.monotonic()
            batch = prompts[number * BATCH : (number + 1) * BATCH]
            await asyncio.gather(*(one(session, prompt) for prompt in batch))
            seconds.append(time.monotonic() - started)
    return statistics.median(seconds[1:])


def prompts_of(workspace: Workspace) -> list[str]:
    """Prompts as the chat template renders them."""
    rows = map(json.loads, (workspace.path / "data" / "train.jsonl").read_text().splitlines())
    return [f"<bos>{row['prompt'][0]['content']}=" for row in rows]


def main() -> int:
    """Command line entry."""
    chosen = parser(__doc__).parse_args()
    workspace = sft_workspace(1)
    run_id = fresh_id(workspace, "split")
    state = StateDir(workspace.state)
    up = [sys.executable, "-m", "services.console", "up", "--state-dir", str(workspace.state)]
    log = Path(workspace.path / "up.log").open("a")  # noqa: SIM115 - the child keeps it
    tiers = subprocess.Popen(up, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 90
        while not state.running() and time.monotonic() < deadline and tiers.poll() is None:
            time.sleep(0.2)
        flags = ("--num-rollout", str(STEPS), "--eval-interval", str(STEPS), "--no-eval-before-train")
        run = train(workspace, workspace.grpo(run_id, *flags), run_id)
        buffer = state.running().addresses["buffer"]
        bare = asyncio.run(_bare(buffer, workspace))
    finally:
        tiers.terminate()
        tiers.wait(60)

    def mean(name: str) -> float:
        values = [value for _, value in run.history.series(name)][WARM_UP:-1]
        return statistics.fmean(values) if values else 0.0

    total = mean("total_seconds")
    compute = bare + sum(mean(name) for name in COMPUTE)
    groups = BATCH
    figures = [
        Figure("step", total, "s"),
        Figure("  wait for groups (generate, score, buffer)", mean("wait_groups_seconds"), "s"),
        Figure("    of it scoring, mean of a group", mean("rollout_score_seconds") / groups, "s"),
        Figure("    the same batch, bare client on the same engine", bare, "s"),
        Figure("  train", mean("train_seconds"), "s"),
        Figure("    of it forward and backward", mean("train_forward_backward_seconds"), "s"),
        Figure("    of it optimizer", mean("train_optimizer_seconds"), "s"),
        Figure("    of it old log-probs", mean("train_old_log_probs_seconds"), "s"),
        Figure("    of it fetching samples from the buffer", mean("train_fetch_seconds"), "s"),
        Figure("  weight update (sync)", mean("update_weights_seconds"), "s"),
        Figure("    of it generation paused", mean("update_pause_seconds"), "s"),
        Figure("  commit", mean("commit_seconds"), "s"),
        Figure("  plan", mean("plan_seconds"), "s"),
        Figure("  other", mean("other_seconds"), "s"),
        Figure("share that is not model compute", 1 - compute / total),
    ]
    return finish("step_split", figures, chosen.json, steps=STEPS, samples_per_step=BATCH * SAMPLES)


async def _bare(buffer: str, workspace: Workspace) -> float:
    return await bare_generation(await engine_url(buffer), prompts_of(workspace))


if __name__ == "__main__":
    raise SystemExit(main())
