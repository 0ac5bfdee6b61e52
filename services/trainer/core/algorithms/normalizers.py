"""What a trained token counts in the loss. Pure numpy, for the controller makes the weights and has no torch;
knows no formulas of losses.

The loss of an optimizer step is a sum over its trained tokens, each times its sample's weight, over the sum of its
samples' counts. Both are made for the whole optimizer step at once, so sums over any split into micro-batches and ranks
add up to the same. A sample without trained tokens adds to the divisor of all but token_mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.common.run_spec.algorithm import Normalizer


@dataclass(frozen=True)
class SampleWeights:
    """By sample of an optimizer step: weights float64 [s], of each of its trained tokens; counts int64 [s], what it
    adds to the divisor."""

    weights: np.ndarray
    counts: np.ndarray


def sample_weights(
    trained_tokens: Sequence[int],
    kind: Normalizer,
    *,
    rollouts: Sequence[str] | None = None,
    constant: float | None = None,
) -> SampleWeights:
    """Weights and counts of the samples of an optimizer step.

    token_mean: 1, over trained tokens (Yu et al., DAPO (2025), eq. 12). sample_mean: 1 / the sample's tokens, over
    samples (Shao et al., DeepSeekMath (2024), eq. 3). rollout_mean: 1 / the tokens of all samples of its rollout, over
    rollouts. constant: 1 / constant, over samples (Dr. GRPO: Liu et al., Understanding R1-Zero-like Training (2025),
    §3.2).

    Args:
        trained_tokens: by sample.
        kind: all kinds but rollout_mean give the same when called for a part of the step.
        rollouts: by sample, what rollout it comes from; with rollout_mean only.
        constant: tokens that count as one sample; with constant only.
    """
    tokens = np.asarray(trained_tokens, np.int64)
    ones = np.ones(len(tokens), np.int64)
    if kind == "token_mean":
        return SampleWeights(ones.astype(np.float64), tokens)
    if kind == "sample_mean":
        return SampleWeights(1 / tokens.clip(1), ones)
    if kind == "constant":
        if not constant:
            raise ValueError("loss_normalizer constant needs loss_constant")
        return SampleWeights(ones / constant, ones)
    if rollouts is None:
        raise ValueError("loss_normalizer rollout_mean needs the rollout of every sample")
    _, first, places = np.unique(np.asarray(rollouts, np.str_), return_index=True, return_inverse=True)
    counts = np.zeros(len(tokens), np.int64)
    counts[first] = 1
    totals = np.zeros(len(first), np.int64)
    np.add.at(totals, places, tokens)
    return SampleWeights(1 / totals[places].clip(1), counts)


def token_weights(trained_tokens: Sequence[int], weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """Weight of every trained token of some samples, one sample after another, float32 [sum of trained_tokens]."""
    return np.repeat(np.asarray(weights, np.float32), np.asarray(trained_tokens, np.int64))
