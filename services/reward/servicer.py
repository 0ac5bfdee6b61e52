"""gRPC front of the reward service: converts, scores, converts back."""

from __future__ import annotations

import grpc
from tetrarch.reward.v1 import reward_service_pb2 as pb
from tetrarch.reward.v1 import reward_service_pb2_grpc

from services.common.errors import invalid_field
from services.reward import metrics
from services.reward.convert import job_from_proto, response_to_proto
from services.reward.core.catalogue import GRADERS, grader_of
from services.reward.core.records import Job, Outcome
from services.reward.core.scoring import Scorer

# What the way back needs of the caller's deadline.
_REPLY_SECONDS = 0.25


class RewardServicer(reward_service_pb2_grpc.RewardServiceServicer):
    """Serves `tetrarch.reward.v1.RewardService`."""

    def __init__(self, scorer: Scorer, default_budget: float) -> None:
        self._scorer = scorer
        self._default_budget = default_budget

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        """Scores a batch within its budget and the caller's deadline."""
        job = job_from_proto(request)
        budget = self._default_budget
        if request.HasField("budget"):
            budget = request.budget.ToMilliseconds() / 1000
            if budget <= 0:
                raise invalid_field("budget", f"{budget:g} s", "it must be above 0")
        remaining = context.time_remaining()
        if remaining is not None:
            budget = min(budget, max(0.0, remaining - _REPLY_SECONDS))
        outcomes = await self._scorer.score(job, budget)
        _count(job, outcomes)
        return response_to_proto(job, outcomes)

    async def ListGraders(
        self, request: pb.ListGradersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListGradersResponse:
        """Lists the graders by name."""
        return pb.ListGradersResponse(
            graders=[pb.Grader(name=name, description=text) for name, text in sorted(GRADERS.items())]
        )


def _count(job: Job, outcomes: list[Outcome]) -> None:
    for item, outcome in zip(job.items, outcomes, strict=True):
        grader = grader_of(item, job)
        metrics.ITEMS.labels(grader, outcome.reason.value if outcome.reason else "SCORED").inc()
        metrics.ITEM_SECONDS.labels(grader).observe(outcome.seconds)
