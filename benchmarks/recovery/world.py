"""A run of real processes that is struck again and again: store, buffer, reward service, rollout node and trainer under
the product's own supervisor, started as `tetrarch up` starts them.

What the world knows comes from outside the victims: the supervisor's sentences, the tiers' logs, the run's history on
disk, the router's list, the buffer's and the node's answers. A question to a process that is dead just then has no
answer (None), which is no error here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
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
from benchmarks.recovery import grader
from benchmarks.run_files import write_prompts
from services.common.channel import open_channel
from services.common.fault_points import REACHED, VARIABLE
from services.common.run_spec import RunSpec
from services.console.adapters.valkey import ping
from services.console.core.history import METRICS_FILE
from services.console.core.placement import NO_GPUS
from services.console.supervisor import Supervisor, Tier
from services.console.tiers import ALL, Layout, Ports, embedded_tiers

BATCH, SAMPLES, RESPONSE_TOKENS = 8, 2, 16
SAVE_INTERVAL = 4
UPDATE_SECONDS = 20.0
"""Deadline of a weight update."""
START_SECONDS = 180.0
POLL_SECONDS = 0.03
_SIMULATED = {"tokens_per_second": 12.0, "mean_response_len": 1e6, "response_len_spread": 0.0}
_TIMEOUT = aiohttp.ClientTimeout(total=1.0)


class Stuck(Exception):
    """Something did not happen in time; the message says what, and what the world looked like."""


@dataclass(frozen=True)
class Shape:
    """What a world is made of; rows that want equal ones share it."""

    engine: str = "simulated"
    engine_count: int = 2
    where: str = ""
    """Another kind of world, see `WORLDS`."""
    more: tuple[tuple[str, str, Any], ...] = ()
    """Further settings of the run: group, key, value."""


@dataclass(frozen=True)
class Said:
    """A sentence, and when it came (time.time())."""

    time: float
    text: str


@dataclass
class History:
    """The run's own history, read as it grows."""

    path: Path
    entries: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0

    def read(self) -> list[dict[str, Any]]:
        """All entries so far; a line half written is left for the next look."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._offset)
            raw = file.read()
            whole = raw[: raw.rfind(b"\n") + 1]
            self._offset += len(whole)
            self.entries += [json.loads(line) for line in whole.splitlines()]
        return self.entries

    def since(self, at: float, kind: str) -> list[dict[str, Any]]:
        """Entries of a kind after a moment."""
        return [entry for entry in self.read() if entry["time"] > at and entry["kind"] == kind]


class World:
    """See the module. Made by `world`."""

    def __init__(self, spec: RunSpec, layout: Layout, fault_dir: Path) -> None:
        self.spec = spec
        self.ports = layout.ports
        self.log_dir = layout.log_dir
        self.fault_dir = fault_dir
        self.notes: list[Said] = []
        """What the supervisor said."""
        self.lines: dict[str, list[Said]] = {name: [] for name in ALL}
        """What each tier wrote."""
        self.history = History(Path(spec.directory) / METRICS_FILE)
        self.samples_dir = Path(spec.rollout.save_debug_rollout_data or "")
        self.supervisor = Supervisor(
            self.tiers(layout),
            layout.log_dir,
            on_line=lambda tier, line: self.lines[tier].append(Said(time.time(), line)),
            on_note=lambda text: self.notes.append(Said(time.time(), text)),
        )
        self._http: aiohttp.ClientSession | None = None
        self._channels: list[grpc.aio.Channel] = []
        self._router = ""
        self._given_up: asyncio.Task | None = None

    def tiers(self, layout: Layout) -> list[list[Tier]]:
        """All processes, stage by stage."""
        return embedded_tiers(layout)

    async def start(self) -> None:
        """Starts the tiers and the run; returns when its first steps are done."""
        await self.supervisor.start()
        self._given_up = asyncio.create_task(self.supervisor.wait_failed())
        addresses = self.ports.addresses
        self._channels = [open_channel(addresses[name], name) for name in ("buffer", "rollout", "trainer")]
        buffer, rollout, trainer = self._channels
        self.buffer, self._rollout = BufferServiceStub(buffer), RolloutServiceStub(rollout)
        self._trainer = TrainerServiceStub(trainer)
        self._http = aiohttp.ClientSession(timeout=_TIMEOUT)
        run_id, spec_json = self.spec.run_id, self.spec.model_dump_json()
        await self.buffer.CreateRun(buffer_pb.CreateRunRequest(run_id=run_id, spec_json=spec_json), timeout=60)
        await self._trainer.StartRun(trainer_pb.StartRunRequest(run_id=run_id), timeout=60)
        await self.until(lambda: len(self.history.since(0.0, "step")) >= SAVE_INTERVAL, START_SECONDS, "first steps")

    async def stop(self) -> None:
        """Ends everything; a run that is thrown away has nothing to finish."""
        if self._given_up:
            self._given_up.cancel()
        self.supervisor.hurry()
        await self.supervisor.stop()
        for channel in self._channels:
            await channel.close()
        if self._http:
            await self._http.close()

    async def until(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        """The first truth of a condition, plain or async. Raises Stuck."""
        deadline = time.monotonic() + seconds
        while True:
            if self._given_up and self._given_up.done():
                raise Stuck(f"{what}: the supervisor gave up: {self._given_up.result()}")
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            if time.monotonic() > deadline:
                raise Stuck(f"{what}: not within {seconds:.0f} s. {await self.describe()}")
            await asyncio.sleep(POLL_SECONDS)

    # -- what the others say

    async def node(self) -> engine_pb2.Node | None:
        """The rollout node now."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            found = (await self._rollout.GetNode(rollout_pb.GetNodeRequest(), timeout=2)).node
            self._router = found.router_url or self._router
            return found
        return None

    async def routed(self) -> set[str] | None:
        """Engines to which the router sends requests; it is asked at its last known address, whatever the node does."""
        assert self._http, "start() comes first"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with self._http.get(f"{self._router}/workers") as answer:
                workers = (await answer.json()).get("workers", [])
            return {worker["url"].rstrip("/") for worker in workers if worker.get("is_healthy", True)}
        return None

    async def run(self) -> run_pb2.Run | None:
        """The run as the buffer has it."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            request = buffer_pb.GetRunRequest(run_id=self.spec.run_id)
            return (await self.buffer.GetRun(request, timeout=2)).run
        return None

    async def stats(self) -> run_pb2.RunStats | None:
        """The run's counts."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            request = buffer_pb.GetStatsRequest(run_id=self.spec.run_id)
            return (await self.buffer.GetStats(request, timeout=2)).stats
        return None

    async def serving(self, engine_id: str = "") -> bool:
        """Every engine, or one, is behind the router with weights at most one version old."""
        node, routed, run = await self.node(), await self.routed(), await self.run()
        if node is None or routed is None or run is None or len(node.engines) != self.spec.rollout.engine_count:
            return False
        wanted = [engine for engine in node.engines if engine_id in ("", engine.engine_id)]
        return bool(wanted) and all(
            engine.state in (engine_pb2.ENGINE_STATE_READY, engine_pb2.ENGINE_STATE_UPDATING)
            and engine.url.rstrip("/") in routed
            and engine.weight_version >= run.policy_version - 1 > -1
            for engine in wanted
        )

    async def incarnations(self) -> dict[str, str]:
        """Life of each engine's process. Raises Stuck when the node does not answer."""
        node = await self.until(self.node, 10.0, "the rollout node's answer")
        return {engine.engine_id: engine.incarnation for engine in node.engines}

    async def healthy(self, name: str) -> bool:
        """A tier runs and its service can be used."""
        if not self.supervisor.pid(name):
            return False
        if name == "store":
            return not await ping(self.ports.store)
        channel = {"buffer": self.stats, "rollout": self.node}.get(name)
        return await channel() is not None if channel else await self._answers(name)

    async def _answers(self, name: str) -> bool:
        with contextlib.suppress(OSError, TimeoutError):
            _, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", getattr(self.ports, name)), 1.0)
            writer.close()
            return True
        return False

    def router_pid(self) -> int:
        """Process id of the router: the node's child that listens where the node says. Raises Stuck."""
        port = int(self._router.rsplit(":", 1)[-1])
        for child in psutil.Process(self.supervisor.pid("rollout")).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(
                    at.laddr.port == port and at.status == psutil.CONN_LISTEN for at in child.net_connections("tcp")
                ):
                    return child.pid
        raise Stuck(f"no child of the rollout node listens on the router's port {port}")

    def rank_pid(self) -> int:
        """Process id of the trainer's rank 0. Raises Stuck."""
        for child in psutil.Process(self.supervisor.pid("trainer")).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "services.trainer.ranks" in child.cmdline():
                    return child.pid
        raise Stuck("the trainer has no rank")

    def noted(self, after: float, text: str) -> float | None:
        """When the supervisor first said something after a moment."""
        return next((note.time for note in self.notes if note.time >= after and text in note.text), None)

    def wrote(self, tier: str, after: float, text: str) -> float | None:
        """When a tier first wrote something after a moment."""
        return next((line.time for line in self.lines[tier] if line.time >= after and text in line.text), None)

    async def describe(self) -> str:
        """What the world looks like, for whoever must find out why something did not happen."""
        node, stats = await self.node(), await self.stats()
        engines = [
            f"{engine.engine_id} {engine_pb2.EngineState.Name(engine.state)[13:]} v{engine.weight_version}"
            for engine in (node.engines if node else [])
        ]
        last = self.history.read()[-1:]
        parts = [
            f"engines: {', '.join(engines) or 'unknown'}",
            f"node: {node.problem if node else 'no answer'}",
            f"router: {await self.routed()}",
            f"counts: {' '.join(str(stats).split()) if stats else 'no answer'}",
            f"history ends with: {last[0]['kind']} {last[0]['message']}" if last else "no history",
            f"supervisor: {self.notes[-1].text if self.notes else 'nothing'}",
        ]
        return "; ".join(parts)

    # -- fault points

    def arm(self, point: str, **labels: str) -> None:
        """Whoever reaches the point next stands still there. `point` may end in "@" and anything, to arm one twice."""
        self.disarm(point)
        scratch = self.fault_dir / f".{point}"
        scratch.write_text(json.dumps(labels))
        scratch.rename(self.fault_dir / point)

    def disarm(self, point: str) -> None:
        """Lets go who stands at the point, and nobody stops there any more."""
        for name in (point, f"{point}{REACHED}"):
            (self.fault_dir / name).unlink(missing_ok=True)

    async def caught(self, point: str, seconds: float = 60.0, **labels: str) -> dict[str, Any]:
        """Arms a point and waits until a process stands still there; → its pid, process group, labels."""
        self.arm(point, **labels)
        return await self.reached(point, seconds)

    async def reached(self, point: str, seconds: float = 60.0) -> dict[str, Any]:
        """Who stands still at a point that was armed."""
        path = self.fault_dir / f"{point}{REACHED}"

        def read() -> dict[str, Any] | None:
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                return json.loads(path.read_text())
            return None

        return await self.until(read, seconds, f"somebody at {point}")


WORLDS: dict[str, Callable[[RunSpec, Layout, Path], World]] = {}
"""Worlds on other ground than one machine's loopback, by the name that a shape has for them."""


def make_spec(directory: Path, shape: Shape, model: Path) -> RunSpec:
    """An endless run of short steps, one step ahead, with a checkpoint every few steps."""
    prompts = directory / "prompts.jsonl"
    write_prompts(prompts, 4096)
    groups: dict[str, Any] = {
        "run_id": directory.name,
        "run_dir": str(directory),
        "data": {"prompt_data": str(prompts), "label_key": "label"},
        "rollout": {
            "hf_checkpoint": str(model),
            "engine": shape.engine,
            "device": "cpu",
            "num_rollout": 1_000_000,
            "rollout_batch_size": BATCH,
            "n_samples_per_prompt": SAMPLES,
            "rollout_max_response_len": RESPONSE_TOKENS,
            "rollout_num_gpus": shape.engine_count,
            "save_debug_rollout_data": str(directory / "samples"),
            **({"simulated": _SIMULATED} if shape.engine == "simulated" else {}),
        },
        "reward": {"custom_rm_path": grader.PATH},
        "trainer": {
            "save": str(directory / "checkpoints"),
            "save_interval": SAVE_INTERVAL,
            "max_staleness": 1,
            "lr": 1e-5,
            "update_timeout": UPDATE_SECONDS,
        },
    }
    for group, key, value in shape.more:
        groups[group][key] = value
    return RunSpec.model_validate(groups)


def tiny_model(directory: Path) -> Path:
    """A model whose every response runs to its limit."""
    directory.mkdir(parents=True, exist_ok=True)
    return endless_copy(random_model(directory / "random"), directory / "model", 128)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.asynccontextmanager
async def world(directory: Path, shape: Shape, model: Path | None = None) -> AsyncIterator[World]:
    """A running world, stopped at the end. Its files stay in `directory`."""
    model = model or await asyncio.to_thread(tiny_model, directory)
    spec = make_spec(directory, shape, model)
    layout = Layout(Ports.free(), directory / "store", directory / "logs", resume=True, placement=NO_GPUS)
    with (
        tempfile.TemporaryDirectory(prefix="tetrarch-faults-") as faults,
        _environment({VARIABLE: faults, "OMP_NUM_THREADS": "1"}),
    ):
        made = WORLDS.get(shape.where, World)(spec, layout, Path(faults))
        try:
            await made.start()
            yield made
        finally:
            await made.stop()
