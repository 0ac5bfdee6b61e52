"""The tiers of one machine, with a run whose trainer is set aside: the benchmark decides when groups are wanted.

A real trainer brings the engines to the first version and is fenced by a session of ours. From then on `open_round`
admits a set number of groups, and `collect` takes them as a trainer would, without training.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import psutil
from google.protobuf import duration_pb2
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tetrarch.buffer.v1 import buffer_service_pb2 as buffer_pb
from tetrarch.buffer.v1 import run_pb2
from tetrarch.buffer.v1.buffer_service_pb2_grpc import BufferServiceStub
from tetrarch.rollout.v1 import engine_pb2
from tetrarch.rollout.v1 import rollout_service_pb2 as rollout_pb
from tetrarch.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from tetrarch.trainer.v1 import trainer_service_pb2 as trainer_pb
from tetrarch.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

from services.common.channel import open_channel
from services.common.devices import visible_gpus
from services.common.process import free_port
from services.common.run_spec import RunSpec
from services.console.core.placement import NO_WISH, deal
from services.console.supervisor import Patience, Supervisor, Tier
from services.console.tiers import Layout, Ports, embedded_tiers

ROUND_SECONDS = 300.0
_POLL = 0.01
_PERSISTENT = ("store", "buffer", "reward", "rollout")


@dataclass(frozen=True)
class Collected:
    """Groups of a round. `seconds`: from their admission until the last was ready; `tokens`: response tokens."""

    seconds: float
    groups: int
    samples: int
    tokens: int


class Serving:
    """See the module. Build it with `serving`."""

    def __init__(self, spec: RunSpec, tiers: Tiers) -> None:
        self.spec = spec
        self.round_groups = spec.rollout.rollout_batch_size * (spec.trainer.max_staleness + 1)
        self._tiers = tiers
        self._channels = {name: open_channel(tiers.addresses[name], name) for name in ("buffer", "rollout", "trainer")}
        self._buffer = BufferServiceStub(self._channels["buffer"])
        self._rollout = RolloutServiceStub(self._channels["rollout"])
        self._epoch = self._step = 0

    async def node(self) -> engine_pb2.Node:
        """The rollout node now."""
        return (await self._rollout.GetNode(rollout_pb.GetNodeRequest(), timeout=5)).node

    async def begin(self, timeout: float) -> None:
        """Has the trainer push its weights, and takes its place once they are published."""
        run_id = self.spec.run_id
        await self._buffer.CreateRun(
            buffer_pb.CreateRunRequest(run_id=run_id, spec_json=self.spec.model_dump_json()), timeout=60
        )
        trainer = TrainerServiceStub(self._channels["trainer"])
        await trainer.StartRun(trainer_pb.StartRunRequest(run_id=run_id), timeout=60)
        deadline = time.monotonic() + timeout
        while not (run := (await self._buffer.GetRun(buffer_pb.GetRunRequest(run_id=run_id))).run).policy_version:
            if run.state != run_pb2.RUN_STATE_ACTIVE:
                raise SystemExit(f"The run ended before an engine held its weights: {run.reason}")
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"No engine held verified weights after {timeout:.0f} s: {(await self.node()).problem}"
                )
            await asyncio.sleep(_POLL)
        answer = await self._buffer.BeginSession(buffer_pb.BeginSessionRequest(run_id=run_id, caller="benchmark"))
        self._epoch, self._step = answer.trainer_epoch, answer.run.committed_step + 1

    async def open_round(self) -> None:
        """Admits `round_groups` more groups."""
        run = {"run_id": self.spec.run_id, "trainer_epoch": self._epoch}
        version = (await self._buffer.ReserveVersion(buffer_pb.ReserveVersionRequest(**run))).version
        await self._buffer.PublishVersion(
            buffer_pb.PublishVersionRequest(**run, version=version, step_count=self._step)
        )

    async def collect(self, began: float) -> Collected:
        """Takes every group of the round; their time counts from `began` (time.monotonic())."""
        run = {"run_id": self.spec.run_id, "trainer_epoch": self._epoch}
        groups: set[str] = set()
        samples = tokens = 0
        ended = began
        while len(groups) < self.round_groups:
            if time.monotonic() - began > ROUND_SECONDS:
                raise SystemExit(f"{len(groups)} of {self.round_groups} groups came: {(await self.node()).problem}")
            request = buffer_pb.TakeBatchRequest(
                **run,
                step=self._step,
                group_count=self.round_groups - len(groups),
                max_wait=duration_pb2.Duration(seconds=5),
            )
            batch = (await self._buffer.TakeBatch(request, timeout=15)).samples
            if not batch:
                continue
            ended = time.monotonic()
            groups |= {sample.group_id for sample in batch}
            samples += len(batch)
            tokens += sum(sample.response_length for sample in batch)
            await self._buffer.CommitStep(buffer_pb.CommitStepRequest(**run, step=self._step))
            await self._buffer.RecordCheckpoint(buffer_pb.RecordCheckpointRequest(**run, step=self._step, path="none"))
            self._step += 1
        return Collected(ended - began, len(groups), samples, tokens)

    async def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds so far: of every tier's own process, the router, the engines, and this process."""
        engines = {engine.pid for engine in (await self.node()).engines}
        sums = {"this client": _cpu(psutil.Process())}
        for name in _PERSISTENT:
            process = psutil.Process(self._tiers.supervisor.pid(name))
            sums[name] = _cpu(process)
            for child in process.children(recursive=True) if name == "rollout" else ():
                with contextlib.suppress(psutil.Error):
                    above = {child.pid, *(parent.pid for parent in child.parents())}
                    kind = "engines" if above & engines else "router"
                    sums[kind] = sums.get(kind, 0.0) + _cpu(child)
        return sums

    async def calls(self) -> dict[str, tuple[float, float]]:
        """(seconds, count) by method of every call that buffer and reward service have answered."""
        found: dict[str, list[float]] = {}
        for name in ("buffer", "reward"):
            for sample in await scrape(self._tiers.metrics[name]):
                if sample.name in ("tetrarch_rpc_seconds_sum", "tetrarch_rpc_seconds_count"):
                    method = sample.labels["method"].rsplit("/", 1)[-1]
                    found.setdefault(method, [0.0, 0.0])[sample.name.endswith("_count")] += sample.value
        return {method: (seconds, count) for method, (seconds, count) in found.items()}

    async def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            await channel.close()


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@dataclass(frozen=True)
class Tiers:
    """Running tiers: their supervisor, host:port by tier, Prometheus ports by tier."""

    supervisor: Supervisor
    addresses: Mapping[str, str]
    metrics: Mapping[str, int]


def layout_in(directory: Path) -> Layout:
    """Tiers of this machine, with the GPUs it has dealt out to trainer and engines."""
    placement = deal(visible_gpus(), NO_WISH)
    return Layout(Ports.free(), directory / "store", directory / "logs", resume=False, placement=placement)


@contextlib.asynccontextmanager
async def started(layout: Layout, names: Sequence[str]) -> AsyncIterator[Tiers]:
    """The named tiers, stopped at the end."""
    metrics = {name: free_port() for name in names if name in ("buffer", "reward", "rollout")}

    def with_metrics(tier: Tier) -> Tier:
        flags = ("--set", f"metrics_port={metrics[tier.name]}") if tier.name in metrics else ()
        return replace(tier, argv=(*tier.argv, *flags))

    stages = [[with_metrics(tier) for tier in stage] for stage in embedded_tiers(layout, names)]
    supervisor = Supervisor(stages, layout.log_dir, on_note=print, patience=Patience(start=180.0))
    await supervisor.start()
    try:
        yield Tiers(supervisor, layout.ports.addresses, metrics)
    finally:
        await supervisor.stop()


async def scrape(port: int) -> Iterator[Sample]:
    """Every sample of a Prometheus endpoint."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        text = await answer.text()
    return (sample for family in text_string_to_metric_families(text) for sample in family.samples)


@contextlib.asynccontextmanager
async def serving(spec: RunSpec, start_seconds: float) -> AsyncIterator[Serving]:
    """Starts the tiers in the run's directory, brings the engines up, and stops everything at the end."""
    layout = layout_in(Path(spec.directory))
    async with started(layout, _PERSISTENT) as tiers:
        made = Serving(spec, tiers)
        async with started(layout, ("trainer",)) as trainer:
            try:
                await made.begin(start_seconds)
            finally:
                trainer.supervisor.hurry()
        yield made
        await made.close()
