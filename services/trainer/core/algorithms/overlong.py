"""Soft penalty of responses that come near the longest that is allowed. Pure.

It is added where advantages are made, after groups were filtered and stored: a filter, the buffer and reward metrics
see rewards as graders gave them, so that dynamic sampling judges answers and not their lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.trainer.core.algorithms.estimators import ScoredSample


def overlong_penalty(response_length: int, longest: int, buffer: int, factor: float) -> float:
    """0 up to longest − buffer tokens, from there linearly down to −factor at `longest`, and −factor beyond.

    Formula: Yu et al., DAPO (2025), eq. 13, whose penalty is at most 1.
    """
    exceeded = response_length - (longest - buffer)
    return -factor * min(max(exceeded / buffer, 0.0), 1.0)


def with_overlong_penalty(
    samples: Sequence[ScoredSample], lengths: Mapping[str, int], longest: int, buffer: int, factor: float
) -> list[ScoredSample]:
    """Samples with the penalty in their rewards; unscored ones as they are.

    Args:
        lengths: response tokens by sample id.
        longest, buffer, factor: see `overlong_penalty`.
    """
    return [
        sample
        if sample.reward is None
        else replace(
            sample, reward=sample.reward + overlong_penalty(lengths[sample.sample_id], longest, buffer, factor)
        )
        for sample in samples
    ]
