"""Log-probabilities and entropies from logits whose vocabulary is cut over the tensor-parallel ranks.

Logits keep their type; all arithmetic is float32, the engines' convention: log softmax of (logits / temperature). Rows
are taken in chunks, and the backward pass computes the softmax again, so beyond the logits and their gradient there is
never more than a chunk in float32: 32768 rows of 151936 bfloat16 logits take 20 GB and not 70.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

_CHUNK_ELEMENTS = 2**24
"""Logits handled at once: 64 MiB of float32, near the size of a GPU's cache, yet enough work for each launch."""


class _VocabularySoftmax(torch.autograd.Function):
    """logits [k, shard] → log p(target) [k], H [k], of x = logits / temperature.

    Backward: ∂log p/∂x = onehot − p; ∂H/∂x = −p (log p + H).
    """

    @staticmethod
    def forward(ctx, logits, targets, start, temperature, group):
        ctx.set_materialize_grads(False)
        inside = (targets >= start) & (targets < start + logits.size(-1))
        column = torch.where(inside, targets - start, 0)[:, None]
        largest = logits.amax(-1).float() / temperature
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        sums = torch.empty(3, len(logits), device=logits.device)
        for rows in _chunks(logits):
            x = _below(logits[rows], largest[rows], temperature)
            sums[2, rows] = torch.where(inside[rows], x.gather(-1, column[rows])[:, 0], 0.0)
            exponential = x.exp()
            sums[0, rows] = exponential.sum(-1)
            sums[1, rows] = exponential.mul_(x).sum(-1)
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.temperature = temperature
        ctx.save_for_backward(logits, largest + log_total, entropy, inside, column)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        logits, normaliser, entropy, inside, column = ctx.saved_tensors
        inner = 1 / ctx.temperature
        pull = torch.zeros_like(entropy) if grad_log_probs is None else grad_log_probs * inner
        onto_target = torch.where(inside, pull, 0.0)[:, None]
        grad = torch.empty_like(logits)
        for rows in _chunks(logits):
            x = _below(logits[rows], normaliser[rows], ctx.temperature)
            if grad_entropy is None:
                chunk = x.exp_().mul_(-pull[rows, None])
            else:
                probs, spread = x.exp(), grad_entropy[rows, None] * inner
                chunk = x.add_(entropy[rows, None]).mul_(spread).add_(pull[rows, None]).mul_(probs).neg_()
            grad[rows] = chunk.scatter_add_(-1, column[rows], onto_target[rows])
        return grad, None, None, None, None


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    step = max(_CHUNK_ELEMENTS // max(logits.size(-1), 1), 1)
    for first in range(0, len(logits), step):
        yield slice(first, first + step)


def _below(logits: torch.Tensor, rows: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits / temperature − rows, float32, in one pass."""
    return torch.add(-rows[:, None], logits, alpha=1 / temperature)


def log_probs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, vocab_size: int, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature)[target] and the entropy of that softmax, both float32 [k] and differentiable.

    Args:
        logits: [k, shard], this rank's part of the vocabulary (padding rows of the last shard are ignored).
        targets: int64 [k], ids of the whole vocabulary.
        vocab_size: true size of the vocabulary.
        temperature: softmax temperature.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    start = group.rank() * logits.size(-1)
    own = max(min(vocab_size - start, logits.size(-1)), 0)
    x = logits if own == logits.size(-1) else logits[:, :own]
    return _VocabularySoftmax.apply(x, targets, start, temperature, group if group.size() > 1 else None)
