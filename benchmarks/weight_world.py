"""One side each of a weight update, and nothing else of a run: a rollout node with its engines, one trainer's rank.

The processes, the RPCs and the code of a run, without its training. `weight_update` measures speed in it,
`weight_faults` what a death in mid-transfer costs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tetrarch.buffer.v1 import buffer_service_pb2 as buffer_pb
from tetrarch.buffer.v1.buffer_service_pb2_grpc import BufferServiceStub
from tetrarch.rollout.v1 import engine_pb2
from tetrarch.rollout.v1 import rollout_service_pb2 as rollout_pb
from tetrarch.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

from benchmarks.random_qwen3 import SHAPES
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
from services.trainer.core.commands import Checksums, Command, ListWeights, Setup, Shutdown
from services.trainer.core.records import EngineView
from services.trainer.core.weights import UpdateSettings, WeightUpdater

RUN = "weight-update"
START_SECONDS = 400.0
UPDATE_SECONDS = 60.0
_CUDA_ENGINE = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "cuda_graph_backend_prefill": "disabled",
    "disable_cuda_graph": True,
    "max_total_tokens": 50000,
}
"""Few requests are served, so engines take less time and memory to start."""


@dataclass(frozen=True)
class Wanted:
    """What is to be brought up."""

    device: str
    engine: str
    engine_count: int
    model: Path
    bucket_bytes: int
    more: Mapping[str, Any]
    """Further settings of the run's rollout part."""


class RememberedRanks(LocalRanks):
    """A rank whose last command for checksums is kept, so that it can be given before a transfer."""

    checksums: Checksums | None = None

    async def call(self, rank: int, command: Command, timeout: float) -> Any:
        if isinstance(command, Checksums):
            self.checksums = command
        return await super().call(rank, command, timeout)

    async def finish(self, timeout: float) -> None:
        """Returns when the staged weights are gathered and their checksums made."""
        await self.call(0, ListWeights(), timeout)  # comes after what is gathered
        if self.checksums:
            await self.call(0, self.checksums, timeout)


@dataclass(frozen=True)
class World:
    """Both sides."""

    addresses: Mapping[str, str]
    rollout: GrpcRollout
    ranks: RememberedRanks
    updater: WeightUpdater
    envs: tuple[Mapping[str, str], Mapping[str, str]]
    """Environments of trainer and engines: their devices."""
    logs: Path

    async def engines(self, count: int, timeout: float = START_SECONDS) -> list[EngineView]:
        """The engines that can take weights, once there are `count`. Raises SystemExit when there are fewer in time."""
        deadline, problem = time.monotonic() + timeout, ""
        while time.monotonic() < deadline:
            for listed in await self.rollout.nodes():
                problem = listed.problem or problem
                up = [engine for engine in listed.engines if engine.joinable]
                if listed.run_id == RUN and len(up) >= count:
                    return up
            await asyncio.sleep(0.1)
        raise SystemExit(f"Fewer than {count} engines are up after {timeout:.0f} s. {problem}")

    async def node(self) -> engine_pb2.Node:
        """The rollout node as it describes itself."""
        async with open_channel(self.addresses["rollout"], "rollout") as channel:
            return (await RolloutServiceStub(channel).GetNode(rollout_pb.GetNodeRequest(), timeout=10)).node


def add_arguments(made: argparse.ArgumentParser) -> None:
    """Adds the choice of device, engine and model."""
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--engine", choices=("sglang", "simulated"), help="simulated on the CPU, sglang on CUDA")
    made.add_argument("--model", type=Path, help="Hugging Face checkpoint; a random one without it")
    made.add_argument("--tokenizer", type=Path, help="directory with a tokenizer for the random one")


def random_model(directory: Path, size: str, tokenizer: Path | None) -> Path:
    """A checkpoint of random weights, made in a process of its own so that its memory is given back."""
    if size not in SHAPES:
        raise SystemExit(f"There is no random model {size!r}; use one of {', '.join(SHAPES)}.")
    argv = [sys.executable, "-W", "ignore", "-m", "benchmarks.random_qwen3", str(directory), "--size", size]
    if tokenizer:
        argv += ["--tokenizer", str(tokenizer)]
    subprocess.run(argv, check=True, cwd=ROOT, timeout=300)
    return directory


def _spec(wanted: Wanted, directory: Path) -> RunSpec:
    directory.mkdir(parents=True, exist_ok=True)
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"input": "1+1="}\n')
    cuda = wanted.device == "cuda"
    engine = _CUDA_ENGINE | {"mem_fraction_static": round(0.7 / wanted.engine_count, 2)} if cuda else {}
    return RunSpec.model_validate(
        {
            "run_id": RUN,
            "run_dir": str(directory),
            "data": {"prompt_data": str(prompts)},
            "rollout": {
                "hf_checkpoint": str(wanted.model),
                "engine": wanted.engine,
                "device": wanted.device,
                "num_rollout": 1,
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 2,
                "rollout_max_response_len": 16,
                "rollout_num_gpus": wanted.engine_count,
                "sglang": engine,
                **wanted.more,
            },
            "trainer": {
                "bf16": cuda,
                "update_weight_buffer_size": wanted.bucket_bytes,
                "update_timeout": UPDATE_SECONDS,
            },
        }
    )


@asynccontextmanager
async def _node(directory: Path, placement: Placement) -> AsyncIterator[dict[str, str]]:
    """Store, buffer, reward service and rollout node; → their addresses."""
    layout = Layout(Ports.free(), directory / "store", directory / "logs", resume=False, placement=placement)
    names = ("store", "buffer", "reward", "rollout")
    tiers = Supervisor(embedded_tiers(layout, names), layout.log_dir, on_note=print, patience=Patience(start=120.0))
    await tiers.start()
    try:
        yield layout.ports.addresses
    finally:
        await tiers.stop()


async def _begin(address: str, spec: RunSpec) -> int:
    """Creates the run; → the session's epoch."""
    async with open_channel(address, "buffer") as channel:
        stub = BufferServiceStub(channel)
        await stub.CreateRun(buffer_pb.CreateRunRequest(run_id=RUN, spec_json=spec.model_dump_json()), timeout=60)
        request = buffer_pb.BeginSessionRequest(run_id=RUN, caller="benchmark")
        return (await stub.BeginSession(request, timeout=60)).trainer_epoch


@asynccontextmanager
async def _trainer_rank(
    spec: RunSpec, logs: Path, env: Mapping[str, str]
) -> AsyncIterator[tuple[RememberedRanks, Any]]:
    """One rank with the model on it, and what it says of itself."""
    ranks = RememberedRanks(1, logs)
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


def _placement(wanted: Wanted) -> Placement:
    gpus = visible_gpus() if wanted.device == "cuda" else ()
    if wanted.device == "cuda" and len(gpus) < 2:
        raise SystemExit(f"--device cuda needs two GPUs, one for each side; there are {len(gpus)}.")
    return deal(gpus, NO_WISH, (1, 1)) if gpus else NO_GPUS


@asynccontextmanager
async def started(wanted: Wanted, directory: Path) -> AsyncIterator[World]:
    """Both sides, stopped at the end. On CUDA the trainer is on the first GPU and all engines share the second."""
    placement, spec = _placement(wanted), _spec(wanted, directory)
    envs = (placement.env("trainer", os.environ), placement.env("rollout", os.environ))
    async with _node(directory, placement) as addresses:
        epoch = await _begin(addresses["buffer"], spec)

        async def where() -> list[str]:
            return [addresses["rollout"]]

        rollout = GrpcRollout(where)
        async with _trainer_rank(spec, directory / "logs", envs[0]) as (ranks, setup):
            settings = UpdateSettings(
                run_id=RUN,
                session_epoch=epoch,
                bucket_bytes=wanted.bucket_bytes,
                group_size=1,
                timeout=UPDATE_SECONDS,
                join_timeout=UPDATE_SECONDS,
                stage_timeout=120.0,
                address="127.0.0.1",
                free_port=free_port,
            )
            updater = WeightUpdater(ranks, rollout, setup, settings)
            yield World(addresses, rollout, ranks, updater, envs, directory / "logs")
        await rollout.close()
