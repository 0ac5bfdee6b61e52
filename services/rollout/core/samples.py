"""Trajectories and labels to the records that are stored and trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from services.common.records import Group, Prompt, Sample, SampleStatus
from services.rollout.core.ports import Score, Tokenizer
from services.rollout.core.trajectory import Trajectory


def build_sample(prompt: Prompt, index: int, trajectory: Trajectory, tokenizer: Tokenizer, engine_id: str) -> Sample:
    """Unscored sample of a trajectory (scored when the generate function gave the reward)."""
    return Sample(
        sample_id=f"{prompt.group_id}-{index}",
        group_id=prompt.group_id,
        index=index,
        status=trajectory.status,
        prompt_length=trajectory.prompt_length,
        tokens=np.array(trajectory.input_ids, np.int32),
        loss_mask=trajectory.loss_mask,
        log_probs=trajectory.log_probs,
        response=tokenizer.decode(trajectory.response_ids),
        reward=trajectory.reward,
        versions=trajectory.versions,
        turn_count=trajectory.turn_count,
        tool_seconds=trajectory.tool_seconds,
        metadata_json=json.dumps(trajectory.metadata) if trajectory.metadata else "",
        engine_id=engine_id,
        rollout_index=trajectory.rollout_index,
        side=trajectory.recorded.side(trajectory.response_length),
    )


def scored(sample: Sample, score: Score) -> Sample:
    """The sample with its reward, or with the reason why there is none."""
    return replace(
        sample, reward=score.reward, unscored_reason=score.unscored_reason, reward_details=dict(score.details)
    )


def supervised_group(prompt: Prompt, tokenizer: Tokenizer, max_context_length: int | None) -> Group:
    """One sample whose response is the label and the end token, for supervised training.

    No engine took part: log-probs are 0, versions are empty, the reward is 0. A response that does not fit
    `max_context_length` is cut and TRUNCATED; the prompt is never cut.
    """
    response = tokenizer.encode(prompt.label)
    if tokenizer.eos_token_id is not None:
        response.append(tokenizer.eos_token_id)
    room = len(response) if max_context_length is None else max(0, max_context_length - len(prompt.tokens))
    status = SampleStatus.COMPLETED if len(response) <= room else SampleStatus.TRUNCATED
    response = response[:room]
    sample = Sample(
        sample_id=f"{prompt.group_id}-0",
        group_id=prompt.group_id,
        index=0,
        status=status,
        prompt_length=len(prompt.tokens),
        tokens=np.concatenate([prompt.tokens, np.array(response, np.int32)]).astype(np.int32),
        loss_mask=np.ones(len(response), np.uint8),
        log_probs=np.zeros(len(response), np.float32),
        response=prompt.label,
        reward=0.0,
    )
    return Group(group_id=prompt.group_id, ordinal=prompt.ordinal, samples=(sample,))


def unscored(samples: Sequence[Sample]) -> bool:
    """True when no sample has a reward: such a group teaches nothing."""
    return all(sample.reward is None for sample in samples)
