"""The kernels of `softmax_kernels` against the passes in torch, on one device: `python -m tests.oracle.softmax_cases`.

Run as a program, it prints the differences of all cases as JSON, by Triton's interpreter if TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json

import torch

SIZES = ((7, 1000), (3, 49152), (2, 151936))
"""Rows and vocabulary."""
TOLERANCE = {"log_sum": 2e-5, "entropy": 1e-4, "float32": 5e-5, "bfloat16": 2**-7}
"""Values: absolute, in nat, of about 10. Gradients: largest difference by the row's largest; bfloat16 has 8 bits,
and the interpreter cuts them off instead of rounding."""
_TEMPERATURE = 0.7


def differences(device: str, rows: int, vocabulary: int) -> dict[str, float]:
    """Largest differences from torch in float32 with the same logits."""
    from services.trainer.ranks import softmax_kernels, softmax_torch

    generator = torch.Generator().manual_seed(rows)
    shard = (torch.randn(rows, vocabulary + 24, generator=generator) * 4).bfloat16()
    shard[0, :vocabulary] = 2.0  # a uniform row
    column = torch.randint(0, vocabulary, (rows,), generator=generator)
    column[-1] = -1
    pull, spread = torch.randn(2, rows, generator=generator).to(device)
    logits, column = shard.to(device)[:, :vocabulary], column.to(device)
    truth = logits.float()
    expected = _softmax(softmax_torch.partials(truth, _TEMPERATURE))
    out: dict[str, float] = {}
    for inputs in (truth, logits):
        found = _softmax(softmax_kernels.partials(inputs, _TEMPERATURE))
        for name, ours, theirs in zip(("log_sum", "entropy"), found, expected, strict=True):
            out[name] = max(out.get(name, 0.0), (ours - theirs).abs().max().item())
        for pulls in ((pull, spread), (pull, None)):
            ours = softmax_kernels.gradient(inputs, column, expected, pulls, _TEMPERATURE).float()
            theirs = softmax_torch.gradient(truth, column, expected, pulls, _TEMPERATURE)
            apart = ((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)).max().item()
            name = str(inputs.dtype).removeprefix("torch.")
            out[name] = max(out.get(name, 0.0), apart)
    return out


def _softmax(partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """log Σ exp x and the entropy."""
    largest, total, weighted = partials
    return largest + total.log(), total.log() - weighted / total


if __name__ == "__main__":
    print(json.dumps([differences("cpu", *size) for size in SIZES]))
