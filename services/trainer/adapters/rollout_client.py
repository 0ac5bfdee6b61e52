"""Rollout nodes over gRPC: the roster, weight updates, evaluations. Implements `ports.Rollout`.

Channels are kept by address; a node that comes back under its address is found again. Every call has the deadline it
is given; nothing is repeated here: whoever negotiates decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from tetrarch.rollout.v1 import (
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    weight_service_pb2,
    weight_service_pb2_grpc,
)

from services.checksums.names import ALGORITHMS
from services.common.channel import open_channel, service_error, translate_errors
from services.common.errors import Code, ServiceError
from services.trainer import convert
from services.trainer.core.ports import Prepared, PrepareRequest, Received
from services.trainer.core.records import EngineView, EvalResult, NodeView

_LOOK_SECONDS = 5.0
_USUAL_LOOK_SECONDS = 2.0
"""A node that is slower is left out when others have answered: a stopped one must not hold up every update."""


class GrpcRollout:
    """Client of all rollout nodes.

    Args:
        addresses: lists the live nodes (the registry).
    """

    def __init__(self, addresses: Callable[[], Awaitable[list[str]]]) -> None:
        self._addresses = addresses
        self._channels: dict[str, grpc.aio.Channel] = {}

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address, "rollout")
        return self._channels[address]

    def _weights(self, engine: EngineView) -> weight_service_pb2_grpc.WeightServiceStub:
        return weight_service_pb2_grpc.WeightServiceStub(self._channel(engine.address))

    async def close(self) -> None:
        """Closes all channels."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def nodes(self) -> list[NodeView]:
        """Live nodes that answer, by id."""
        addresses = await self._addresses()
        looks = [asyncio.create_task(self._node(address)) for address in addresses]
        if not looks:
            return []
        try:
            done, silent = await asyncio.wait(looks, timeout=_USUAL_LOOK_SECONDS)
            if silent and not any(look.result() for look in done):
                done, silent = await asyncio.wait(looks, timeout=_LOOK_SECONDS - _USUAL_LOOK_SECONDS)
        finally:
            for look in looks:
                look.cancel()
        found = [node for look in done if (node := look.result())]
        return sorted(found, key=lambda node: node.node_id)

    async def _node(self, address: str) -> NodeView | None:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(self._channel(address))
        try:
            response = await stub.GetNode(rollout_service_pb2.GetNodeRequest(), timeout=_LOOK_SECONDS)
        except grpc.aio.AioRpcError:
            return None  # its lease in the registry tells whether it is gone
        return convert.node_from_proto(response.node, address)

    async def prepare(self, engine: EngineView, request: PrepareRequest, timeout: float) -> Prepared:
        """Asks an engine to join; → how it will check what arrives. Raises CHECKSUM_UNKNOWN for another algorithm."""
        message = convert.prepare_to_proto(engine, request)
        response = await self._ask(engine, self._weights(engine).PrepareUpdate, message, timeout)
        algorithm = response.checksum_algorithm
        if response.checksum_rules and algorithm not in ALGORITHMS:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "CHECKSUM_UNKNOWN",
                f"Engine {engine.engine_id} checks weights by {algorithm!r}, which this trainer does not know; it knows"
                f" {', '.join(ALGORITHMS)}.",
                engine_id=engine.engine_id,
            )
        return convert.prepared_from_proto(response)

    async def transfer(self, engine: EngineView, epoch: int, timeout: float) -> Received:
        """Asks an engine to receive all buckets of the plan, and waits until they are there."""
        message = weight_service_pb2.TransferWeightsRequest(engine_id=engine.engine_id, update_epoch=epoch)
        response = await self._ask(engine, self._weights(engine).TransferWeights, message, timeout)
        return Received(response.received_bytes, response.seconds)

    async def commit(
        self, engine: EngineView, epoch: int, version: int, checksums: Mapping[str, str], timeout: float
    ) -> float:
        """Asks an engine to verify and serve; → seconds of standstill."""
        message = weight_service_pb2.CommitUpdateRequest(
            engine_id=engine.engine_id,
            update_epoch=epoch,
            version=version,
            checksums=[
                weight_service_pb2.TensorChecksum(engine_name=name, checksum=value) for name, value in checksums.items()
            ],
        )
        return (await self._ask(engine, self._weights(engine).CommitUpdate, message, timeout)).pause_seconds

    async def abort(self, engine: EngineView, epoch: int, reason: str, timeout: float) -> None:
        """Tells an engine that the update is given up."""
        message = weight_service_pb2.AbortUpdateRequest(engine_id=engine.engine_id, update_epoch=epoch, reason=reason)
        await self._ask(engine, self._weights(engine).AbortUpdate, message, timeout)

    @staticmethod
    async def _ask(engine: EngineView, method: Any, message: Any, timeout: float) -> Any:
        try:
            return await method(message, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            failure = service_error(error)
            if failure.code is not Code.DEADLINE_EXCEEDED:
                raise failure from error
            raise ServiceError(
                Code.DEADLINE_EXCEEDED,
                "ENGINE_SILENT",
                f"Engine {engine.engine_id} at {engine.address} did not answer within {timeout:.0f} s.",
                engine_id=engine.engine_id,
            ) from error

    async def evaluate(self, node: NodeView, run_id: str, dataset: str, min_version: int, timeout: float) -> EvalResult:
        """Runs an evaluation on a node and waits for its result. Raises EVALUATION_CUT when the stream ends early."""
        stub = rollout_service_pb2_grpc.RolloutServiceStub(self._channel(node.address))
        request = rollout_service_pb2.EvaluateRequest(run_id=run_id, dataset=dataset, min_version=min_version)
        async with translate_errors():
            async for response in stub.Evaluate(request, timeout=timeout):
                if response.HasField("result"):
                    return convert.eval_from_proto(response.result)
        raise ServiceError(
            Code.UNAVAILABLE,
            "EVALUATION_CUT",
            f"Node {node.node_id} ended the evaluation of {dataset!r} without a result.",
            node_id=node.node_id,
        )
