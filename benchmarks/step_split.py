"""`python -m benchmarks.step_split`: where a synchronous step's seconds go, and what share is not model compute.

Model compute is what the step would cost without Tetrarch: the engine generating the same batch for a bare client
(measured on the same engine right after the run), and the trainer's forward, backward and optimizer.

`--device cuda --model DIR` trains the word problems on GPUs. `--from RUN_DIR` splits the steps of a run that was made
before, of any kind; what a bare client would take is then left out.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tetrarch.buffer.v1 import (
    buffer_service_pb2,
    buffer_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
)
from tetrarch.rollout.v1 import rollout_service_pb2, rollout_service_pb2_grpc

from benchmarks.bare_client import flush, saturate
from benchmarks.report import Figure, finish, limit, parser
from benchmarks.workspace import add_device, fresh_id, history_of, tiers_up, train, workspace_for
from services.common.channel import open_channel
from services.common.convert import prompt_from_proto
from services.console.core.history import History

STEPS, WARM_UP, BARE_ROUNDS, LIMIT_SECONDS = 20, 5, 4, 3600
COMPUTE = ("train_forward_backward_seconds", "train_optimizer_seconds", "train_old_log_probs_seconds")
PARTS = {
    "  wait for groups (generate, score, buffer)": "wait_groups_seconds",
    "  plan": "plan_seconds",
    "  train": "train_seconds",
    "    of it fetching samples from the buffer": "train_fetch_seconds",
    "    of it packing": "train_pack_seconds",
    "    of it old log-probs": "train_old_log_probs_seconds",
    "    of it reference log-probs": "train_ref_log_probs_seconds",
    "    of it forward and backward": "train_forward_backward_seconds",
    "    of it optimizer": "train_optimizer_seconds",
    "    of it metrics": "train_metrics_seconds",
    "  commit": "commit_seconds",
    "  weight update": "update_weights_seconds",
    "    of it collecting the tensors": "update_stage_seconds",
    "    of it preparing the engines": "update_prepare_seconds",
    "    of it transfer": "update_transfer_seconds",
    "    of it checksums of what is sent": "update_checksums_seconds",
    "    of it commit (checksums compared)": "update_commit_seconds",
    "    of it publishing": "update_publish_seconds",
    "    generation paused": "update_pause_seconds",
    "  evaluation": "eval_seconds",
    "  checkpoint": "save_seconds",
    "  other": "other_seconds",
}


async def engine_url(buffer: str) -> str:
    """Address of the engine that still serves after the run."""
    async with open_channel(buffer, "buffer") as channel:
        registry = registry_service_pb2_grpc.RegistryServiceStub(channel)
        members = (await registry.ListMembers(registry_service_pb2.ListMembersRequest(tier="rollout"))).members
    async with open_channel(members[0].address, "rollout") as channel:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        return (await stub.GetNode(rollout_service_pb2.GetNodeRequest())).node.engines[0].url


async def prompts_of(buffer: str, run_id: str, step: int) -> list[list[int]]:
    """Prompt tokens of the groups that a step trained."""
    async with open_channel(buffer, "buffer") as channel:
        stub = buffer_service_pb2_grpc.BufferServiceStub(channel)
        request = buffer_service_pb2.ListGroupsRequest(run_id=run_id, step=step, page_size=500)
        groups = (await stub.ListGroups(request)).groups
        found = []
        for group in groups:
            answer = await stub.GetGroup(buffer_service_pb2.GetGroupRequest(run_id=run_id, group_id=group.group_id))
            found.append(prompt_from_proto(answer.prompt).tokens.tolist())
        return found


async def bare_generation(buffer: str, run_id: str, steps: int, sampling: Mapping[str, Any]) -> list[float]:
    """Seconds in which a bare client gets the batches of the last steps from the engine, the first one left out."""
    url, seconds = await engine_url(buffer), []
    for step in range(steps - BARE_ROUNDS, steps):
        await flush(url)
        bodies = [
            {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
            for tokens in await prompts_of(buffer, run_id, step)
        ]
        seconds.append((await saturate(url, bodies, len(bodies), timeout=120)).seconds)
    return seconds[1:]


def figures_of(history: History, bare: float | None) -> list[Figure]:
    """The split, over the steps after the warm-up and before the last (which saves and evaluates)."""

    def mean(name: str) -> float | None:
        values = [value for _, value in history.series(name)][WARM_UP:-1]
        return statistics.fmean(values) if values else None

    total = mean("total_seconds")
    if not total:
        raise SystemExit(f"The run has too few steps: {WARM_UP + 2} are the fewest.")
    groups = mean("rollout_finished_group_count") or 1.0
    tokens = mean("rollout_generated_token_count") or 0.0
    figures = [Figure("step", total, "s"), Figure("response tokens of a step", tokens)]
    figures += [Figure(label, value, "s") for label, key in PARTS.items() if (value := mean(key)) is not None]
    figures.append(Figure("scoring, mean of a group", (mean("rollout_score_seconds") or 0.0) / groups, "s"))
    if bare is not None:
        compute = bare + sum(mean(name) or 0.0 for name in COMPUTE)
        figures += [
            Figure("the same batch, bare client on the same engine", bare, "s"),
            Figure("share that is not model compute", 1 - compute / total),
        ]
    return figures


def main() -> int:
    """Command line entry."""
    arguments = parser(__doc__ or "")
    add_device(arguments)
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--from", dest="source", type=Path, metavar="RUN_DIR")
    chosen = arguments.parse_args()
    limit(LIMIT_SECONDS)
    if chosen.source:
        history = history_of(chosen.source)
        return finish("step_split", figures_of(history, None), chosen.json, run=chosen.source.name)
    workspace = workspace_for(chosen.device, chosen.model)
    run_id = fresh_id(workspace, "split")
    steps = str(chosen.steps)
    with tiers_up(workspace) as running:
        flags = ("--num-rollout", steps, "--eval-interval", steps, "--save-interval", steps, "--no-eval-before-train")
        run = train(workspace, workspace.grpo(run_id, *flags), run_id)
        rollout = run.settings.rollout
        sampling = {
            "temperature": rollout.rollout_temperature,
            "max_new_tokens": rollout.rollout_max_response_len,
            "n": rollout.n_samples_per_prompt,
        }
        bare = asyncio.run(bare_generation(running.addresses["buffer"], run_id, chosen.steps, sampling))
    figures = figures_of(run.history, statistics.median(bare))
    return finish("step_split", figures, chosen.json, device=chosen.device, run=run_id, steps=chosen.steps)


if __name__ == "__main__":
    raise SystemExit(main())
