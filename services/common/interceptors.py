"""What happens around every call of a server: metrics, logging, and errors turned into google.rpc.Status.

Servicers raise `ServiceError`; nothing else reaches a caller but INTERNAL with the exception's type. A stack
trace goes to the log, never over the wire.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from prometheus_client import Counter, Gauge, Histogram

from services.common.errors import Code, ServiceError
from services.common.telemetry import get_logger

_HANDLED = Counter("tetrarch_rpc_handled", "Calls that ended, by status code", ["method", "code"])
_RUNNING = Gauge("tetrarch_rpc_running", "Calls in progress", ["method"])
_SECONDS = Histogram("tetrarch_rpc_seconds", "Duration of calls", ["method"])
_log = get_logger(__name__)


def to_status(error: ServiceError, domain: str) -> status_pb2.Status:
    """google.rpc.Status with exactly one ErrorInfo, and RetryInfo when the caller should come back."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=domain, metadata=error.metadata)
    details = [any_pb2.Any()]
    details[0].Pack(info)
    if error.retry_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_seconds * 1000))
        packed = any_pb2.Any()
        packed.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        details.append(packed)
    return status_pb2.Status(code=code_pb2.Code.Value(error.code.value), message=error.message, details=details)


class ServerInterceptor(grpc.aio.ServerInterceptor):
    """Counts, times and translates every call of one service."""

    def __init__(self, service: str) -> None:
        self._domain = f"{service}.tetrarch"

    async def intercept_service(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, continuation: Callable, details: grpc.HandlerCallDetails
    ) -> Any:
        """Wraps unary and server-streaming handlers; others pass through untouched."""
        handler = await continuation(details)
        if handler is None or details.method.startswith("/grpc."):
            return handler
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(handler.unary_unary, details.method),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(handler.unary_stream, details.method),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return handler

    def _unary(self, inner: Callable, method: str) -> Callable:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            started = time.monotonic()
            _RUNNING.labels(method).inc()
            try:
                response = await inner(request, context)
            except Exception as error:
                await self._fail(error, context, method)
            else:
                _HANDLED.labels(method, "OK").inc()
                return response
            finally:
                _RUNNING.labels(method).dec()
                _SECONDS.labels(method).observe(time.monotonic() - started)

        return call

    def _stream(self, inner: Callable, method: str) -> Callable:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            started = time.monotonic()
            _RUNNING.labels(method).inc()
            try:
                async for response in inner(request, context):
                    yield response
                _HANDLED.labels(method, "OK").inc()
            except Exception as error:
                await self._fail(error, context, method)
            finally:
                _RUNNING.labels(method).dec()
                _SECONDS.labels(method).observe(time.monotonic() - started)

        return call

    async def _fail(self, error: Exception, context: Any, method: str) -> None:
        """Ends the call with the error's status."""
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if not isinstance(error, ServiceError):
            _log.error("call failed", method=method, exc_info=error)
            error = ServiceError(
                Code.INTERNAL,
                "INTERNAL",
                f"{method} failed with {type(error).__name__}; the server's log has the details.",
                method=method,
            )
        _HANDLED.labels(method, error.code.value).inc()
        await context.abort_with_status(rpc_status.to_status(to_status(error, self._domain)))
