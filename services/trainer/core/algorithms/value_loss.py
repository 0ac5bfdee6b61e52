"""The critic's loss and how much of the returns it explains. Pure torch; all tensors float32 [k], one entry for each
trained token of a pack. What a token counts, and by what the sum is divided, is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

VALUE_SUMS = ("tokens", "returns", "returns_square", "errors", "errors_square")
"""Keys of `value_sums`, in order; errors are returns − values."""


def value_terms(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """max((V_clip − R)², (V − R)²) with V_clip = V within V_old ± clip; without a clip (V − R)².

    Formula: Schulman et al., PPO (2017), L^VF of eq. 9, without a factor ½; clip: as written down by Engstrom et al.,
    Implementation Matters in Deep Policy Gradients (2020), §2.

    Args:
        values: of the critic, with gradient.
        old_values: of the critic before the step, from which the advantages were made.
        returns: what values should be.

    Returns:
        Loss, and 1 where the clip decided it, both [k].
    """
    free = (values - returns).square()
    if clip is None:
        return free, torch.zeros_like(free)
    # Bounds around the old value: within them V itself is left, to the last bit, and counts as not clipped.
    bound = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return torch.maximum(free, bound), (bound > free).to(free.dtype)


@torch.no_grad()
def value_sums(values: torch.Tensor, returns: torch.Tensor) -> dict[str, torch.Tensor]:
    """The keys of VALUE_SUMS, each float64 [], to be added over packs and ranks."""
    exact, errors = returns.double(), returns.double() - values.double()
    parts = (torch.ones_like(exact), exact, exact.square(), errors, errors.square())
    return {name: part.sum() for name, part in zip(VALUE_SUMS, parts, strict=True)}


def explained_variance(sums: Mapping[str, float]) -> float:
    """1 − Var(R − V) / Var(R) out of reduced `value_sums`; 0 where all returns are the same or there are none."""
    tokens = max(sums["tokens"], 1)
    variance, unexplained = (
        sums[f"{name}_square"] / tokens - (sums[name] / tokens) ** 2 for name in ("returns", "errors")
    )
    smallest = 1e-12 * sums["returns_square"] / tokens  # a variance below this is rounding
    return 1 - unexplained / variance if variance > smallest else 0.0
