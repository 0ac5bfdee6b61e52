"""Is a service ready? One call of the standard health protocol, with a deadline."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


async def serving(address: str, service: str, timeout: float = 2.0) -> str:
    """Empty string when the service (full name) is SERVING, else why not."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            return f"{address} does not answer ({error.code().name})"
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if name == "SERVING" else f"{address} is {name}"


async def answers(address: str, timeout: float = 5.0) -> str:
    """Empty string when a gRPC server listens there, else why not; for services that need no health protocol."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), timeout)
        except TimeoutError:
            return f"{address} does not answer"
    return ""
