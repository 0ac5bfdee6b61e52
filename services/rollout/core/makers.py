"""Makers of groups: by generation and scoring, or from labels."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from services.common.errors import Code, ServiceError
from services.common.records import Group, Prompt, Sample, SamplingParams
from services.rollout.core.counters import Counters
from services.rollout.core.filters import SamplingFilter
from services.rollout.core.fleet import Fleet
from services.rollout.core.generate import Generator, Unfinished
from services.rollout.core.ports import Tokenizer
from services.rollout.core.recorded import check_recorded
from services.rollout.core.run_settings import RunSettings
from services.rollout.core.samples import build_sample, supervised_group, unscored
from services.rollout.core.scoring import Scoring
from services.rollout.core.trajectory import Trajectory


class Interrupted(Exception):
    """The node halted before a group was finished; what there is of it."""

    def __init__(self, group: Group) -> None:
        super().__init__(f"group {group.group_id} has {len(group.samples)} samples so far")
        self.group = group


@dataclass(frozen=True)
class RolloutMaker:
    """Generates and scores groups of a reinforcement-learning run."""

    fleet: Fleet
    generator: Generator
    scoring: Scoring
    run: RunSettings
    tokenizer: Tokenizer
    counters: Counters
    filter: SamplingFilter | None = None

    async def samples(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        rollout_count: int,
        partial: Group | None = None,
        *,
        greedy_first: bool = False,
    ) -> list[Sample]:
        """Unscored samples of a prompt. Raises the errors of `Generator.generate`; Interrupted when the node halted."""
        began = time.monotonic()
        try:
            begun = _begun(prompt, partial)
            trajectories = await self.generator.generate(
                prompt, sampling, rollout_count, begun, greedy_first=greedy_first
            )
        except Unfinished as stop:
            # What was recorded of them cannot be handed over: they are made again.
            begun = {} if self.run.record else stop.trajectories
            raise Interrupted(self._group(prompt, begun)) from stop
        self.counters.generate_seconds += (time.monotonic() - began) * rollout_count
        return list(self._group(prompt, dict(enumerate(trajectories))).samples)

    def _group(self, prompt: Prompt, trajectories: Mapping[int, Trajectory]) -> Group:
        """Unscored samples of trajectories by index."""
        return Group(
            prompt.group_id,
            prompt.ordinal,
            tuple(
                build_sample(prompt, index, trajectory, self.tokenizer, self.fleet.engine_id_of(trajectory.engine_url))
                for index, trajectory in trajectories.items()
            ),
        )

    async def score(self, prompt: Prompt, samples: list[Sample]) -> list[Sample]:
        """The samples with rewards, or with reasons why not."""
        began = time.monotonic()
        done = await self.scoring.score(prompt, samples)
        self.counters.score_seconds += time.monotonic() - began
        self.counters.unscored_sample_count += sum(sample.reward is None for sample in done)
        return done

    async def make(self, prompt: Prompt, partial: Group | None = None) -> Group:
        """A scored group, gone on with from what there is of it.

        Raises UNSCORED when no sample has a reward, Rejected by the sampling filter, Interrupted when the node halted.
        """
        began = time.monotonic()
        sampling = self.run.sampling.overlaid(prompt.sampling)
        count, greedy_first = self.run.samples_per_prompt, self.run.greedy_first
        samples = await self.samples(prompt, sampling, count, partial, greedy_first=greedy_first)
        for sample in samples:
            check_recorded(sample, self.run.record)
        generated = time.monotonic()
        samples = await self.score(prompt, samples)
        if unscored(samples):
            raise ServiceError(
                Code.UNAVAILABLE,
                "UNSCORED",
                f"No sample of group {prompt.group_id} was scored ({samples[0].unscored_reason}).",
                group_id=prompt.group_id,
            )
        if self.filter is not None:
            await self.filter.check(prompt, samples)
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

    async def make(self, prompt: Prompt, partial: Group | None = None) -> Group:
        """The group of prompt and label. Raises INVALID_FIELD when the row has no label."""
        if not prompt.label:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "INVALID_FIELD",
                f"Row {prompt.row} has no label to learn; check label_key.",
                row=prompt.row,
            )
        return supervised_group(prompt, self.tokenizer, self.run.max_context_length)


def _begun(prompt: Prompt, partial: Group | None) -> dict[int, Trajectory]:
    """Trajectories to go on with, by index; none of a group that another prompt text was made of."""
    if partial is None:
        return {}
    tokens = prompt.tokens.tolist()
    return {
        sample.index: Trajectory.of(sample)
        for sample in partial.samples
        if sample.tokens[: sample.prompt_length].tolist() == tokens
    }
