"""RolloutService over the node: convert, call, convert."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from tetrarch.rollout.v1 import rollout_service_pb2, rollout_service_pb2_grpc

from services.common.convert import prompt_from_proto, sample_to_proto, sampling_from_proto
from services.common.errors import invalid_field
from services.rollout import convert
from services.rollout.core.node import Node

_GENERATE_SECONDS = 120.0
_DRAIN_SECONDS = 30.0


class RolloutServicer(rollout_service_pb2_grpc.RolloutServiceServicer):
    """Serves one node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def GetNode(self, request: rollout_service_pb2.GetNodeRequest, context: grpc.aio.ServicerContext):
        """See the contract."""
        return rollout_service_pb2.GetNodeResponse(node=convert.node_to_proto(self._node))

    async def Evaluate(
        self, request: rollout_service_pb2.EvaluateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rollout_service_pb2.EvaluateResponse]:
        """See the contract."""
        evaluation = self._node.served(request.run_id).evaluation(convert.evaluation_request(request))
        async for progress in evaluation.run():
            yield convert.progress_to_proto(progress)

    async def Generate(self, request: rollout_service_pb2.GenerateRequest, context: grpc.aio.ServicerContext):
        """See the contract."""
        prompt = prompt_from_proto(request.prompt)
        if not prompt.text and not len(prompt.tokens):
            raise invalid_field("prompt", "", "give text or tokens")
        samples = await self._node.served(request.run_id).generate(
            prompt,
            sampling_from_proto(request.sampling),
            request.sample_count,
            context.time_remaining() or _GENERATE_SECONDS,
        )
        return rollout_service_pb2.GenerateResponse(samples=[sample_to_proto(sample) for sample in samples])

    async def DrainNode(self, request: rollout_service_pb2.DrainNodeRequest, context: grpc.aio.ServicerContext):
        """See the contract."""
        wait = request.max_wait.ToMilliseconds() / 1000 if request.HasField("max_wait") else _DRAIN_SECONDS
        return rollout_service_pb2.DrainNodeResponse(released_group_count=await self._node.drain(wait))
