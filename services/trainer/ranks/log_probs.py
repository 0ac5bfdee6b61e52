"""Log-probabilities and entropies from logits whose vocabulary is cut over the tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state


class _VocabularySoftmax(torch.autograd.Function):
    """x [k, shard] → log p(target) [k], H [k]. Backward: ∂log p/∂x = onehot − p; ∂H/∂x = −p (log p + H)."""

    @staticmethod
    def forward(ctx, x, targets, start, group):
        alone = group is None
        largest = x.amax(-1, keepdim=True)
        if not alone:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        x = x - largest
        exponential = x.exp()
        inside = (targets >= start) & (targets < start + x.size(-1))
        column = torch.where(inside, targets - start, 0)[:, None]
        chosen = torch.where(inside, x.gather(-1, column)[:, 0], 0.0)
        sums = torch.stack([exponential.sum(-1), torch.linalg.vecdot(exponential, x), chosen])
        if not alone:
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(exponential.div_(total[:, None]), x.sub_(log_total[:, None]), entropy, inside, column)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        probs, log_probs, entropy, inside, column = ctx.saved_tensors
        grad = probs * -grad_log_probs[:, None]
        grad.scatter_add_(-1, column, torch.where(inside, grad_log_probs, 0.0)[:, None])
        if grad_entropy is not None:
            grad -= probs * (log_probs + entropy[:, None]) * grad_entropy[:, None]
        return grad, None, None, None


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
    x = logits[:, : max(min(vocab_size - start, logits.size(-1)), 0)].float()
    if temperature != 1.0:
        x = x / temperature
    return _VocabularySoftmax.apply(x, targets, start, group if group.size() > 1 else None)
