"""Whitening of advantages over all trained tokens of a step, which may lie on several ranks. Pure torch.

A rank gives the moments of its tokens; the caller adds them up over ranks (sums in float64 do not depend on how the
tokens are spread); each rank whitens its own.
"""

from __future__ import annotations

import torch

_EPSILON = 1e-8


def moments(values: torch.Tensor) -> torch.Tensor:
    """Count, sum and sum of squares of [k] values, float64 [3]; moments of parts add up to the whole's."""
    wide = values.detach().double()
    return torch.stack([wide.new_tensor(float(len(wide))), wide.sum(), wide.square().sum()])


def whiten(values: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """(value − mean) / √(variance + 1e-8), float32 [k], with mean and unbiased variance of all values.

    Formula: Hu et al., REINFORCE++ (2025), global advantage normalization. Of fewer than two values the variance
    counts as 0.

    Args:
        whole: float64 [3], the sum of `moments` of every part.
    """
    count, total, squares = whole
    mean = total / count.clamp(min=1)
    variance = ((squares - total * mean) / (count - 1).clamp(min=1)).clamp(min=0)
    return ((values.double() - mean) * (variance + _EPSILON).rsqrt()).to(values.dtype)
