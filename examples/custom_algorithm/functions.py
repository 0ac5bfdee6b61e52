"""An advantage, a loss and a correction by import path, each in a few lines of numpy or torch.

    trainer:
      custom_advantage_function_path: examples.custom_algorithm.functions.ranked
      custom_loss_function_path: examples.custom_algorithm.functions.soft_clip
      custom_tis_function_path: examples.custom_algorithm.functions.near_or_nothing

What each is given, and must return: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.common.run_spec.algorithm import AlgorithmSettings
from services.trainer.core.algorithms.custom_loss import LossInputs
from services.trainer.core.algorithms.estimators import ScoredSample
from services.trainer.core.algorithms.segments import expand, segment_mean


def ranked(samples: Sequence[ScoredSample], settings: AlgorithmSettings) -> dict[str, float]:
    """Ranks in place of rewards: a group's samples lie between −1 and 1, evenly, whatever the scale of its rewards."""
    groups: dict[str, list[ScoredSample]] = {}
    for sample in samples:
        if sample.reward is not None and not sample.removed:
            groups.setdefault(sample.group_id, []).append(sample)
    advantages = {}
    for members in groups.values():
        rewards = np.array([sample.reward for sample in members])
        better = (rewards[:, None] > rewards).sum(1) - (rewards[:, None] < rewards).sum(1)
        places = better / max(len(members) - 1, 1)
        advantages |= {sample.sample_id: float(place) for sample, place in zip(members, places, strict=True)}
    return advantages


def soft_clip(inputs: LossInputs, settings: AlgorithmSettings) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A clip without a corner: the gain of a ratio r saturates as tanh((r − 1) / ε) does."""
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    gain = 1 + settings.eps_clip * torch.tanh((ratio - 1) / settings.eps_clip)
    return -gain * inputs.advantages, {"gain": gain}


def near_or_nothing(
    *,
    train_log_probs: torch.Tensor,
    engine_log_probs: torch.Tensor,
    segments: torch.Tensor,
    count: int,
    settings: AlgorithmSettings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """No weights, but responses on which trainer and engine differ by more than 0.05 a token are left out."""
    distance = segment_mean((train_log_probs - engine_log_probs).abs(), segments, count)
    return torch.ones_like(train_log_probs), (expand(distance, segments) <= 0.05).float()
