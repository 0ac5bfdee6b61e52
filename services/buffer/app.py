"""Composition root of the buffer: connects the store, builds the servicers, serves, sweeps."""

from __future__ import annotations

import asyncio
import contextlib
import time

from tetrarch.buffer.v1.registry_service_pb2_grpc import add_RegistryServiceServicer_to_server

from services.buffer import metrics
from services.buffer.adapters.loader import PromptLoader
from services.buffer.adapters.redis_blocks import RedisBlocks
from services.buffer.adapters.redis_connection import Connection
from services.buffer.adapters.redis_members import RedisMembers
from services.buffer.adapters.redis_store import RedisStore
from services.buffer.adapters.user_functions import UserFunctionRunner
from services.buffer.config import BufferSettings
from services.buffer.core.buffer import Buffer
from services.buffer.core.records import RunState
from services.buffer.servicer import BufferServicer, RegistryServicer, add_buffer_service
from services.common.errors import Code, ServiceError
from services.common.server import GrpcServer
from services.common.telemetry import get_logger

BUFFER_SERVICE = "tetrarch.buffer.v1.BufferService"
REGISTRY_SERVICE = "tetrarch.buffer.v1.RegistryService"
_log = get_logger(__name__)


class App:
    """A buffer server."""

    def __init__(self, settings: BufferSettings) -> None:
        self._settings = settings
        self._connection = Connection(settings.store_url)
        self._functions = UserFunctionRunner()
        store = RedisStore(self._connection, settings.store_max_bytes)
        self.buffer = Buffer(store, PromptLoader(RedisBlocks(self._connection)), self._functions)
        self.server = GrpcServer(settings, "buffer")
        self.server.add(add_buffer_service, BufferServicer(self.buffer), BUFFER_SERVICE)
        registry = RegistryServicer(RedisMembers(self._connection), self.buffer)
        self.server.add(add_RegistryServiceServicer_to_server, registry, REGISTRY_SERVICE)
        self._ready = False
        self._sweeper: asyncio.Task | None = None

    async def start(self) -> None:
        """Waits for the store and serves. Raises STORE_UNAVAILABLE, STORE_UNSAFE, PORT_IN_USE."""
        await self._connect()
        for warning in await self._connection.check():
            _log.warning(warning)
        await self.server.start()
        await self._set_ready(True)
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="sweep")

    async def stop(self) -> None:
        """Drains and closes."""
        await self.server.stop(self.drain)
        await self.close()

    async def drain(self) -> None:
        """Lets waiting calls answer with what they have."""
        self.buffer.changes.close()

    async def close(self) -> None:
        """Ends the sweep and the connections."""
        if self._sweeper:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        self._functions.close()
        await self._connection.close()

    async def _connect(self) -> None:
        deadline = time.monotonic() + self._settings.store_wait_seconds
        while True:
            try:
                return await self._connection.ping()
            except ServiceError as error:
                if error.code is not Code.UNAVAILABLE or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.2)

    async def _set_ready(self, ready: bool) -> None:
        if ready is not self._ready:
            self._ready = ready
            await self.server.set_ready(BUFFER_SERVICE, ready)
            await self.server.set_ready(REGISTRY_SERVICE, ready)

    async def _sweep_forever(self) -> None:
        """Counting a run also sweeps its expired leases; the store's health becomes the service's."""
        while True:
            try:
                await self._sweep()
                await self._set_ready(True)
            except ServiceError as error:
                if self._ready:
                    _log.warning(error.message)
                await self._set_ready(False)
            except Exception:
                # Sweeping must go on, or expired leases would wait for the next call of a node.
                _log.exception("sweep failed")
            await asyncio.sleep(self._settings.sweep_seconds)

    async def _sweep(self) -> None:
        start, more = 0, True
        seen: set[str] = set()
        while more:
            runs, more = await self.buffer.list_runs([RunState.ACTIVE], start, 100)
            start += len(runs)
            for run in runs:
                seen.add(run.run_id)
                metrics.report(run.run_id, await self.buffer.stats(run.run_id))
        metrics.forget_all_but(seen)


async def serve(settings: BufferSettings) -> None:
    """Serves until a signal."""
    app = App(settings)
    try:
        await app.start()
        await app.server.run_until_signal(app.drain)
    finally:
        await app.close()
