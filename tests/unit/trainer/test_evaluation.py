"""Evaluations on nodes that fail."""

from __future__ import annotations

import pytest

from services.common.errors import Code, ServiceError
from services.trainer.core import evaluation
from services.trainer.core.records import EngineState, EngineView, EvalResult, NodeView

RESULT = EvalResult("held", 0.5, 10, 0, 4.0, 0.1, 1, 1, 0.1)
AWAY = ServiceError(Code.UNAVAILABLE, "EVALUATION_CUT", "the node went away")
BROKEN = ServiceError(Code.INTERNAL, "GENERATE_FAILED", "the generate function raised KeyError")
UNKNOWN = ServiceError(Code.NOT_FOUND, "DATASET_NOT_FOUND", "no such set")


class Nodes:
    """One node whose evaluations answer by a script."""

    def __init__(self, *script: ServiceError | EvalResult) -> None:
        self.script, self.calls = script, 0

    async def nodes(self) -> list[NodeView]:
        engine = EngineView("n-0", "n:1", "i", EngineState.READY, 1, 1, ("gloo",))
        return [NodeView("n", "n:1", "r", (engine,), 0, 0, 0, 0.0, 0.0, 0.0, "")]

    async def evaluate(self, *_: object) -> EvalResult:
        answer = self.script[min(self.calls, len(self.script) - 1)]
        self.calls += 1
        if isinstance(answer, ServiceError):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("script", "reason", "calls"),
    [
        ((AWAY, BROKEN, AWAY, AWAY, AWAY, RESULT), "", 6),
        ((BROKEN,), "GENERATE_FAILED", 3),
        ((UNKNOWN,), "DATASET_NOT_FOUND", 1),
    ],
)
async def test_what_fails_every_time_is_not_tried_until_the_deadline(monkeypatch, script, reason, calls):
    monkeypatch.setattr(evaluation, "_RETRY_SECONDS", 0.01)
    nodes = Nodes(*script)
    if reason:
        with pytest.raises(ServiceError) as caught:
            await evaluation.evaluate(nodes, "r", ["held"], 1, 30.0)
        assert caught.value.reason == reason
    else:
        assert await evaluation.evaluate(nodes, "r", ["held"], 1, 30.0) == [RESULT]
    assert nodes.calls == calls
