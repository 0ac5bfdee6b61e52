"""Sums over the samples of a pack. A pack's values are float32 [k], one for each trained token, samples one after
another; `segments` int64 [k] is the sample of each, `count` the number of samples. Knows no formulas.

Invariant: a sample without trained tokens has sum and mean 0, and k may be 0. Sums are taken in float64, so that they
do not depend on the order in which a device adds.
"""

from __future__ import annotations

import torch


def segment_sum(values: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
    """Sum of each sample's values, [count] of the values' dtype."""
    zeros = torch.zeros(count, dtype=torch.float64, device=values.device)
    return zeros.index_add(0, segments, values.double()).to(values.dtype)


def segment_sizes(segments: torch.Tensor, count: int) -> torch.Tensor:
    """Trained tokens of each sample, int64 [count]."""
    zeros = torch.zeros(count, dtype=torch.int64, device=segments.device)
    return zeros.index_add(0, segments, torch.ones_like(segments))


def segment_mean(values: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
    """Mean of each sample's values, [count] of the values' dtype."""
    return segment_sum(values, segments, count) / segment_sizes(segments, count).clamp(min=1)


def expand(per_segment: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Every sample's value at each of its tokens, [k]."""
    return per_segment.double().index_select(0, segments).to(per_segment.dtype)  # float64: the gradient is a sum
