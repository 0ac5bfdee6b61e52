"""Real tiers around a rollout node: Valkey, buffer, reward, node, simulated engines, router; all as processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from tetrarch.buffer.v1 import buffer_service_pb2 as buffer_pb2
from tetrarch.buffer.v1 import buffer_service_pb2_grpc, registry_service_pb2_grpc, run_pb2
from tetrarch.rollout.v1 import engine_pb2, rollout_service_pb2, rollout_service_pb2_grpc, weight_service_pb2_grpc

from services.common.channel import open_channel
from services.common.process import free_port
from tests.support.engine import write_checkpoint
from tests.support.valkey import ValkeyProcess

ROOT = Path(__file__).resolve().parents[3]


class Tier:
    """One service process, ended by its pid."""

    def __init__(self, name: str, directory: Path, **settings: object) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        argv = [sys.executable, "-m", f"services.{name}", "--set", f"port={self.address.split(':')[1]}"]
        for key, value in settings.items():
            argv += ["--set", f"{key}={value}"]
        path = os.pathsep.join([str(ROOT), str(ROOT / "proto" / "gen"), str(directory)])
        self.log = directory / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT
            )

    def wait_ready(self, service: str, seconds: float = 30.0) -> None:
        """Returns when the gRPC server answers."""
        with grpc.insecure_channel(self.address) as channel:
            try:
                grpc.channel_ready_future(channel).result(seconds)
            except grpc.FutureTimeoutError:
                pytest.fail(f"{service} did not start: {self.log.read_text()[-2000:]}")

    def stop(self, seconds: float = 15.0) -> int:
        """SIGTERM, then SIGKILL; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(5.0)


@dataclass
class World:
    """Addresses and files of the tiers."""

    directory: Path
    checkpoint: Path
    buffer_address: str
    reward_address: str
    node: Tier | None = None
    run_count: int = 0
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    def start_node(self, **settings: object) -> Tier:
        """Starts a rollout node."""
        self.node = Tier(
            "rollout",
            self.directory,
            buffer_address=self.buffer_address,
            reward_address=self.reward_address,
            node_id="node",
            poll_seconds=0.1,
            drain_seconds=0.5,
            log_dir=self.directory / "engines",
            **settings,
        )
        self.node.wait_ready("rollout")
        return self.node


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny checkpoint."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def world(tmp_path_factory, checkpoint) -> Iterator[World]:
    """All tiers; tests share the node, so that engines are started few times."""
    directory = tmp_path_factory.mktemp("world")
    rows = [{"input": f"{i}+{i}=", "label": str(2 * i)} for i in range(50)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:10]))
    valkey = ValkeyProcess(directory / "valkey").start()
    buffer = Tier("buffer", directory, store_url=valkey.url)
    reward = Tier("reward", directory, workers=1)
    world = World(directory, checkpoint, buffer.address, reward.address)
    try:
        buffer.wait_ready("buffer")
        reward.wait_ready("reward")
        yield world
    finally:
        for tier in (world.node, reward, buffer):
            if tier is not None:
                tier.stop()
        valkey.stop()


class Client:
    """What a trainer and a user do to a run."""

    def __init__(self, world: World) -> None:
        self.world = world
        buffer_channel = open_channel(world.buffer_address, "buffer")
        node_channel = open_channel(world.node.address, "rollout")
        self.channels = [buffer_channel, node_channel]
        self.buffer = buffer_service_pb2_grpc.BufferServiceStub(buffer_channel)
        self.registry = registry_service_pb2_grpc.RegistryServiceStub(buffer_channel)
        self.rollout = rollout_service_pb2_grpc.RolloutServiceStub(node_channel)
        self.weights = weight_service_pb2_grpc.WeightServiceStub(node_channel)
        self.run_id = ""
        self.session = 0
        self.updates = 0

    async def create_run(self, *, data=None, rollout=None, reward=None, trainer=None) -> str:
        """Creates a run with small defaults and opens a trainer session."""
        self.world.run_count += 1
        self.run_id = f"run{self.world.run_count}"
        directory = self.world.directory
        spec = {
            "run_id": self.run_id,
            "data": {
                "prompt_data": str(directory / "data.jsonl"),
                "label_key": "label",
                "eval_prompt_data": ["held", str(directory / "eval.jsonl")],
                **(data or {}),
            },
            "rollout": {
                "hf_checkpoint": str(self.world.checkpoint),
                "engine": "simulated",
                "num_rollout": 100,
                "rollout_batch_size": 8,
                "n_samples_per_prompt": 2,
                "rollout_max_response_len": 32,
                "rollout_health_check_interval": 0.5,
                "simulated": {"tokens_per_second": 2000},
                **(rollout or {}),
            },
            "reward": reward or {},
            "trainer": {"update_timeout": 40, **(trainer or {})},
        }
        await self.buffer.CreateRun(buffer_pb2.CreateRunRequest(run_id=self.run_id, spec_json=json.dumps(spec)))
        begun = await self.buffer.BeginSession(buffer_pb2.BeginSessionRequest(run_id=self.run_id, caller="test"))
        self.session = begun.trainer_epoch
        return self.run_id

    async def finish_run(self) -> None:
        """Ends the run."""
        request = buffer_pb2.FinishRunRequest(run_id=self.run_id, state=run_pb2.RUN_STATE_FINISHED)
        await self.buffer.FinishRun(request)

    async def publish(self, version: int, step_count: int = 0) -> None:
        """Makes a version current, which opens admission."""
        while True:
            reserved = await self.buffer.ReserveVersion(
                buffer_pb2.ReserveVersionRequest(run_id=self.run_id, trainer_epoch=self.session)
            )
            if reserved.version >= version:
                break
        await self.buffer.PublishVersion(
            buffer_pb2.PublishVersionRequest(
                run_id=self.run_id, trainer_epoch=self.session, version=version, step_count=step_count
            )
        )

    async def node(self) -> engine_pb2.Node:
        """The node now."""
        return (await self.rollout.GetNode(rollout_service_pb2.GetNodeRequest())).node

    async def engines(self, state: int, count: int = 1, seconds: float = 40.0) -> list[engine_pb2.Engine]:
        """Waits until the node serves the run with `count` engines in `state`."""
        node = None

        async def there() -> bool:
            nonlocal node
            node = await self.node()
            return node.run_id == self.run_id and sum(e.state == state for e in node.engines) == count

        await until(there, seconds, lambda: str(node))
        return [engine for engine in node.engines if engine.state == state]

    async def stats(self) -> run_pb2.RunStats:
        """Counts of the run."""
        return (await self.buffer.GetStats(buffer_pb2.GetStatsRequest(run_id=self.run_id))).stats

    async def ready_groups(self, count: int, seconds: float = 20.0) -> list[buffer_pb2.GetGroupResponse]:
        """Waits for READY groups; returns them with their samples."""

        async def enough() -> bool:
            return (await self.stats()).ready_count >= count

        await until(enough, seconds)
        listed = await self.buffer.ListGroups(
            buffer_pb2.ListGroupsRequest(run_id=self.run_id, states=[run_pb2.GROUP_STATE_READY])
        )
        get = self.buffer.GetGroup
        return [
            await get(buffer_pb2.GetGroupRequest(run_id=self.run_id, group_id=info.group_id)) for info in listed.groups
        ]


async def until(condition: Callable, seconds: float, explain: Callable[[], str] = lambda: "") -> None:
    """Waits for an async condition; fails with an explanation."""
    deadline = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds} s in vain. {explain()}")
        await asyncio.sleep(0.05)


@pytest.fixture
async def client(world) -> Client:
    """A client; its run is ended after the test."""
    if world.node is None:
        world.start_node()
    client = Client(world)
    yield client
    if client.run_id:
        await client.finish_run()
    for channel in client.channels:
        await channel.close()
