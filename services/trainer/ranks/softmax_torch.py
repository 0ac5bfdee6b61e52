"""The two passes over logits that log-probs and entropies need, in torch: for the CPU, and a GPU without Triton.

Rows are taken in chunks, so there is never more than a chunk in float32. Knows nothing of other ranks' logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_CHUNK_ELEMENTS = 2**24
"""Logits handled at once: 64 MiB of float32, near the size of a GPU's cache, yet enough work for each launch."""


def partials(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every row of x = logits / temperature: the largest, Σ exp(x − largest), Σ exp(x − largest) (x − largest).

    logits: [k, shard], consecutive along the shard. Each result float32 [k].
    """
    largest = logits.amax(-1).float() / temperature
    total, weighted = torch.empty_like(largest), torch.empty_like(largest)
    for rows in _chunks(logits):
        x = _below(logits[rows], largest[rows], temperature)
        exponential = x.exp()
        total[rows] = exponential.sum(-1)
        weighted[rows] = exponential.mul_(x).sum(-1)
    return largest, total, weighted


def gradient(
    logits: torch.Tensor,
    column: torch.Tensor,
    softmax: tuple[torch.Tensor, torch.Tensor],
    pulls: tuple[torch.Tensor, torch.Tensor | None],
    temperature: float,
) -> torch.Tensor:
    """pull · onehot(column) − p (pull + spread (log p + H)), [k, shard] of the logits' type.

    Args:
        logits: as in `partials`.
        column: int64 [k], place of the target in the shard, −1 outside.
        softmax: log Σ exp x and entropy H of the whole vocabulary, each float32 [k].
        pulls: pull and spread, the gradients of log p(target) and of H, over temperature; each float32 [k]. Without a
            gradient of H, None.
        temperature: as in `partials`.
    """
    (normaliser, entropy), (pull, spread) = softmax, pulls
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    onto, place = torch.where(column >= 0, pull, 0.0)[:, None], column.clamp(min=0)[:, None]
    for rows in _chunks(logits):
        x = _below(logits[rows], normaliser[rows], temperature)
        if spread is None:
            chunk = x.exp_().mul_(-pull[rows, None])
        else:
            probs = x.exp()
            chunk = x.add_(entropy[rows, None]).mul_(spread[rows, None]).add_(pull[rows, None]).mul_(probs).neg_()
        grad[rows] = chunk.scatter_add_(-1, place[rows], onto[rows])
    return grad


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    step = max(_CHUNK_ELEMENTS // max(logits.size(-1), 1), 1)
    for first in range(0, len(logits), step):
        yield slice(first, first + step)


def _below(logits: torch.Tensor, rows: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits / temperature − rows, float32, in one pass."""
    return torch.add(-rows[:, None], logits, alpha=1 / temperature)
