"""`python -m benchmarks.weight_update`: what it takes to bring an engine to the trainer's weights, part by part.

A rollout node with one engine, and a trainer's rank with everything that moves its weights: the processes, the RPCs
and the code of a run, without its training. Updates follow each other while the engine is idle; the first, in which
the weight group is made, is shown apart. In the same run two processes of ours broadcast the same bytes in the same
buckets over the same devices, with nothing else: the bare broadcast.

CPU: a rehearsal with a tiny model over gloo. CUDA: `--model DIR` or `--random-qwen3 4b`, trainer on the first GPU,
engine on the second, over NCCL.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tetrarch.buffer.v1 import buffer_service_pb2 as buffer_pb
from tetrarch.buffer.v1.buffer_service_pb2_grpc import BufferServiceStub
from tetrarch.rollout.v1 import rollout_service_pb2 as rollout_pb
from tetrarch.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

from benchmarks import bare_broadcast
from benchmarks.report import Figure, finish, parser
from examples.first_run.__main__ import ROOT
from services.common.channel import open_channel
from services.common.devices import visible_gpus
from services.common.process import free_port
from services.common.run_spec import RunSpec
from services.console.core.placement import NO_GPUS, NO_WISH, Placement, deal
from services.console.supervisor import Patience, Supervisor
from services.console.tiers import Layout, Ports, embedded_tiers
from services.trainer.adapters.local_ranks import LocalRanks
from services.trainer.adapters.rollout_client import GrpcRollout
from services.trainer.core.commands import Setup, Shutdown
from services.trainer.core.records import EngineView
from services.trainer.core.weights import UpdateReport, UpdateSettings, WeightUpdater

RUN = "weight-update"
PARTS = ("stage", "prepare", "checksums", "transfer", "commit")
LIMIT_SECONDS = 900.0
START_SECONDS = 400.0
CUDA_ENGINE = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "cuda_graph_backend_prefill": "disabled",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.5,
    "max_total_tokens": 50000,
}
"""No request is served, so the engine takes less time and memory to start."""


@dataclass
class Measured:
    """Updates in order with their seconds by part, and what was measured beside them."""

    updates: list[dict[str, float]] = field(default_factory=list)
    reports: list[UpdateReport] = field(default_factory=list)
    check: float = 0.0
    """Seconds of the engine's checksums alone."""
    bare: list[float] = field(default_factory=list)

    def median(self, part: str) -> float:
        """Over all updates but the first."""
        return statistics.median(update[part] for update in self.updates[1:])


def run_spec(chosen: Namespace, model: Path, directory: Path) -> RunSpec:
    """A run that asks for one engine and one rank."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"input": "1+1="}\n')
    cuda = chosen.device == "cuda"
    return RunSpec.model_validate(
        {
            "run_id": RUN,
            "run_dir": str(directory),
            "data": {"prompt_data": str(prompts)},
            "rollout": {
                "hf_checkpoint": str(model),
                "engine": chosen.engine,
                "device": chosen.device,
                "num_rollout": 1,
                "rollout_batch_size": 1,
                "rollout_max_response_len": 16,
                "sglang": CUDA_ENGINE if cuda else {},
            },
            "trainer": {
                "bf16": cuda,
                "update_weight_buffer_size": int(chosen.bucket_mib * 2**20),
                "update_timeout": 60,
            },
        }
    )


@asynccontextmanager
async def node(directory: Path, placement: Placement) -> AsyncIterator[dict[str, str]]:
    """Store, buffer, reward service and rollout node; → their addresses."""
    layout = Layout(Ports.free(), directory / "store", directory / "logs", resume=False, placement=placement)
    names = ("store", "buffer", "reward", "rollout")
    tiers = Supervisor(embedded_tiers(layout, names), layout.log_dir, on_note=print, patience=Patience(start=120.0))
    await tiers.start()
    try:
        yield layout.ports.addresses
    finally:
        await tiers.stop()


async def begin(address: str, spec: RunSpec) -> int:
    """Creates the run; → the session's epoch."""
    async with open_channel(address, "buffer") as channel:
        stub = BufferServiceStub(channel)
        request = buffer_pb.CreateRunRequest(run_id=RUN, spec_json=spec.model_dump_json())
        await stub.CreateRun(request, timeout=60)
        return (await stub.BeginSession(buffer_pb.BeginSessionRequest(run_id=RUN, caller="benchmark"))).trainer_epoch


@asynccontextmanager
async def trainer_rank(spec: RunSpec, directory: Path, env: dict[str, str]) -> AsyncIterator[tuple[LocalRanks, Any]]:
    """One rank with the model on it, and what it says of itself."""
    ranks = LocalRanks(1, directory / "logs")
    before = dict(os.environ)
    os.environ.update(env)  # the rank inherits it
    try:
        await ranks.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        (setup,) = await ranks.call_all(Setup(spec.model_dump_json(), spec.rollout.device), START_SECONDS)
        yield ranks, setup
        await ranks.call_all(Shutdown(), 20.0)
    finally:
        await ranks.stop()


async def engine_of(rollout: GrpcRollout) -> EngineView:
    """The engine as its node lists it now. Raises SystemExit when there is none in time."""
    deadline, problem = time.monotonic() + START_SECONDS, ""
    while time.monotonic() < deadline:
        for listed in await rollout.nodes():
            problem = listed.problem or problem
            if listed.run_id == RUN and (up := [engine for engine in listed.engines if engine.joinable]):
                return up[0]
        await asyncio.sleep(0.5)
    raise SystemExit(f"No engine came up within {START_SECONDS:.0f} s. {problem}")


async def check_seconds(address: str) -> float:
    """Seconds in which the idle engine goes through all it holds; median of three."""
    async with open_channel(address, "rollout") as channel:
        listed = (await RolloutServiceStub(channel).GetNode(rollout_pb.GetNodeRequest(), timeout=10)).node
    seconds = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        for _ in range(3):
            began = time.monotonic()
            async with session.post(f"{listed.engines[0].url}/weights_checker", json={"action": "checksum"}) as answer:
                answer.raise_for_status()
                await answer.read()
            seconds.append(time.monotonic() - began)
    return statistics.median(seconds)


async def one_update(updater: WeightUpdater, rollout: GrpcRollout, version: int, measured: Measured) -> None:
    """Stage and push, as after a training step."""
    engine = await engine_of(rollout)
    began = time.monotonic()
    staged = await updater.stage()
    report = await updater.push(version, [engine])
    seconds = time.monotonic() - began
    if report.failed:
        raise SystemExit(f"Update {version} failed: {report.failed[engine.engine_id]}")
    measured.reports.append(report)
    measured.updates.append(report.seconds | {"stage": staged, "pause": report.pause_seconds, "total": seconds})


async def measure(chosen: Namespace, model: Path, directory: Path) -> Measured:
    """All of it."""
    spec = run_spec(chosen, model, directory)
    gpus = visible_gpus() if chosen.device == "cuda" else ()
    if chosen.device == "cuda" and len(gpus) < 2:
        raise SystemExit(f"--device cuda needs two GPUs, one for each side; there are {len(gpus)}.")
    placement = deal(gpus, NO_WISH, (1, 1)) if gpus else NO_GPUS
    envs = [placement.env(tier, os.environ) for tier in ("trainer", "rollout")]
    measured = Measured()
    async with node(directory, placement) as addresses:
        epoch = await begin(addresses["buffer"], spec)

        async def where() -> list[str]:
            return [addresses["rollout"]]

        rollout = GrpcRollout(where)
        async with trainer_rank(spec, directory, envs[0]) as (ranks, setup):
            settings = UpdateSettings(
                RUN, epoch, spec.trainer.update_weight_buffer_size, 1, 60.0, 60.0, 120.0, "127.0.0.1", free_port
            )
            updater = WeightUpdater(ranks, rollout, setup, settings)
            for version in range(1, chosen.updates + 2):
                await one_update(updater, rollout, version, measured)
            measured.check = await check_seconds(addresses["rollout"])
            sizes = [sum(spec.size_bytes for spec in bucket) for bucket in updater.plan.buckets]
            backend = "nccl" if gpus else "gloo"
            measured.bare = await bare_broadcast.measure(backend, chosen.updates + 1, sizes, envs, directory / "logs")
        await rollout.close()
    return measured


def figures_of(measured: Measured, cuda: bool) -> list[Figure]:
    """Seconds, rates and shares; bars on CUDA alone."""
    size = measured.reports[0].total_bytes
    bare = statistics.median(measured.bare[1:])
    whole, transfer = measured.median("total"), measured.median("transfer")
    bar = ("<= 0.5" if size < 1e9 else "<= 3") if cuda else ""
    verified = min(report.verified_tensor_count for report in measured.reports)
    kept = sum(report.new_group_count for report in measured.reports[1:])
    return [
        Figure("bytes", size / 1e9, "GB"),
        Figure("buckets", measured.reports[0].bucket_count),
        Figure("first update (its group is made)", measured.updates[0]["total"], "s"),
        Figure("update, median of the later ones", whole, "s", bar),
        *(Figure(f"  {part}", measured.median(part), "s") for part in PARTS),
        Figure("  generation paused (transfer and commit)", measured.median("pause"), "s"),
        Figure("engine's checksums alone, part of commit", measured.check, "s"),
        Figure("transfer rate", size / transfer / 1e9, "GB/s"),
        Figure("rate of the whole update", size / whole / 1e9, "GB/s"),
        Figure("bare broadcast of the same buckets", bare, "s"),
        Figure("bare broadcast rate", size / bare / 1e9, "GB/s"),
        Figure("share of bare: transfer", bare / transfer),
        Figure("share of bare: whole update", bare / whole),
        Figure("tensors verified by checksum, fewest in an update", verified, "", ">= 1"),
        Figure("groups made after the first update", kept, "", "== 0"),
    ]


def model_of(chosen: Namespace, directory: Path) -> Path:
    """The given model, or one made in the benchmark's directory."""
    if chosen.model:
        return chosen.model.resolve()
    size = chosen.random_qwen3 or ("tiny" if chosen.device == "cpu" else "4b")
    argv = [sys.executable, "-W", "ignore", "-m", "benchmarks.random_qwen3", str(directory / "model"), "--size", size]
    if chosen.tokenizer:
        argv += ["--tokenizer", str(chosen.tokenizer)]
    subprocess.run(argv, check=True, cwd=ROOT, timeout=300)
    return directory / "model"


def main() -> int:
    """Command line entry."""
    made = parser(__doc__)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--engine", choices=("sglang", "simulated"), default="sglang")
    made.add_argument("--model", type=Path, help="Hugging Face checkpoint; a random one without it")
    made.add_argument("--random-qwen3", choices=("tiny", "0.6b", "4b"), help="size of the random one")
    made.add_argument("--tokenizer", type=Path, help="directory with a tokenizer for the random one")
    made.add_argument("--updates", type=int, default=5, help="measured updates, after the first")
    made.add_argument("--bucket-mib", type=float, help="update_weight_buffer_size; 512, or 0.5 on a CPU")
    chosen = made.parse_args()
    chosen.bucket_mib = chosen.bucket_mib or (512.0 if chosen.device == "cuda" else 0.5)
    directory = Path(tempfile.mkdtemp(prefix="tetrarch-weight-update-"))
    try:
        model = model_of(chosen, directory)
        measured = asyncio.run(asyncio.wait_for(measure(chosen, model, directory), LIMIT_SECONDS))
    except BaseException:
        print(f"Logs are in {directory / 'logs'}.", file=sys.stderr)
        shutil.rmtree(directory / "model", ignore_errors=True)
        raise
    shutil.rmtree(directory)
    context = {"device": chosen.device, "engine": chosen.engine, "bucket_mib": chosen.bucket_mib}
    config = json.loads((chosen.model / "config.json").read_text()) if chosen.model else {}
    context["model"] = config.get("architectures", [f"random {chosen.random_qwen3 or 'default'}"])[0]
    context |= {"updates": measured.updates, "bare_seconds": measured.bare}
    return finish("weight_update", figures_of(measured, chosen.device == "cuda"), chosen.json, **context)


if __name__ == "__main__":
    raise SystemExit(main())
