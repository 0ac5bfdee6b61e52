"""Composition root of the trainer: settings in, a runnable process out. No torch here."""

from __future__ import annotations

import asyncio
import sys
import uuid
from functools import partial
from pathlib import Path

from tetrarch.trainer.v1 import trainer_service_pb2_grpc

from services.common.channel import open_channel
from services.common.devices import resolve_device
from services.common.errors import ServiceError
from services.common.network import use_interface_of, with_reachable_host
from services.common.run_spec import RunSpec
from services.common.server import GrpcServer
from services.common.telemetry import get_logger
from services.trainer.adapters.buffer_client import GrpcBuffer
from services.trainer.adapters.checkpoint_files import SharedCheckpointFiles
from services.trainer.adapters.journal import RunJournal
from services.trainer.adapters.local_ranks import LocalRanks
from services.trainer.adapters.rollout_client import GrpcRollout
from services.trainer.adapters.weight_store import SharedWeightStore
from services.trainer.config import TrainerServiceSettings
from services.trainer.core.actor_critic import ActorCritic
from services.trainer.core.controller import Factories, TrainerController
from services.trainer.core.ports import Ranks
from services.trainer.core.settings import LoopSettings
from services.trainer.servicer import TrainerServicer

log = get_logger(__name__)

_SERVICE = "tetrarch.trainer.v1.TrainerService"


class App:
    """The trainer with its gRPC server.

    Args:
        settings: of the process.
    """

    def __init__(self, settings: TrainerServiceSettings) -> None:
        self._settings = settings = with_reachable_host(settings, settings.buffer_address)
        self._host = settings.weights_host or settings.advertise_host or settings.host
        use_interface_of(self._host)
        self.server = GrpcServer(settings, "trainer")
        self._channel = open_channel(settings.buffer_address, "buffer")
        self._buffer = GrpcBuffer(self._channel, settings.buffer_address, settings.buffer_patience)
        self._rollout = GrpcRollout(self._buffer.rollout_addresses)
        self._incarnation = uuid.uuid4().hex[:12]
        self.controller = TrainerController(
            self._buffer,
            self._rollout,
            SharedCheckpointFiles(),
            Factories(ranks=self._ranks, journal=RunJournal, device=resolve_device, open_weights=SharedWeightStore),
            self._loop_settings,
        )
        self.server.add(
            trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server, TrainerServicer(self.controller), _SERVICE
        )
        self._tasks: list[asyncio.Task] = []

    def _loop_settings(self, device: str) -> LoopSettings:
        settings = self._settings
        return LoopSettings(
            buffer_address=settings.buffer_address,
            address=self._host,
            device=device,
            setup_timeout=settings.setup_timeout,
            step_timeout=settings.step_timeout,
            save_timeout=settings.save_timeout,
            engines_timeout=settings.engines_timeout,
            eval_timeout=settings.eval_timeout,
            join_timeout=settings.join_timeout,
        )

    def _ranks(self, spec: RunSpec, run_dir: str) -> Ranks:
        trainer = spec.trainer
        actor = self._world(run_dir, "rank", trainer.world_size, first_device=0)
        if not trainer.needs_critic or spec.rollout.debug_rollout_only:
            return actor
        critic = self._world(run_dir, "critic rank", trainer.critic_world_size, first_device=trainer.world_size)
        return ActorCritic(actor, critic)

    def _world(self, run_dir: str, name: str, size: int, *, first_device: int) -> LocalRanks:
        return LocalRanks(
            size,
            Path(run_dir) / "logs",
            name=name,
            first_device=first_device,
            start_timeout=self._settings.rank_start_timeout,
            on_line=partial(_repeat, name) if self._settings.log_ranks else None,
        )

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT; then the step in progress ends and a checkpoint is written."""
        await self.start()
        await self.server.run_until_signal(self.stop)
        await self._rollout.close()
        await self._channel.close()

    async def start(self) -> None:
        """Starts the server and the loops; returns at once."""
        await self.server.start()
        await self.server.set_ready(_SERVICE)
        self._tasks = [asyncio.create_task(self._register(), name="register")]
        if self._settings.resume_active:
            self._tasks.append(asyncio.create_task(self._resume(), name="resume"))

    async def stop(self) -> None:
        """Ends the run in hand, then the loops."""
        await self.controller.shutdown(self._settings.stop_seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _register(self) -> None:
        """Renews this trainer's lease in the registry."""
        ttl = self._settings.member_ttl
        while True:
            run_id = self.controller.progress("").run_id
            try:
                await self._buffer.register(self.server.address, self._incarnation, ttl, run_id)
            except ServiceError as error:
                log.debug("trainer is not registered", error=error.message)
            await asyncio.sleep(ttl / 4)

    async def _resume(self) -> None:
        """Takes up the run that an earlier trainer left, as soon as the buffer answers."""
        while True:
            try:
                progress = await self.controller.resume_newest()
            except ServiceError as error:
                log.warning("no run could be resumed yet", error=error.message)
                await asyncio.sleep(2.0)
                continue
            log.info("resumed" if progress else "no active run to resume", run_id=progress.run_id if progress else "")
            return


def _repeat(name: str, rank: int, line: str) -> None:
    print(f"[{name} {rank}] {line}", file=sys.stderr, flush=True)
