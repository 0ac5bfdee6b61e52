"""Client channels: timeouts and retries from the contract's service config, and errors turned back into `ServiceError`.

Create channels after any fork; re-use them. An address is host:port, or any gRPC target (dns:///…, ipv4:a:1,b:2).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.common.errors import Code, ServiceError
from services.common.server import MAX_MESSAGE_BYTES

_HERE = Path(__file__).resolve()
# In a checkout the files lie beside the contract; a wheel carries them beside this module.
_SERVICE_CONFIGS = next(
    path for path in (_HERE.parents[2] / "proto" / "service_config", _HERE.parent / "service_config") if path.is_dir()
)
KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS = 15, 10
"""Servers refuse pings that come more often than every 10 s."""
CONNECT_SECONDS = 3
SERVICES = ("buffer", "reward", "rollout", "trainer", "sandbox")


@cache
def _service_config(service: str) -> str:
    if service not in SERVICES:
        raise ValueError(f"no such service: {service}; one of {', '.join(SERVICES)}")
    return json.dumps(json.loads((_SERVICE_CONFIGS / f"{service}.json").read_text()))


def _options(service: str) -> list[tuple[str, object]]:
    return [
        ("grpc.service_config", _service_config(service)),
        ("grpc.enable_retries", 1),
        # A request larger than the retry buffer is not retried at all.
        ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A peer that is silent, its host gone or cut off, is given up after the sum of the two, or after the second
        # alone when something was sent to it (gRPC sets TCP_USER_TIMEOUT to it).
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # What ends a connection whose ping is not answered; 60 s by default, whatever the keepalive says.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A restarted server is found again within a second. One attempt may take 20 s by default, and one that began
        # while the network was cut would take all of them although it is mended.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_SECONDS * 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Loopback and cluster addresses never go through a web proxy.
        ("grpc.enable_http_proxy", 0),
    ]


def open_channel(address: str, service: str) -> grpc.aio.Channel:
    """Channel to a service ("buffer", "reward", "rollout", "trainer", "sandbox")."""
    return grpc.aio.insecure_channel(address, options=_options(service))


def open_sync_channel(address: str, service: str) -> grpc.Channel:
    """The same for code without an event loop (trainer ranks)."""
    return grpc.insecure_channel(address, options=_options(service))


_CODES = {code.value for code in Code}


def service_error(error: grpc.RpcError) -> ServiceError:
    """The ServiceError that the server raised, or one that names the transport's failure."""
    code = error.code().name
    reason, metadata, retry = "", {}, None
    with contextlib.suppress(ValueError):  # a status whose details contradict its code: keep the bare code
        status = rpc_status.from_call(error)  # pyright: ignore[reportArgumentType] - an RpcError is a Call
        for detail in status.details if status else ():
            info, delay = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                reason, metadata = info.reason, dict(info.metadata)
            elif detail.Unpack(delay):
                retry = delay.retry_delay.ToMilliseconds() / 1000
    fitting = Code(code) if code in _CODES else Code.INTERNAL
    metadata = {key: value for key, value in metadata.items() if key not in ("code", "reason", "message")}
    return ServiceError(fitting, reason or code, error.details() or code, retry_seconds=retry, **metadata)


@contextlib.asynccontextmanager
async def translate_errors() -> AsyncIterator[None]:
    """Calls inside raise ServiceError instead of grpc.aio.AioRpcError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise service_error(error) from error
