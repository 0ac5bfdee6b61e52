"""Triton kernels for log-probs and entropies: logits are read once forward, and once read and their gradient written
backward.

Same functions as `softmax_torch`, for every device that Triton knows and for its interpreter. Arithmetic is float32;
beside the gradient nothing of the logits' size is made. The first call with a dtype and a vocabulary
compiles (about a second), which needs a C compiler.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _partials_kernel(logits, stride, scale, out, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """One row a program, its block in registers: the sums are kept by lane and rescaled as the largest grows."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    largest = tl.max(tl.full([BLOCK], -1e38, tl.float32), 0)  # finite: its distance is multiplied by sums that are 0
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for first in range(0, VOCABULARY, BLOCK):
        inside = first + lane < VOCABULARY
        x = tl.load(logits + row * stride + first + lane, mask=inside, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(largest, tl.max(x, 0))
        lower, shrink = largest - higher, tl.exp(largest - higher)
        below = tl.where(inside, x - higher, 0.0)
        e = tl.where(inside, tl.exp(below), 0.0)
        weighted = (weighted + total * lower) * shrink + e * below
        total = total * shrink + e
        largest = higher
    tl.store(out + row * 3, largest)
    tl.store(out + row * 3 + 1, tl.sum(total, 0))
    tl.store(out + row * 3 + 2, tl.sum(weighted, 0))


@triton.jit
def _gradient_kernel(logits, stride, numbers, column, grad, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """One block of one row a program. numbers: [k, 5]."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(numbers + row * 5)
    normaliser = tl.load(numbers + row * 5 + 1)
    entropy = tl.load(numbers + row * 5 + 2)
    pull = tl.load(numbers + row * 5 + 3)
    spread = tl.load(numbers + row * 5 + 4)
    target = tl.load(column + row)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < VOCABULARY
    log_p = tl.load(logits + row * stride + lane, mask=inside, other=0.0).to(tl.float32) * scale - normaliser
    value = tl.where(lane == target, pull, 0.0) - tl.exp(log_p) * (pull + spread * (log_p + entropy))
    tl.store(grad + row * VOCABULARY + lane, value.to(grad.dtype.element_ty), mask=inside)


def partials(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `softmax_torch.partials`."""
    out = torch.empty(len(logits), 3, device=logits.device)
    if len(logits):
        _partials_kernel[(len(logits),)](
            logits, logits.stride(0), 1 / temperature, out, logits.size(1), BLOCK=_BLOCK, num_warps=_WARPS
        )
    return out.unbind(1)


def gradient(
    logits: torch.Tensor,
    column: torch.Tensor,
    softmax: tuple[torch.Tensor, torch.Tensor],
    pulls: tuple[torch.Tensor, torch.Tensor | None],
    temperature: float,
) -> torch.Tensor:
    """As `softmax_torch.gradient`."""
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if len(logits):
        pull, spread = pulls
        scale = torch.full_like(pull, 1 / temperature)
        numbers = torch.stack([scale, *softmax, pull, torch.zeros_like(pull) if spread is None else spread], 1)
        grid = len(logits), triton.cdiv(logits.size(1), _BLOCK)
        _gradient_kernel[grid](
            logits, logits.stride(0), numbers, column, grad, logits.size(1), BLOCK=_BLOCK, num_warps=_WARPS
        )
    return grad
