"""The server every tier uses, against real sockets: health, errors there and back, drain, safe binds."""

from __future__ import annotations

import asyncio

import pytest
from tetrarch.reward.v1 import reward_service_pb2 as pb
from tetrarch.reward.v1 import reward_service_pb2_grpc as rpc

from services.common.channel import open_channel, translate_errors
from services.common.errors import Code, ServiceError
from services.common.healthcheck import check
from services.common.server import GrpcServer
from services.common.settings import ServiceSettings

NAME = "tetrarch.reward.v1.RewardService"


class Servicer(rpc.RewardServiceServicer):
    """Fails in three ways and answers in one."""

    async def Score(self, request: pb.ScoreRequest, context: object) -> pb.ScoreResponse:
        if request.grader == "named":
            raise ServiceError(Code.NOT_FOUND, "GRADER_NOT_FOUND", "No grader x.", retry_seconds=1.5, grader="x")
        raise RuntimeError("secret detail")

    async def ListGraders(self, request: pb.ListGradersRequest, context: object) -> pb.ListGradersResponse:
        await asyncio.sleep(0.2)
        return pb.ListGradersResponse()


@pytest.fixture
async def server():
    server = GrpcServer(ServiceSettings(port=0, drain_seconds=2), "reward")
    server.add(rpc.add_RewardServiceServicer_to_server, Servicer(), NAME)
    await server.start()
    await server.set_ready(NAME)
    yield server
    await server.stop()


async def call(server: GrpcServer, grader: str) -> ServiceError:
    async with open_channel(server.address, "reward") as channel:
        with pytest.raises(ServiceError) as caught:
            async with translate_errors():
                await rpc.RewardServiceStub(channel).Score(pb.ScoreRequest(grader=grader))
    return caught.value


async def test_an_error_reaches_the_client_whole(server: GrpcServer) -> None:
    error = await call(server, "named")
    assert (error.code, error.reason, error.message) == (Code.NOT_FOUND, "GRADER_NOT_FOUND", "No grader x.")
    assert (error.retry_seconds, error.metadata) == (1.5, {"grader": "x"})


async def test_a_bug_does_not_leak_its_details(server: GrpcServer) -> None:
    error = await call(server, "bug")
    assert error.code is Code.INTERNAL
    assert "RuntimeError" in error.message
    assert "secret" not in error.message


async def test_health_follows_readiness(server: GrpcServer) -> None:
    assert await asyncio.to_thread(check, server.address, NAME) == ""
    await server.set_ready(NAME, False)
    assert "NOT_SERVING" in await asyncio.to_thread(check, server.address, NAME)
    assert await asyncio.to_thread(check, server.address) == ""


async def test_a_port_in_use_is_named(server: GrpcServer) -> None:
    with pytest.raises(ServiceError, match=f"127.0.0.1:{server.port}: the port is in use"):
        await GrpcServer(ServiceSettings(port=server.port), "reward").start()


def test_a_public_address_needs_consent() -> None:
    with pytest.raises(ServiceError, match="allow_insecure_bind"):
        GrpcServer(ServiceSettings(host="0.0.0.0", port=0), "reward")


async def test_stop_lets_a_call_in_flight_finish() -> None:
    server = GrpcServer(ServiceSettings(port=0, drain_seconds=5), "reward")
    server.add(rpc.add_RewardServiceServicer_to_server, Servicer(), NAME)
    await server.start()
    async with open_channel(server.address, "reward") as channel:
        answer = asyncio.ensure_future(rpc.RewardServiceStub(channel).ListGraders(pb.ListGradersRequest()))
        await asyncio.sleep(0.1)
        await server.stop()
        assert await answer == pb.ListGradersResponse()
