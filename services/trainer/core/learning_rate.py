"""Learning rate of an optimizer step: linear warm-up, then a decay. Pure."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, minimum: float, warmup: int, total: int, style: str) -> float:
    """Rate of optimizer step `step` (from 0).

    Args:
        step: optimizer steps already made.
        peak: rate after warm-up.
        minimum: rate at the end of the decay; ignored by "constant".
        warmup: optimizer steps of linear warm-up; step 0 then has peak / warmup.
        total: optimizer steps of the run.
        style: "constant", "linear" or "cosine".
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if style == "constant":
        return peak
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    share = 1 - progress if style == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return minimum + (peak - minimum) * share
