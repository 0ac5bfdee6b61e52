"""The reward service over gRPC."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import duration_pb2
from tetrarch.reward.v1 import reward_service_pb2, reward_service_pb2_grpc

from services.common.channel import translate_errors
from services.common.errors import Code, ServiceError
from services.rollout.core.ports import Score, ScoreCall, ScoreItem

_CALL_SLACK = 2.0


class GrpcScorer:
    """`Scorer` over a channel to the reward service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = reward_service_pb2_grpc.RewardServiceStub(channel)

    async def score(self, call: ScoreCall, items: Sequence[ScoreItem]) -> list[Score]:
        """See `Scorer`."""
        budget = duration_pb2.Duration()
        budget.FromNanoseconds(int(call.budget * 1e9))
        request = reward_service_pb2.ScoreRequest(
            grader=call.grader,
            custom_path=call.custom_path,
            options_json=call.options_json,
            grouped=call.grouped,
            budget=budget,
            items=[
                reward_service_pb2.ScoreItem(
                    item_id=item.item_id,
                    group_id=item.group_id,
                    prompt=item.prompt,
                    response=item.response,
                    label=item.label,
                    metadata_json=item.metadata_json,
                )
                for item in items
            ],
        )
        async with translate_errors():
            response = await self._stub.Score(request, timeout=call.budget + _CALL_SLACK)
        if len(response.results) != len(items):
            raise ServiceError(
                Code.INTERNAL,
                "REWARD_CONTRADICTORY",
                f"The reward service answered {len(response.results)} results for {len(items)} items.",
            )
        return [
            Score(
                reward=result.reward if result.HasField("reward") else None,
                unscored_reason="" if result.HasField("reward") else result.unscored_reason or "GRADER_ERROR",
                details=dict(result.details),
            )
            for result in response.results
        ]
