"""Composition root of the reward service."""

from __future__ import annotations

from tetrarch.reward.v1.reward_service_pb2_grpc import add_RewardServiceServicer_to_server

from services.common.server import GrpcServer
from services.reward.adapters.worker_pool import Limits, WorkerPool
from services.reward.config import RewardSettings
from services.reward.core.scoring import Scorer
from services.reward.servicer import RewardServicer

SERVICE = "tetrarch.reward.v1.RewardService"


class RewardApp:
    """A reward service; nothing of it must survive."""

    def __init__(self, settings: RewardSettings) -> None:
        limits = Limits(settings.workers, settings.item_timeout_seconds, settings.import_timeout_seconds)
        self.pool = WorkerPool(limits, settings.python_path)
        self.server = GrpcServer(settings, "reward")
        servicer = RewardServicer(Scorer(self.pool), settings.default_budget_seconds)
        self.server.add(add_RewardServiceServicer_to_server, servicer, SERVICE)

    async def start(self) -> None:
        """Serves; ready when a worker is. Raises PORT_IN_USE."""
        await self.server.start()
        await self.pool.start()
        await self.server.set_ready(SERVICE)

    async def stop(self) -> None:
        """Lets calls in flight finish, then ends the workers."""
        await self.server.stop()
        await self.pool.close()

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT."""
        try:
            await self.start()
            await self.server.run_until_signal()
        finally:
            await self.pool.close()
