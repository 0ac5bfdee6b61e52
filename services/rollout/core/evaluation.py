"""Evaluation of a data set: generate, score, count. Nothing is stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np

from services.common.errors import Code, ServiceError
from services.common.records import Prompt, Sample, SampleStatus, SamplingParams
from services.common.telemetry import get_logger
from services.rollout.core.makers import RolloutMaker
from services.rollout.core.ports import PromptBuffer

log = get_logger(__name__)

_MAX_EXAMPLES = 64
_ATTEMPTS = 3
"""Generations of one prompt before the evaluation fails with its error."""
_READY_SECONDS = 30.0
"""How long an evaluation waits for engines at the version it asks for."""


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate. 0 prompts means all; `sampling` fields that are None keep the run's."""

    dataset: str
    sample_count: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_prompt_count: int = 0
    min_version: int = 0


@dataclass(frozen=True)
class EvaluationResult:
    """Means over all samples; rewards over scored ones. Lengths in tokens."""

    dataset: str
    mean_reward: float
    scored_count: int
    unscored_count: int
    mean_response_length: float
    truncated_fraction: float
    min_version: int
    max_version: int
    seconds: float
    examples: tuple[Sample, ...]


@dataclass(frozen=True)
class EvaluationProgress:
    """Prompts done of all; `result` on the last one."""

    done_count: int
    total_count: int
    result: EvaluationResult | None = None


class Evaluation:
    """One evaluation.

    Args:
        buffer: reads the data set.
        maker: generates and scores.
        request: what to evaluate.
        concurrency: prompts in flight.
    """

    def __init__(self, buffer: PromptBuffer, maker: RolloutMaker, request: EvaluationRequest, concurrency: int) -> None:
        self._buffer = buffer
        self._maker = maker
        self._request = request
        self._slots = asyncio.Semaphore(concurrency)
        run = maker.run
        self._sampling = run.eval_sampling.overlaid(request.sampling)
        self._sample_count = request.sample_count or run.samples_per_eval_prompt

    async def run(self) -> AsyncIterator[EvaluationProgress]:
        """Progress after every prompt, the result at the end. Raises DATASET_NOT_FOUND, NO_ENGINE_READY."""
        began = time.monotonic()
        prompts = await self._prompts()
        await self._await_version()
        yield EvaluationProgress(0, len(prompts))
        tasks = [asyncio.create_task(self._one(prompt)) for prompt in prompts]
        try:
            for count, finished in enumerate(asyncio.as_completed(tasks), start=1):
                await finished
                yield EvaluationProgress(count, len(prompts))
        finally:
            for task in tasks:
                task.cancel()
        samples = [sample for task in tasks for sample in task.result()]
        yield EvaluationProgress(len(prompts), len(prompts), self._summary(samples, time.monotonic() - began))

    async def _prompts(self) -> list[Prompt]:
        limit = self._request.max_prompt_count
        prompts: list[Prompt] = []
        async for page in self._buffer.eval_prompts(self._maker.run.run_id, self._request.dataset):
            prompts += page
            if limit and len(prompts) >= limit:
                return prompts[:limit]
        return prompts

    async def _await_version(self) -> None:
        """Waits until an engine serves and none behind the router is older than asked for."""
        wanted, deadline = self._request.min_version, time.monotonic() + _READY_SECONDS
        fleet = self._maker.fleet
        while True:
            versions = fleet.routed_versions()
            if versions and min(versions) >= wanted:
                return
            if time.monotonic() > deadline:
                held = ", ".join(map(str, sorted(set(versions)))) or "none"
                raise ServiceError(
                    Code.UNAVAILABLE,
                    "NO_ENGINE_READY",
                    f"No engine serves weight version {wanted} or newer (versions served: {held}).",
                    min_version=wanted,
                )
            await asyncio.sleep(0.1)

    async def _one(self, prompt: Prompt) -> list[Sample]:
        async with self._slots:
            return await self._maker.score(prompt, await self._samples(prompt, _ATTEMPTS))

    async def _samples(self, prompt: Prompt, attempts: int) -> list[Sample]:
        while True:
            attempts -= 1
            try:
                return await self._maker.samples(prompt, self._sampling, self._sample_count)
            except ServiceError as error:
                if not attempts or error.code is Code.INVALID_ARGUMENT:
                    raise
                log.warning("an evaluation prompt is tried again", prompt=prompt.group_id, error=str(error))

    def _summary(self, samples: list[Sample], seconds: float) -> EvaluationResult:
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        cut = [sample.status is SampleStatus.TRUNCATED for sample in samples]
        return EvaluationResult(
            dataset=self._request.dataset,
            mean_reward=float(np.mean(rewards)) if rewards else 0.0,
            scored_count=len(rewards),
            unscored_count=len(samples) - len(rewards),
            mean_response_length=float(np.mean([s.response_length for s in samples])) if samples else 0.0,
            truncated_fraction=float(np.mean(cut)) if cut else 0.0,
            min_version=min((s.min_version for s in samples), default=0),
            max_version=max((s.max_version for s in samples), default=0),
            seconds=seconds,
            examples=tuple(samples[:_MAX_EXAMPLES]),
        )
