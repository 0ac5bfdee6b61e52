"""WeightService over the node's updates: convert, call, convert."""

from __future__ import annotations

import grpc
from tetrarch.rollout.v1 import weight_service_pb2, weight_service_pb2_grpc

from services.common.errors import Code, ServiceError
from services.rollout import convert
from services.rollout.core.node import Node
from services.rollout.core.weights import WeightUpdates


class WeightServicer(weight_service_pb2_grpc.WeightServiceServicer):
    """Serves the engines of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def _updates(self, run_id: str) -> WeightUpdates:
        session = self._node.served(run_id)
        if session.updates is None:
            raise ServiceError(
                Code.NOT_FOUND,
                "ENGINE_NOT_FOUND",
                f"Run {session.run.run_id} trains labels or a file and has no engines.",
            )
        return session.updates

    def _timeout(self, context: grpc.aio.ServicerContext) -> float:
        """Seconds an engine call may take: what the caller left, at most the run's update_timeout."""
        limit = self._node.served("").run.update_timeout
        remaining = context.time_remaining()
        return limit if remaining is None else max(0.1, min(limit, remaining * 0.95))

    async def PrepareUpdate(self, request: weight_service_pb2.PrepareUpdateRequest, context: grpc.aio.ServicerContext):
        """See the contract."""
        updates = self._updates(request.run_id)
        result = await updates.prepare(convert.update_request(request), self._timeout(context))
        return weight_service_pb2.PrepareUpdateResponse(
            checksum_algorithm=result.algorithm,
            checksum_rules=convert.rules_to_proto(result.rules),
            staged=result.staged,
        )

    async def TransferWeights(
        self, request: weight_service_pb2.TransferWeightsRequest, context: grpc.aio.ServicerContext
    ):
        """See the contract."""
        result = await self._updates("").transfer(request.engine_id, request.update_epoch, self._timeout(context))
        return weight_service_pb2.TransferWeightsResponse(received_bytes=result.received_bytes, seconds=result.seconds)

    async def CommitUpdate(self, request: weight_service_pb2.CommitUpdateRequest, context: grpc.aio.ServicerContext):
        """See the contract."""
        expected = {item.engine_name: item.checksum for item in request.checksums}
        result = await self._updates("").commit(
            request.engine_id, request.update_epoch, request.version, expected, self._timeout(context)
        )
        return weight_service_pb2.CommitUpdateResponse(
            verified_tensor_count=result.verified_tensor_count, pause_seconds=result.pause_seconds
        )

    async def AbortUpdate(self, request: weight_service_pb2.AbortUpdateRequest, context: grpc.aio.ServicerContext):
        """See the contract."""
        await self._updates("").abort(request.engine_id, request.update_epoch, request.reason)
        return weight_service_pb2.AbortUpdateResponse()
