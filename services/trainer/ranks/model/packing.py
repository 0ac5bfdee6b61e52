"""How several sequences lie in one packed batch, for attention and rotary positions.

Megatron passes a `PackedSeqParams` through every layer; only our own `PackedAttention` reads it. What depends on the
pack alone (angles, padded batches) is computed once and used by every layer.

Invariant: segments follow each other without gaps; their lengths sum to the tokens of the pack.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

_PADDING_LIMIT = 1.25


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device; from pinned memory, so that the host does not wait for a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class SegmentBatch:
    """Segments of similar length as one padded batch.

    gather: int64 [n * width], token index of every cell (padding repeats the segment's first token);
    valid: int64 [tokens], cells that hold a token, in the order of the batch.
    """

    count: int
    width: int
    gather: torch.Tensor
    valid: torch.Tensor


class PackLayout(PackedSeqParams):
    """Segments of a pack of t tokens.

    Attributes:
        rows: int64 [k], places whose logits are wanted; None: all.
        positions: int64 [t], position of every token in its own segment.
        starts: int32 [segments + 1], on the device, for variable-length attention kernels.
        longest: tokens of the longest segment.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, rows: torch.Tensor | None = None) -> None:
        super().__init__(qkv_format="thd")
        self.lengths = tuple(lengths)
        self.longest = max(lengths)
        self.rows = rows
        starts = np.array([0, *lengths]).cumsum()
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        self.positions = to_device(torch.from_numpy(positions), device)
        self.starts = to_device(torch.from_numpy(starts.astype(np.int32)), device)
        self.device = device
        self._batches: tuple[tuple[SegmentBatch, ...], torch.Tensor] | None = None
        self._rotation: tuple[torch.Tensor, torch.Tensor] | None = None

    def rotation(self, inverse_frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rotary angles, each float32 [t, 1, head_dim / 2]; the first call decides for all
        layers."""
        if self._rotation is None:
            angles = (self.positions.float()[:, None] * inverse_frequencies)[:, None]
            self._rotation = angles.cos(), angles.sin()
        return self._rotation

    def batches(self) -> tuple[tuple[SegmentBatch, ...], torch.Tensor]:
        """Padded batches, and the int64 [t] index that puts their valid cells, concatenated, back in order."""
        if self._batches is None:
            self._batches = self._build_batches()
        return self._batches

    def _build_batches(self) -> tuple[tuple[SegmentBatch, ...], torch.Tensor]:
        starts = [0, *itertools.accumulate(self.lengths)]
        order = sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i])
        chunks: list[list[int]] = []
        for i in order:
            if self.lengths[i] == 0:
                continue
            if chunks and self.lengths[chunks[-1][0]] <= _PADDING_LIMIT * self.lengths[i]:
                chunks[-1].append(i)
            else:
                chunks.append([i])
        batches, sources = [], []
        for chunk in chunks:
            width = self.lengths[chunk[0]]
            first = torch.tensor([starts[i] for i in chunk])[:, None]
            lengths = torch.tensor([self.lengths[i] for i in chunk])[:, None]
            column = torch.arange(width)[None]
            filled = column < lengths
            cells = torch.where(filled, first + column, first)
            valid = filled.flatten().nonzero()[:, 0]
            sources.append(cells.flatten()[valid])
            batches.append(SegmentBatch(len(chunk), width, cells.flatten().to(self.device), valid.to(self.device)))
        back = torch.empty(sum(self.lengths), dtype=torch.int64)
        source = torch.cat(sources)
        back[source] = torch.arange(len(source))
        return tuple(batches), back.to(self.device)
