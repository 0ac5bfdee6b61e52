"""`python -m benchmarks.engine_kill [--device cuda --model DIR]`: one of two engines is SIGKILLed while it serves.

Training must go on, the router must stop using the engine, the engine must come back with the current weights, and at
the end every prompt of the steps must have been trained exactly once.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import signal
import statistics
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from tetrarch.buffer.v1 import buffer_service_pb2 as buffer_pb
from tetrarch.buffer.v1 import run_pb2
from tetrarch.buffer.v1.buffer_service_pb2_grpc import BufferServiceStub
from tetrarch.rollout.v1 import engine_pb2
from tetrarch.rollout.v1 import rollout_service_pb2 as rollout_pb
from tetrarch.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from tetrarch.trainer.v1 import trainer_service_pb2 as trainer_pb
from tetrarch.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

from benchmarks.checkpoints import endless_copy, random_model
from benchmarks.report import Figure, finish, limit, parser
from benchmarks.run_files import bare_settings, write_prompts
from benchmarks.serving import Tiers, layout_in, scrape, started
from benchmarks.workspace import BENCH_DIR
from examples.first_run.__main__ import CONFIGS
from services.common.channel import open_channel
from services.common.run_spec import RunSpec
from services.console.core.history import METRICS_FILE
from services.console.tiers import ALL

RUN_FILES = {"cpu": "first_run_grpo.yaml", "cuda": "smollm2_grpo.yaml"}
STEPS = {"simulated": 30, "cpu": 70, "cuda": 300}
STOP_AFTER = {"cpu": None, "cuda": 5}
"""Steps with the engine back, after which the run is stopped; None trains the whole epoch."""
KILL_AFTER = 6
START_SECONDS, END_SECONDS, LIMIT_SECONDS = 400.0, 420.0, 1800
_POLL = 0.05
_COUNTERS = ("retried_request_count", "continued_sample_count", "failed_group_count", "lost_lease_count")


@dataclass
class Outage:
    """Seconds since the kill; None while it has not happened. `killed_at` is wall time."""

    engine_id: str
    killed_at: float
    groups_in_flight: int
    out_of_router: float | None = None
    up: float | None = None
    serving: float | None = None
    version: int = 0
    published: int = 0
    said_by_engine: str = ""
    counted: dict[str, float] = field(default_factory=dict)
    """What node and router counted during the outage."""


@dataclass(frozen=True)
class Trained:
    """When each step ended, in wall time; how often every row was trained; how many prompts were given up."""

    ends: list[float]
    rows: collections.Counter[int]
    evicted: int


class Watched:
    """A run and its node, seen from outside."""

    def __init__(self, spec: RunSpec, tiers: Tiers) -> None:
        self.spec = spec
        self._tiers = tiers
        self._channels = {name: open_channel(tiers.addresses[name], name) for name in ("buffer", "rollout", "trainer")}
        self.buffer = BufferServiceStub(self._channels["buffer"])
        self._rollout = RolloutServiceStub(self._channels["rollout"])

    async def start(self) -> None:
        """Creates the run and has it trained."""
        spec_json = self.spec.model_dump_json()
        await self.buffer.CreateRun(
            buffer_pb.CreateRunRequest(run_id=self.spec.run_id, spec_json=spec_json), timeout=60
        )
        trainer = TrainerServiceStub(self._channels["trainer"])
        await trainer.StartRun(trainer_pb.StartRunRequest(run_id=self.spec.run_id), timeout=60)

    async def stop_after(self, steps: int) -> None:
        """Has the trainer end the run when so many more steps are done."""
        until, deadline = len(self.steps()) + steps, time.monotonic() + END_SECONDS
        while len(self.steps()) < until and (await self.run()).state == run_pb2.RUN_STATE_ACTIVE:
            if time.monotonic() > deadline:
                raise SystemExit(f"No {steps} steps came: {(await self.node()).problem or 'the node sees no problem'}")
            await asyncio.sleep(_POLL)
        trainer = TrainerServiceStub(self._channels["trainer"])
        await trainer.StopRun(trainer_pb.StopRunRequest(run_id=self.spec.run_id), timeout=60)

    async def evicted(self) -> int:
        """Prompts that were given up."""
        request = buffer_pb.GetStatsRequest(run_id=self.spec.run_id)
        return (await self.buffer.GetStats(request, timeout=10)).stats.evicted_count

    async def run(self) -> run_pb2.Run:
        """The run now."""
        return (await self.buffer.GetRun(buffer_pb.GetRunRequest(run_id=self.spec.run_id), timeout=10)).run

    async def node(self) -> engine_pb2.Node:
        """The rollout node now."""
        return (await self._rollout.GetNode(rollout_pb.GetNodeRequest(), timeout=10)).node

    def steps(self) -> list[float]:
        """When each step ended, in wall time."""
        with contextlib.suppress(FileNotFoundError):
            rows = map(json.loads, (Path(self.spec.directory) / METRICS_FILE).read_text().splitlines())
            return [row["time"] for row in rows if row["kind"] == "step"]
        return []

    async def counters(self) -> dict[str, float]:
        """Retries and failures counted so far by the node, and by the router's own metrics."""
        found: dict[str, float] = {}
        for sample in await scrape(self._tiers.metrics["rollout"]):
            name = sample.name.removeprefix("tetrarch_rollout_").removesuffix("_total")
            if name in _COUNTERS:
                found[name] = found.get(name, 0.0) + sample.value
        for port in await self._router_metrics():
            for sample in await scrape(port):
                if "retr" in sample.name and sample.name.endswith("_total"):
                    found[f"router: {sample.name}"] = found.get(f"router: {sample.name}", 0.0) + sample.value
        return found

    async def _router_metrics(self) -> list[int]:
        """Where the router tells its metrics: the ports on which its process listens, but for the one it serves on."""
        served = int((await self.node()).router_url.rsplit(":", 1)[-1])
        for child in psutil.Process(self._tiers.supervisor.pid("rollout")).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                listens = {at.laddr.port for at in child.net_connections("tcp") if at.status == psutil.CONN_LISTEN}
                if served in listens:
                    return sorted(listens - {served})
        return []

    async def until_ended(self) -> run_pb2.Run:
        """Waits for the run's end."""
        deadline = time.monotonic() + END_SECONDS
        while (run := await self.run()).state == run_pb2.RUN_STATE_ACTIVE:
            if time.monotonic() > deadline:
                raise SystemExit(f"The run did not end; the node says: {(await self.node()).problem or 'nothing'}")
            await asyncio.sleep(0.2)
        return run

    async def trained_rows(self) -> collections.Counter[int]:
        """How often every row of the data was trained."""
        rows: collections.Counter[int] = collections.Counter()
        token, run_id = "", self.spec.run_id
        states = [run_pb2.GROUP_STATE_CONSUMED]
        while True:
            page = await self.buffer.ListGroups(
                buffer_pb.ListGroupsRequest(run_id=run_id, states=states, page_size=500, page_token=token)
            )
            for info in page.groups:
                group = await self.buffer.GetGroup(buffer_pb.GetGroupRequest(run_id=run_id, group_id=info.group_id))
                rows[group.prompt.row] += 1
            token = page.next_page_token
            if not token:
                return rows

    async def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            await channel.close()


async def _routed(session: aiohttp.ClientSession, router: str) -> set[str]:
    """Engines to which the router sends requests."""
    async with session.get(f"{router}/workers") as answer:
        workers = (await answer.json()).get("workers", [])
    return {worker["url"].rstrip("/") for worker in workers if worker.get("is_healthy", True)}


async def _busy_node(watched: Watched, session: aiohttp.ClientSession) -> engine_pb2.Node:
    """The node in the middle of a step: two engines behind the router, several groups in flight."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        if (run := await watched.run()).state != run_pb2.RUN_STATE_ACTIVE:
            raise SystemExit(f"The run ended before an engine was killed: {run.reason or 'all steps are done'}")
        if time.monotonic() > deadline:
            raise SystemExit(f"No two engines were busy in time: {(await watched.node()).problem}")
        if len(watched.steps()) >= KILL_AFTER:
            node = await watched.node()
            ready = all(engine.state == engine_pb2.ENGINE_STATE_READY for engine in node.engines)
            if ready and node.running_group_count >= 2:
                urls = {engine.url.rstrip("/") for engine in node.engines}
                if len(urls) == 2 and urls <= await _routed(session, node.router_url):
                    return node
        await asyncio.sleep(_POLL)


async def kill_one(watched: Watched) -> Outage:
    """SIGKILLs an engine with all its processes while it serves, and watches until it serves again."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session:
        node = await _busy_node(watched, session)
        before = await watched.counters()
        victim = node.engines[-1]
        os.killpg(victim.pid, signal.SIGKILL)
        outage = Outage(victim.engine_id, time.time(), node.running_group_count)
        began = time.monotonic()
        while outage.serving is None and time.monotonic() - began < START_SECONDS:
            await _look(watched, session, victim, outage)
            if (await watched.run()).state != run_pb2.RUN_STATE_ACTIVE:
                break
            await asyncio.sleep(_POLL)
        after = await watched.counters()
        outage.counted = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return outage


async def _look(watched: Watched, session: aiohttp.ClientSession, victim: engine_pb2.Engine, outage: Outage) -> None:
    """Notes what has happened since the last look."""
    node = await watched.node()
    routed = await _routed(session, node.router_url)
    seconds = time.time() - outage.killed_at
    if outage.out_of_router is None and victim.url.rstrip("/") not in routed:
        outage.out_of_router = seconds
    now = next(engine for engine in node.engines if engine.engine_id == victim.engine_id)
    if now.incarnation == victim.incarnation or not now.engine_version:
        return
    outage.up = outage.up or seconds
    if now.state == engine_pb2.ENGINE_STATE_READY and now.url.rstrip("/") in routed:
        async with session.get(f"{now.url}/model_info") as answer:
            outage.said_by_engine = str((await answer.json()).get("weight_version"))
        outage.serving, outage.version = seconds, now.weight_version
        outage.published = (await watched.run()).policy_version


def make_spec(chosen: argparse.Namespace, directory: Path, model: Path) -> RunSpec:
    """Two engines, one epoch of as many prompts as the steps need."""
    rollout, trainer = bare_settings(chosen.run_file)
    rollout |= {
        "hf_checkpoint": str(model),
        "engine": chosen.engine,
        "device": chosen.device,
        "num_rollout": chosen.steps,
        "rollout_num_gpus": 2,
        "use_fault_tolerance": True,
    }
    if chosen.device == "cpu":
        rollout |= {"rollout_batch_size": 8, "n_samples_per_prompt": 8, "rollout_max_response_len": 32}
        trainer["num_steps_per_rollout"] = 1
    else:
        # Both engines are on one GPU and may start at the same time: a set cache leaves room for the other, whatever
        # each sees free. Long responses make a step outlast a look, and the run the restart.
        rollout["sglang"] = {**rollout.get("sglang", {}), "mem_fraction_static": 0.7, "max_total_tokens": 400_000}
        rollout["rollout_max_response_len"] = 128
    if chosen.engine == "simulated":
        rollout["simulated"] = {"tokens_per_second": 32, "mean_response_len": 1e6, "response_len_spread": 0.0}
    trainer = {key: value for key, value in trainer.items() if key != "global_batch_size"}
    trainer |= {"save": str(directory / "checkpoints"), "max_staleness": 1}
    prompts = directory / "prompts.jsonl"
    write_prompts(prompts, chosen.steps * rollout["rollout_batch_size"])
    data = {"prompt_data": str(prompts), "label_key": "label", "num_epoch": 1}
    run = {"run_id": directory.name, "run_dir": str(directory.parent)}
    return RunSpec.model_validate(run | {"data": data, "rollout": rollout, "trainer": trainer})


def figures_of(spec: RunSpec, outage: Outage, trained: Trained, *, whole: bool) -> list[Figure]:
    """The table. `whole`: the run went on to the end of the epoch."""
    never, ends, counts = float("inf"), trained.ends, trained.rows.values()
    prompts = len(ends) * spec.rollout.rollout_batch_size
    gaps = [(after, after - before) for before, after in itertools.pairwise(ends)]
    until = outage.killed_at + (outage.serving or never)
    during = [gap for end, gap in gaps if outage.killed_at < end and end - gap < until]
    calm = [gap for end, gap in gaps[2:] if end <= outage.killed_at or end - gap >= until]
    median = statistics.median(calm)
    retried = [value for name, value in outage.counted.items() if name.startswith("router: ")]
    current = outage.version >= outage.published - 1 and outage.said_by_engine == str(outage.version)
    return [
        Figure("groups in flight at the kill", outage.groups_in_flight, "", ">= 2"),
        Figure("router stops using the engine after", outage.out_of_router or never, "s", "<= 5"),
        Figure("engine is up again after", outage.up or never, "s"),
        Figure(
            "engine serves the current, verified version after", outage.serving or never, "s", f"<= {START_SECONDS}"
        ),
        Figure("  that version is current, and the engine says so itself", current, "", "== 1"),
        Figure("requests the router tried again", max(retried, default=0.0)),
        Figure("requests the node sent again", outage.counted.get("retried_request_count", 0)),
        Figure("samples taken up half way", outage.counted.get("continued_sample_count", 0)),
        Figure("groups given back for another attempt", outage.counted.get("failed_group_count", 0)),
        Figure("steps during the outage", sum(outage.killed_at < end <= until for end in ends), "", ">= 1"),
        Figure("gap between steps, median without the outage", median, "s"),
        Figure("gap between steps, longest in the outage", max(during, default=never), "s", f"<= {median + 15:.1f}"),
        Figure("steps at the end", len(ends), "", f"== {spec.rollout.num_rollout}" if whole else ""),
        Figure("prompts of these steps, trained once", sum(count == 1 for count in counts), "", f"== {prompts}"),
        Figure("prompts trained more than once", sum(count > 1 for count in counts), "", "== 0"),
        Figure("prompts given up", trained.evicted, "", "== 0"),
    ]


async def measure(spec: RunSpec, stop_after: int | None) -> tuple[Outage, Trained]:
    """The run with its outage; → what happened, what was trained."""
    async with started(layout_in(Path(spec.directory)), ALL) as tiers:
        watched = Watched(spec, tiers)
        await watched.start()
        outage = await kill_one(watched)
        if stop_after:
            await watched.stop_after(stop_after)
        run = await watched.until_ended()
        if run.state not in (run_pb2.RUN_STATE_FINISHED, run_pb2.RUN_STATE_STOPPED):
            print(f"The run ended early: {run.reason}")
        trained = Trained(watched.steps(), await watched.trained_rows(), await watched.evicted())
        await watched.close()
    return outage, trained


def main() -> int:
    """Command line entry."""
    made = parser(__doc__ or "")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--model", type=Path, help="Hugging Face checkpoint; a small random one on the CPU")
    made.add_argument("--run-file", type=Path, help="whose engine and trainer settings are used")
    made.add_argument("--engine", choices=("sglang", "simulated"), help="simulated on the CPU, sglang on CUDA")
    made.add_argument("--steps", type=int, help="of the run; the engine must be back before they are done")
    made.add_argument("--stop-after", type=int, help="steps with the engine back, then the run is stopped")
    chosen = made.parse_args()
    limit(LIMIT_SECONDS)
    if chosen.device == "cuda" and not chosen.model:
        made.error("--device cuda needs --model DIR")
    chosen.engine = chosen.engine or {"cpu": "simulated", "cuda": "sglang"}[chosen.device]
    chosen.steps = chosen.steps or STEPS[chosen.device if chosen.engine == "sglang" else "simulated"]
    chosen.stop_after = chosen.stop_after or STOP_AFTER[chosen.device]
    chosen.run_file = chosen.run_file or CONFIGS / RUN_FILES[chosen.device]
    directory = (BENCH_DIR / f"engine-kill-{uuid.uuid4().hex[:6]}").absolute()
    directory.mkdir(parents=True)
    model = chosen.model.absolute() if chosen.model else random_model(BENCH_DIR / "random-model")
    if not chosen.model:
        model = endless_copy(model, directory / "model", positions=256)
    spec = make_spec(chosen, directory, model)
    outage, trained = asyncio.run(measure(spec, chosen.stop_after))
    figures = figures_of(spec, outage, trained, whole=not chosen.stop_after)
    context: dict[str, Any] = {"device": chosen.device, "engine": chosen.engine, "outage": vars(outage)}
    return finish("engine_kill", figures, chosen.json, **context, ends=trained.ends)


if __name__ == "__main__":
    raise SystemExit(main())
