"""Advantages from rewards, by group. Pure numpy; knows neither tokens nor models.

An unscored sample (reward None) is left out of its group's statistics and gets no advantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

STD_EPSILON = 1e-6


@dataclass(frozen=True)
class ScoredSample:
    """Identity, group and reward of a sample; None when it could not be scored."""

    sample_id: str
    group_id: str
    reward: float | None


def group_advantages(samples: Sequence[ScoredSample], *, normalize_std: bool = True) -> dict[str, float]:
    """GRPO: (reward − group mean) / (group standard deviation + 1e-6), with the unbiased deviation.

    Groups are told apart by id, whatever their sizes. A group with a single scored sample keeps its reward minus its
    mean, which is 0. Formula: Shao et al., DeepSeekMath (2024), §4.1.

    Args:
        samples: any order; groups need not be contiguous.
        normalize_std: divide by the deviation (Dr. GRPO leaves that out).

    Returns:
        Advantage of every scored sample by sample id.
    """
    groups: dict[str, list[ScoredSample]] = {}
    for sample in samples:
        if sample.reward is not None:
            groups.setdefault(sample.group_id, []).append(sample)
    advantages: dict[str, float] = {}
    for members in groups.values():
        rewards = np.array([member.reward for member in members], dtype=np.float64)
        # The mean of equal numbers may be off by a rounding; their advantages are exactly 0.
        centred = rewards - rewards.mean() if np.ptp(rewards) else np.zeros_like(rewards)
        if normalize_std and len(members) > 1:
            centred = centred / (centred.std(ddof=1) + STD_EPSILON)
        advantages.update(zip((member.sample_id for member in members), centred.tolist(), strict=True))
    return advantages


def zero_share(advantages: Mapping[str, float]) -> float:
    """Share of samples whose advantage is 0: they teach nothing."""
    return float(np.mean([value == 0 for value in advantages.values()])) if advantages else 0.0
