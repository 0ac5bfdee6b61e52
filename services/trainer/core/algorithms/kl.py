"""KL to a reference model: estimates by token, and the controller that adapts their coefficient. Pure torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
_KL_LIMIT = 10.0
_EXPONENT_LIMIT = 20.0
_ERROR_LIMIT = 0.2


def kl_estimate(log_probs: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    """Per-token estimate of KL(current ‖ reference), with d = current − reference, float32 [k].

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
        safe = difference.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)
        return ((-safe).exp() - 1 + safe).clamp(-_KL_LIMIT, _KL_LIMIT)
    raise ValueError(f"kl_loss_type {kind!r} is unknown; use one of {', '.join(KL_TYPES)}")


def unbiased(kl: torch.Tensor, log_probs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """KL estimates of tokens that the policy `old` chose, weighted to be those of the current policy, float32 [k].

    exp(current − old) · kl, with the ratio's gradient: only so is the gradient that of KL(current ‖ reference).
    Formula: DeepSeek-AI, DeepSeek-V3.2 (2025), §3.1, "unbiased KL estimate"; Tang & Munos, "On a few pitfalls in KL
    divergence gradient estimation for RL" (2025).
    """
    return (log_probs - old).exp() * kl


@dataclass
class AdaptiveKl:
    """Coefficient of the KL that follows the measured KL towards a target.

    β ← β · (1 + clip(KL / target − 1, ±0.2) · samples / horizon).
    Formula: Ziegler et al., "Fine-tuning language models from human preferences" (2019), §2.2, whose K_β is
    samples / horizon here.

    Attributes:
        coef: β now; all the state there is.
        target: KL to aim at, in the unit of the measured one.
        horizon: samples after which a KL that stays 20% off has changed β by about 20%.
    """

    coef: float
    target: float
    horizon: int

    def update(self, kl: float, samples: int) -> float:
        """The coefficient after `samples` more samples with mean KL `kl`. Raises ValueError when that is no number."""
        if not math.isfinite(kl):
            raise ValueError(f"the measured KL is {kl}: the coefficient cannot follow it")
        error = min(max(kl / self.target - 1, -_ERROR_LIMIT), _ERROR_LIMIT)
        self.coef *= max(1 + error * samples / self.horizon, 0.0)
        return self.coef
