"""Checksums of what an engine's model holds on a GPU: SGLang's own kernel and hash, one wait for all tensors.

SGLang's `/weights_checker` waits for the device after each tensor, 0.1 ms by hundreds, while generation stands still.
Here every tensor's tiles are begun before the first is waited for. The adapter uses it only after both ways have given
the same for this engine. Knows SGLang's kernel by import, and names of tensors as the checker has them.
"""

from __future__ import annotations

from typing import Any

import torch

_SEED = 0x243F6A88
_SEEDS = {"seed1": _SEED, "seed2": (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF}
_TILE_WORDS = 8192
_SHAPE = {"TILE": _TILE_WORDS, "BLOCK": 256, "USE_CG": True, "num_warps": 4, "num_stages": 4}
_MASK = 2**64 - 1


@torch.no_grad()
def held_checksums(model: Any) -> dict[str, str]:
    """16 hex digits by tensor name, of parameters and buffers; waits for the present stream alone.

    Raises:
        RuntimeError: where SGLang has no such kernel, or tensors are no CUDA tensors of whole 4-byte words.
    """
    try:
        from sglang.srt.layers import multimodal as hashing
    except ImportError as error:
        raise RuntimeError(f"this SGLang has no hash of tensors on a GPU: {error}") from error
    constants = {"FM_C1": hashing.FMIX32_C1, "FM_C2": hashing.FMIX32_C2}
    constants |= {"POS_A": hashing.POS_C1, "POS_B": hashing.POS_C2}
    words = {name: _words(name, tensor) for name, tensor in _tensors(model)}
    tiles = [-(-each.numel() // _TILE_WORDS) for each in words.values()]
    sums = torch.empty(sum(tiles), dtype=torch.uint64, device=next(iter(words.values())).device)
    at = 0
    for each, count in zip(words.values(), tiles, strict=True):
        out = sums[at : at + count]
        hashing.hash_tiles32_kernel_blocked[(count,)](each, out, each.numel(), **_SEEDS, **constants, **_SHAPE)
        at += count
    owner = torch.repeat_interleave(torch.arange(len(tiles)), torch.tensor(tiles)).to(sums.device)
    total = torch.zeros(len(tiles), dtype=torch.int64, device=sums.device)
    total.index_add_(0, owner, sums.view(torch.int64))  # wraps around as unsigned numbers do
    return {name: f"{_finish(value & _MASK):016x}" for name, value in zip(words, total.tolist(), strict=True)}


def _tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    both = (*model.named_parameters(), *model.named_buffers())
    return [(name, tensor) for name, tensor in both if tensor.numel()]


def _words(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda or not tensor.is_contiguous() or tensor.nbytes % 4:
        raise RuntimeError(f"tensor {name} is not of whole words in one piece on a GPU")
    return tensor.detach().reshape(-1).view(torch.uint8).view(torch.uint32)


def _finish(x: int) -> int:
    """SplitMix64's finaliser."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
