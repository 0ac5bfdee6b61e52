"""A grpc.aio server: health, reflection, error mapping, graceful drain.

Health: "" is SERVING while the process lives; a full service name is SERVING when that service is ready.
Shutdown on SIGTERM or SIGINT: NOT_SERVING, then the owner's drain, then `drain_seconds` for calls in flight.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.errors import Code, ServiceError
from services.common.interceptors import ServerInterceptor
from services.common.memory import keep_freed_memory
from services.common.settings import ServiceSettings
from services.common.telemetry import get_logger, start_metrics_server

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # By default a second server may bind the same port without an error.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_log = get_logger(__name__)


def is_loopback(host: str) -> bool:
    """True when only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class GrpcServer:
    """The server of one process.

    Args:
        settings: where to bind.
        name: short service name, the domain of its errors.
    """

    def __init__(self, settings: ServiceSettings, name: str) -> None:
        if not is_loopback(settings.host) and not settings.allow_insecure_bind:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "INSECURE_BIND",
                f"host {settings.host} can be reached by other machines in plaintext; bind 127.0.0.1, or set"
                " allow_insecure_bind inside a private network.",
                host=settings.host,
            )
        self._settings = settings
        self._server = grpc.aio.server(options=_OPTIONS, interceptors=[ServerInterceptor(name)])
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names: list[str] = []
        self.port = 0
        """Bound port, after start()."""

    @property
    def address(self) -> str:
        """host:port by which others reach this server."""
        return f"{self._settings.advertise_host or self._settings.host}:{self.port}"

    def add(self, add_to_server: Callable[[Any, grpc.aio.Server], None], servicer: Any, full_name: str) -> None:
        """Adds a servicer; `full_name` as in tetrarch.buffer.v1.BufferService."""
        add_to_server(servicer, self._server)
        self._names.append(full_name)

    async def start(self) -> None:
        """Binds and serves. Raises PORT_IN_USE."""
        keep_freed_memory()
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        target = f"{self._settings.host}:{self._settings.port}"
        try:
            self.port = self._server.add_insecure_port(target)
        except RuntimeError as error:
            raise ServiceError(
                Code.UNAVAILABLE,
                "PORT_IN_USE",
                f"Cannot listen on {target}: the port is in use; choose another with --set port=N.",
                address=target,
            ) from error
        await self._server.start()
        start_metrics_server(self._settings.metrics_port)
        await self._set("", serving=True)
        for name in self._names:
            await self._set(name, serving=False)
        _log.info("listening", address=f"{self._settings.host}:{self.port}")

    async def _set(self, name: str, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(name, status)

    async def set_ready(self, full_name: str, ready: bool = True) -> None:
        """Tells load balancers and supervisors whether a service can be used."""
        await self._set(full_name, serving=ready)

    async def stop(self, on_drain: Callable[[], Awaitable[None]] | None = None) -> None:
        """Drains and stops."""
        await self._health.enter_graceful_shutdown()
        if on_drain:
            await on_drain()
        await self._server.stop(self._settings.drain_seconds)

    async def run_until_signal(self, on_drain: Callable[[], Awaitable[None]] | None = None) -> None:
        """Serves until SIGTERM or SIGINT, then drains and stops."""
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        await stopped.wait()
        _log.info("draining")
        await self.stop(on_drain)
        _log.info("stopped")
