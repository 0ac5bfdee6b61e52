"""Loss formulas over trained tokens, as pure torch functions.

All arguments named log_probs, weights and so on are float32 [k], one entry per trained token of a micro-batch, samples
one after another. Nothing here knows packs, ranks or samples: what a token counts is its weight (`token_weights`), and
a sum of weighted tokens over all micro-batches and ranks, divided by the step's count, is the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
_KL_LIMIT = 10.0


@dataclass(frozen=True)
class PolicyLossSettings:
    """eps_low, eps_high: the ratio is clipped to [1 − eps_low, 1 + eps_high]. Coefficients may be 0."""

    eps_low: float
    eps_high: float
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_type: str = "low_var_kl"


@dataclass(frozen=True)
class PolicyTerms:
    """Per-token terms, each [k]: clipped objective, whether the clip decided, exp(current − old), old − current."""

    objective: torch.Tensor
    clipped: torch.Tensor
    ratio: torch.Tensor
    log_ratio: torch.Tensor


def policy_terms(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, settings: PolicyLossSettings
) -> PolicyTerms:
    """max(−r·A, −clip(r, 1 − ε_low, 1 + ε_high)·A) with r = exp(current − old).

    Formula: Schulman et al., PPO (2017), eq. 7; separate upper range ("clip-higher"): Yu et al., DAPO (2025), eq. 10.
    """
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.exp()
    free = -ratio * advantages
    bound = -ratio.clamp(1 - settings.eps_low, 1 + settings.eps_high) * advantages
    return PolicyTerms(torch.maximum(free, bound), (bound > free).float(), ratio, -log_ratio)


def kl_estimate(log_probs: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    """Per-token estimate of KL(current ‖ reference), with d = current − reference.

    k1: d. k2: d²/2. k3: exp(−d) − 1 + d. low_var_kl: k3 clamped to ±10, whose exponent is clamped to ±20 too.
    Formulas: J. Schulman, "Approximating KL divergence" (2020).
    """
    difference = log_probs - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        return (-difference).exp() - 1 + difference
    if kind == "low_var_kl":
        safe = difference.clamp(-20.0, 20.0)
        return ((-safe).exp() - 1 + safe).clamp(-_KL_LIMIT, _KL_LIMIT)
    raise ValueError(f"kl_loss_type {kind!r} is unknown; use one of {', '.join(KL_TYPES)}")


def token_weights(trained_tokens: list[int], *, per_token: bool) -> torch.Tensor:
    """Weight of every trained token, [sum of trained_tokens].

    per_token: 1 each, to be divided by the trained tokens of the step. Otherwise 1 / (trained tokens of the sample), to
    be divided by the samples of the step: every sample counts the same, whatever its length.
    """
    if per_token:
        return torch.ones(sum(trained_tokens))
    counts = np.array(trained_tokens, np.int64)
    return torch.from_numpy(np.repeat(1 / counts.clip(1).astype(np.float32), counts))
