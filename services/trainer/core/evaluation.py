"""Evaluations of a run: on any node that serves it, at the published version, one data set after another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from services.common.errors import Code, ServiceError
from services.trainer.core.ports import Rollout
from services.trainer.core.records import EngineState, EvalResult, NodeView

_RETRY_SECONDS = 1.0
_GIVE_UP = (Code.INVALID_ARGUMENT, Code.NOT_FOUND)
_PASSING = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
_ATTEMPTS = 3
"""Failures of other kinds, of a user's generate function say: training must not wait for what fails every time."""


async def evaluate(
    rollout: Rollout, run_id: str, datasets: Sequence[str], min_version: int, timeout: float
) -> list[EvalResult]:
    """Results in order of `datasets`. A node that goes away is asked again, or another one, until `timeout` seconds.

    Raises:
        ServiceError: DATASET_NOT_FOUND and the like at once, other failures of the evaluation itself after three
            attempts, EVALUATION_FAILED when time is up.
    """
    deadline = time.monotonic() + timeout
    return [await _one(rollout, run_id, dataset, min_version, deadline) for dataset in datasets]


async def _one(rollout: Rollout, run_id: str, dataset: str, min_version: int, deadline: float) -> EvalResult:
    why = "no rollout node serves the run"
    attempt = failures = 0
    while (left := deadline - time.monotonic()) > 0:
        nodes = _able(await rollout.nodes(), run_id, min_version)
        if nodes:
            try:
                node = nodes[attempt % len(nodes)]
                return await rollout.evaluate(node, run_id, dataset, min_version, left)
            except ServiceError as error:
                failures += error.code not in _PASSING
                if error.code in _GIVE_UP or failures == _ATTEMPTS:
                    raise
                why = error.message
                attempt += 1
        await asyncio.sleep(min(_RETRY_SECONDS, max(left, 0.0)))
    raise ServiceError(
        Code.DEADLINE_EXCEEDED,
        "EVALUATION_FAILED",
        f"Evaluation of {dataset!r} did not end in time: {why}",
        run_id=run_id,
        dataset=dataset,
    )


def _able(nodes: Sequence[NodeView], run_id: str, min_version: int) -> list[NodeView]:
    """Nodes with an engine that serves the version, the one with most of them first."""

    def ready(node: NodeView) -> int:
        return sum(e.state is EngineState.READY and e.weight_version >= min_version for e in node.engines)

    able = [node for node in nodes if node.run_id == run_id and ready(node)]
    return sorted(able, key=ready, reverse=True)


def eval_metrics(results: Sequence[EvalResult]) -> dict[str, float]:
    """`<data set>/<name>` of every result."""
    names = ("mean_reward", "scored_count", "unscored_count", "mean_response_length", "truncated_fraction", "seconds")
    return {f"{result.dataset}/{name}": float(getattr(result, name)) for result in results for name in names}


def eval_message(results: Sequence[EvalResult]) -> str:
    """One line for the user."""
    return "; ".join(
        f"{r.dataset}: mean reward {r.mean_reward:.4f} over {r.scored_count} samples"
        + (f", {r.unscored_count} unscored" if r.unscored_count else "")
        for r in results
    )
