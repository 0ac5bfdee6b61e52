"""Loss formulas over trained tokens, as pure torch functions.

All arguments named log_probs, weights and so on are float32 [k], one entry per trained token of a micro-batch, samples
one after another. Nothing here knows packs, ranks or samples: what a token counts is its weight (`token_weights`), and
a sum of weighted tokens over all micro-batches and ranks, divided by the step's count, is the loss.
"""

from __future__ import annotations

import numpy as np
import torch


def token_weights(trained_tokens: list[int], *, per_token: bool) -> torch.Tensor:
    """Weight of every trained token, [sum of trained_tokens].

    per_token: 1 each, to be divided by the trained tokens of the step. Otherwise 1 / (trained tokens of the sample), to
    be divided by the samples of the step: every sample counts the same, whatever its length.
    """
    if per_token:
        return torch.ones(sum(trained_tokens))
    counts = np.array(trained_tokens, np.int64)
    return torch.from_numpy(np.repeat(1 / counts.clip(1).astype(np.float32), counts))
