"""Policy losses over the trained tokens of a pack, as pure torch functions of log-probs and advantages.

All arguments are float32 [k], one entry for each trained token, samples one after another (`segments.py`). What a token
counts in the loss, and by what the sum is divided, is not known here.

Invariants: where current and old log-probs are equal, ratios are exactly 1, `log_ratio` is 0 and nothing is clipped.
Ratios are finite for finite log-probs (their logarithm is limited to ±20), so an advantage of 0 gives 0; log-probs that
are not numbers give objectives that are not numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from services.trainer.core.algorithms.segments import expand, segment_mean

PolicyLoss = Literal["clip", "gspo", "cispo"]
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class PolicyLossSettings:
    """The ratio is clipped to [1 − eps_low, 1 + eps_high]; dual_clip: bound of a loss with negative advantage, as a
    multiple of it, or None."""

    eps_low: float
    eps_high: float
    kind: PolicyLoss = "clip"
    dual_clip: float | None = None


@dataclass(frozen=True)
class PolicyTerms:
    """Per-token terms, each [k]: the objective to be minimized; 1 where a bound decided it, else 0; the importance
    ratio that the loss used; old − current log-prob. Only the objective's gradient is meant to be used."""

    objective: torch.Tensor
    clipped: torch.Tensor
    ratio: torch.Tensor
    log_ratio: torch.Tensor


def policy_terms(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    settings: PolicyLossSettings,
    segments: torch.Tensor,
    count: int,
) -> PolicyTerms:
    """The loss of `settings.kind`: `clipped_surrogate` with a ratio by token or by sequence, or `cispo`.

    Args:
        log_probs: of the current policy, with gradient.
        old_log_probs: of the policy that the ratio is taken to.
        segments: int64 [k], the sample of each token.
        count: samples of the pack.
    """
    log_ratio = log_probs - old_log_probs
    if settings.kind == "gspo":
        ratio = sequence_ratio(log_probs, old_log_probs, segments, count)
    else:
        ratio = limited_exp(log_ratio)
    if settings.kind == "cispo":
        objective, clipped = cispo(log_probs, ratio, advantages, settings)
    else:
        objective, clipped = clipped_surrogate(ratio, advantages, settings)
    return PolicyTerms(objective, clipped, ratio, -log_ratio)


def limited_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log ratio within ±20."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, settings: PolicyLossSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(−r·A, −clip(r, 1 − ε_low, 1 + ε_high)·A); with dual clip c, at most −c·A where A < 0.

    Formula: Schulman et al., PPO (2017), eq. 7. Upper range of its own ("clip-higher"): Yu et al., DAPO (2025), eq. 10.
    Dual clip: Ye et al., Mastering Complex Control in MOBA Games (2020), eq. 5.

    Returns:
        Objective and whether a bound decided, both [k].
    """
    free = -ratio * advantages
    bound = -ratio.clamp(1 - settings.eps_low, 1 + settings.eps_high) * advantages
    objective, clipped = torch.maximum(free, bound), bound > free
    if settings.dual_clip is not None:
        cap = -settings.dual_clip * advantages
        capped = (advantages < 0) & (objective > cap)
        objective, clipped = torch.where(capped, cap, objective), clipped | capped
    return objective, clipped.float()


def sequence_ratio(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, segments: torch.Tensor, count: int
) -> torch.Tensor:
    """exp of the mean log ratio of the sample, at each of its tokens; the gradient at a token is the ratio times that
    of its own log-prob.

    Formula: Zheng et al., GSPO (2025), eq. 7 in the form of eq. 14 (GSPO-token), which has the same value, the same
    gradient where all tokens of a sample have one advantage, and holds for advantages and weights by token too.
    """
    mean = expand(segment_mean((log_probs - old_log_probs).detach(), segments, count), segments)
    return limited_exp(mean) * (log_probs - log_probs.detach()).exp()


def cispo(
    log_probs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, settings: PolicyLossSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """−clip(r, 1 − ε_low, 1 + ε_high)·A·log π without the gradient of the ratio; ε_low ≥ 1 is no lower bound.

    Formula: MiniMax-M1 (2025), eq. 4 and 5.

    Returns:
        Objective and whether the ratio was clipped, both [k].
    """
    ratio = ratio.detach()
    weight = ratio.clamp(1 - settings.eps_low, 1 + settings.eps_high)
    return -weight * advantages * log_probs, (weight != ratio).float()


def supervised_loss(log_probs: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the labels, [k]: −log π, the maximum likelihood objective of supervised fine-tuning."""
    return -log_probs


def decoupled(proximal: torch.Tensor, behaviour: torch.Tensor, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the decoupled PPO objective: π_prox / π_behav, and 0 where that is above `cap`.

    The objective is this weight times the clipped surrogate to π_prox. Formula: Hilton et al., Batch size-invariance
    for policy optimization (2022), decoupled clipped objective; for stale samples, with the cap: Fu et al., AReaL
    (2025).

    Args:
        proximal: log-probs of the policy at the step's begin, that the loss clips against.
        behaviour: log-probs of the policy that generated each token.

    Returns:
        Weights without gradient, and 1 where the cap left a token out, both [k].
    """
    weight = limited_exp((proximal - behaviour).detach())
    dropped = weight > cap
    return weight.masked_fill(dropped, 0.0), dropped.float()
