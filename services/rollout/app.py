"""Composition root of the rollout node: settings in, a runnable process out."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import uuid
from pathlib import Path

from prometheus_client import REGISTRY
from tetrarch.rollout.v1 import rollout_service_pb2_grpc, weight_service_pb2_grpc

from services.common.channel import open_channel
from services.common.errors import ServiceError
from services.common.network import use_interface_of, with_reachable_host
from services.common.server import GrpcServer
from services.common.telemetry import get_logger
from services.rollout import convert
from services.rollout.adapters.buffer_client import GrpcBuffer
from services.rollout.adapters.reward_client import GrpcScorer
from services.rollout.adapters.router import SGLangRouter
from services.rollout.adapters.sglang_launch import SGLangFactory
from services.rollout.adapters.simulated import SimulatedFactory
from services.rollout.adapters.teacher import HttpTeacher
from services.rollout.adapters.tokenizer import load_tokenizer
from services.rollout.adapters.weight_files import SharedVersions
from services.rollout.config import RolloutNodeSettings
from services.rollout.core.engine_port import EngineFactory, Router
from services.rollout.core.node import Node, NodeSettings, Outside
from services.rollout.core.run_settings import FleetSettings, RunSettings
from services.rollout.metrics import NodeCollector
from services.rollout.servicer import RolloutServicer
from services.rollout.servicer_weights import WeightServicer

log = get_logger(__name__)

_REGISTER_AGAIN = 0.5
"""A node that has missed its lease has no engine for the trainer until it is back."""
_ROLLOUT = "tetrarch.rollout.v1.RolloutService"
_WEIGHTS = "tetrarch.rollout.v1.WeightService"


class App:
    """A rollout node with its gRPC server.

    Args:
        settings: of the process.
    """

    def __init__(self, settings: RolloutNodeSettings) -> None:
        self._settings = settings = with_reachable_host(settings, settings.buffer_address)
        use_interface_of(settings.advertise_host or settings.host)
        self.server = GrpcServer(settings, "rollout")
        self._node_id = settings.node_id or f"{socket.gethostname()}-{settings.port or uuid.uuid4().hex[:6]}"
        self._channels = [
            open_channel(settings.buffer_address, "buffer"),
            open_channel(settings.reward_address, "reward"),
        ]
        buffer_channel, reward_channel = self._channels
        self._buffer = GrpcBuffer(buffer_channel, self._node_id, settings.member_ttl)
        log_dir = Path(settings.log_dir) if settings.log_dir else None
        self.node = Node(
            NodeSettings(
                node_id=self._node_id,
                poll_seconds=settings.poll_seconds,
                linger_seconds=settings.linger_seconds,
                drain_seconds=settings.drain_seconds,
                engine_count=settings.engine_count,
                log_dir=log_dir,
            ),
            Outside(
                buffer=self._buffer,
                scorer=GrpcScorer(reward_channel),
                read_run=convert.run_settings,
                load_tokenizer=load_tokenizer,
                make_factory=_factory,
                make_router=lambda fleet: _router(fleet, log_dir),
                open_files=lambda run: _files(run, self._node_id, log_dir),
                open_teacher=lambda run: HttpTeacher(run.teacher.url) if run.teacher else None,
            ),
        )
        self.server.add(
            rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server, RolloutServicer(self.node), _ROLLOUT
        )
        self.server.add(
            weight_service_pb2_grpc.add_WeightServiceServicer_to_server, WeightServicer(self.node), _WEIGHTS
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then gives leases back and stops the engines."""
        await self.start()
        REGISTRY.register(NodeCollector(self.node))
        await self.server.run_until_signal(self.stop)
        for channel in self._channels:
            await channel.close()

    async def start(self) -> None:
        """Starts the server and the loops; returns at once."""
        await self.server.start()
        for name in (_ROLLOUT, _WEIGHTS):
            await self.server.set_ready(name, True)
        self._tasks = [asyncio.create_task(self.node.serve()), asyncio.create_task(self._register())]

    async def stop(self) -> None:
        """Ends the loops, then the node."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.node.stop()

    async def _register(self) -> None:
        """Renews this node's lease in the registry."""
        node, ttl = self.node, self._settings.member_ttl
        while True:
            pause = ttl / 4
            attributes = {
                "run_id": node.run_id,
                "engines": str(len(node.slots)),
                "versions": ",".join(str(slot.version) for slot in node.slots),
                "state": "draining" if node.draining else "serving",
            }
            try:
                await self._buffer.register(self._node_id, self.server.address, node.incarnation, attributes)
            except ServiceError as error:
                log.warning("node is not registered", error=str(error))
                pause = min(pause, _REGISTER_AGAIN)
            await asyncio.sleep(pause)


async def serve(settings: RolloutNodeSettings) -> None:
    """Serves until a signal. The server and the channels belong to the loop that runs them."""
    await App(settings).run()


def _factory(fleet: FleetSettings) -> EngineFactory:
    """Builder of the kind of engine a run asks for."""
    return {"sglang": SGLangFactory, "simulated": SimulatedFactory}[fleet.engine]()


def _files(run: RunSettings, node_id: str, log_dir: Path | None) -> SharedVersions | None:
    """A run's weights as files; a copy of this node's goes under its own name."""
    if run.files is None:
        return None
    local = Path(run.files.local) if run.files.local else (log_dir or Path(tempfile.gettempdir())) / "weights"
    shared = Path(run.files.directory).absolute() / run.run_id
    return SharedVersions(shared, local / node_id / run.run_id, copies_full=run.files.copies_full)


def _router(fleet: FleetSettings, log_dir: Path | None) -> Router:
    """The router in front of a run's engines."""
    log_path = log_dir / "router.log" if log_dir else None
    return SGLangRouter(fleet.router_strategy, fleet.router_options, log_path)
