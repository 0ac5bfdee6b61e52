"""Makers of groups: by generation and scoring, or from labels."""

from __future__ import annotations

import time
from dataclasses import dataclass

from services.common.errors import Code, ServiceError
from services.common.records import Group, Prompt, Sample, SamplingParams
from services.rollout.core.counters import Counters
from services.rollout.core.fleet import Fleet
from services.rollout.core.generate import Generator
from services.rollout.core.ports import Tokenizer
from services.rollout.core.run_settings import RunSettings
from services.rollout.core.samples import build_sample, supervised_group, unscored
from services.rollout.core.scoring import Scoring


@dataclass(frozen=True)
class RolloutMaker:
    """Generates and scores groups of a reinforcement-learning run."""

    fleet: Fleet
    generator: Generator
    scoring: Scoring
    run: RunSettings
    tokenizer: Tokenizer
    counters: Counters

    async def samples(self, prompt: Prompt, sampling: SamplingParams, sample_count: int) -> list[Sample]:
        """Unscored samples of a prompt. Raises the errors of `Generator.generate`."""
        began = time.monotonic()
        trajectories = await self.generator.generate(prompt, sampling, sample_count)
        self.counters.generate_seconds += (time.monotonic() - began) * sample_count
        return [
            build_sample(prompt, index, trajectory, self.tokenizer, self.fleet.engine_id_of(trajectory.engine_url))
            for index, trajectory in enumerate(trajectories)
        ]

    async def score(self, prompt: Prompt, samples: list[Sample]) -> list[Sample]:
        """The samples with rewards, or with reasons why not."""
        began = time.monotonic()
        done = await self.scoring.score(prompt, samples)
        self.counters.score_seconds += time.monotonic() - began
        self.counters.unscored_sample_count += sum(sample.reward is None for sample in done)
        return done

    async def make(self, prompt: Prompt) -> Group:
        """A scored group. Raises UNSCORED when no sample has a reward."""
        began = time.monotonic()
        sampling = self.run.sampling.overlaid(prompt.sampling)
        samples = await self.samples(prompt, sampling, self.run.samples_per_prompt)
        generated = time.monotonic()
        samples = await self.score(prompt, samples)
        if unscored(samples):
            raise ServiceError(
                Code.UNAVAILABLE,
                "UNSCORED",
                f"No sample of group {prompt.group_id} was scored ({samples[0].unscored_reason}).",
                group_id=prompt.group_id,
            )
        return Group(
            group_id=prompt.group_id,
            ordinal=prompt.ordinal,
            samples=tuple(samples),
            generate_seconds=generated - began,
            score_seconds=time.monotonic() - generated,
        )


@dataclass(frozen=True)
class SupervisedMaker:
    """Builds groups of a supervised run; no engine takes part."""

    run: RunSettings
    tokenizer: Tokenizer

    async def make(self, prompt: Prompt) -> Group:
        """The group of prompt and label. Raises INVALID_FIELD when the row has no label."""
        if not prompt.label:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "INVALID_FIELD",
                f"Row {prompt.row} has no label to learn; check label_key.",
                row=prompt.row,
            )
        return supervised_group(prompt, self.tokenizer, self.run.max_context_length)
