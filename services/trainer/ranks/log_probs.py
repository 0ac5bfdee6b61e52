"""Log-probabilities and entropies from logits whose vocabulary is cut over the tensor-parallel ranks.

Logits keep their type; all arithmetic is float32, the engines' convention: log softmax of (logits / temperature). The
backward pass computes the softmax again, so beside the logits and their gradient nothing of their size exists: 32768
rows of 151936 bfloat16 logits take 20 GB and not 70.

The passes over the logits are `softmax_kernels` on a GPU and `softmax_torch` elsewhere.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
import torch.distributed as dist

from services.common.telemetry import get_logger
from services.trainer.ranks import softmax_torch
from services.trainer.ranks.kept_tokens import KeptShard, KeptTokens


class _VocabularySoftmax(torch.autograd.Function):
    """logits [k, shard] → log p(target) [k], H [k], of x = logits / temperature.

    Backward: ∂log p/∂x = onehot − p; ∂H/∂x = −p (log p + H). With `kept` tokens p of log p is p / Σ p over these.
    """

    @staticmethod
    def forward(ctx, logits, targets, start, temperature, group, kept):
        ctx.set_materialize_grads(False)
        inside = (targets >= start) & (targets < start + logits.size(-1))
        column = torch.where(inside, targets - start, -1)
        largest, total, weighted = passes(logits.device).partials(logits, temperature)
        chosen = logits.gather(-1, column.clamp(min=0)[:, None])[:, 0].float() / temperature
        if group is not None:
            own, largest = largest, largest.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            lower = own - largest
            weighted, total = (weighted + total * lower) * lower.exp(), total * lower.exp()
        sums = torch.stack([total, weighted, torch.where(inside, chosen - largest, 0.0)])
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.temperature, ctx.kept = temperature, kept
        log_probs, kept_probs = chosen - log_total, None
        if kept is not None:
            kept_log_probs = kept.log_probs(logits, largest + log_total, temperature)
            log_mass = kept.log_mass(kept_log_probs)
            log_probs = log_probs - log_mass
            kept_probs = (kept_log_probs - log_mass[kept.places]).exp()
        ctx.save_for_backward(logits, column, largest + log_total, entropy, kept_probs)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        logits, column, normaliser, entropy, kept_probs = ctx.saved_tensors
        pull = torch.zeros_like(entropy) if grad_log_probs is None else grad_log_probs / ctx.temperature
        spread = None if grad_entropy is None else grad_entropy / ctx.temperature
        kept = ctx.kept
        whole = pull if kept is None else torch.where(kept.cut, 0.0, pull)
        gradient = passes(logits.device).gradient
        out = gradient(logits, column, (normaliser, entropy), (whole, spread), ctx.temperature)
        if kept is not None:
            kept.add_gradient(out, column, pull, kept_probs)
        return out, None, None, None, None, None


@functools.cache
def passes(device: torch.device) -> ModuleType:
    """The module that passes over logits on a device: the kernels on a GPU on which they can be built."""
    if device.type != "cuda":
        return softmax_torch
    try:
        from services.trainer.ranks import softmax_kernels

        softmax_kernels.partials(torch.zeros(1, 8, device=device), 1.0)
    except Exception as error:  # whatever hinders Triton: it is missing, or a compiler, or Python's headers
        get_logger(__name__).warning(
            "log-probs are computed without Triton's kernels, which is slower; they need a C compiler",
            error=f"{type(error).__name__}: {error}",
        )
        return softmax_torch
    return softmax_kernels


def log_probs_and_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    kept: KeptTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature)[target] and the entropy of that softmax, both float32 [k] and differentiable.

    Args:
        logits: [k, shard], this rank's part of the vocabulary (padding rows of the last shard are ignored).
        targets: int64 [k], ids of the whole vocabulary.
        vocab_size: true size of the vocabulary.
        temperature: softmax temperature.
        kept: tokens over which the log-probs are normalised, all without; the entropy is always that of all.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    start = group.rank() * logits.size(-1)
    own = max(min(vocab_size - start, logits.size(-1)), 0)
    x = logits if own == logits.size(-1) else logits[:, :own]
    others = group if group.size() > 1 else None
    shard = None if kept is None else KeptShard.of(kept, start, own, others)
    return vocabulary_softmax(x, targets, start, temperature, others, shard)


def vocabulary_softmax(
    logits: torch.Tensor,
    targets: torch.Tensor,
    start: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    kept: KeptShard | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log_probs_and_entropy` of logits [k, shard] that begin with token `start`; group: of the ranks that have the
    other shards, None for the whole vocabulary."""
    return _VocabularySoftmax.apply(logits, targets, start, temperature, group, kept)
