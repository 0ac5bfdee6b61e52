"""How several sequences lie in one packed batch, for attention and rotary positions.

Megatron passes a `PackedSeqParams` through every layer; only our own `PackedAttention` reads it. What depends on the
pack alone (angles, padded batches) is computed once and used by every layer.

With context parallelism a rank has only a part of the pack's tokens and rows: `PackLayout` cuts what belongs to tokens
or rows (`own_tokens`, `own_rows`) and puts rows together again (`all_rows`). Alone, a rank has all of them.

Invariant: segments follow each other without gaps; their lengths sum to the tokens of the pack.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from services.trainer.ranks.model.context import WHOLE, ContextCut, GatherRows, RowShare

_PADDING_LIMIT = 1.25


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device; from pinned memory, so that the host does not wait for a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class SegmentBatch:
    """Beginnings of segments, of similar length, as one padded batch.

    gather, keys: int64 [n * width], index of every cell among this rank's tokens and in the pack (padding repeats the
    segment's first token); valid: int64 [tokens], cells that hold a token, in the order of the batch.
    """

    count: int
    width: int
    gather: torch.Tensor
    keys: torch.Tensor
    valid: torch.Tensor


@dataclass(frozen=True)
class Continued:
    """The rest of a segment whose beginning is in another chunk.

    queries: its place among this rank's tokens; keys: the segment up to its end, in the pack; mask: bool
    [queries, keys], what a query sees.
    """

    queries: slice
    keys: slice
    mask: torch.Tensor


@dataclass(frozen=True)
class Chunk:
    """A run of this rank's tokens, for attention kernels of variable length: a query sees the keys of its segment
    except as many of the last as there are queries after it.

    queries: places among this rank's tokens; keys: places in the pack. starts: int32 [pieces + 1] of the pieces of
    segments, of queries and of keys, each from 0; longest: tokens of the longest piece of either.
    """

    queries: slice
    keys: slice
    starts: tuple[torch.Tensor, torch.Tensor]
    longest: tuple[int, int]


class PackLayout(PackedSeqParams):
    """Segments of a pack of t tokens, and this rank's part of them.

    Attributes:
        lengths: tokens of every segment.
        positions: int64 [own], position of each of this rank's tokens in its own segment.
        rows: int64, those of this rank's tokens whose logits are wanted; None: all.
        cut: the part of this rank.

    Args:
        rows: int64 [k], places in the pack whose logits are wanted, on the host when the pack is cut.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        rows: torch.Tensor | None = None,
        cut: ContextCut = WHOLE,
    ) -> None:
        super().__init__(qkv_format="thd")
        self.lengths = tuple(lengths)
        self.rows, self.cut, self.device = rows, cut, device
        starts = np.array([0, *lengths]).cumsum()
        self._starts, self._places = starts, cut.chunks(int(starts[-1]))
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        if cut.size > 1:
            positions = np.concatenate([positions[first:end] for first, end in self._places])
            self._share_rows(rows)
        self.positions = to_device(torch.from_numpy(positions), device)
        self._chunks: tuple[Chunk, ...] | None = None
        self._batches: tuple[tuple[SegmentBatch, ...], tuple[Continued, ...], torch.Tensor] | None = None
        self._rotations: dict[tuple[float, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def _share_rows(self, rows: torch.Tensor | None) -> None:
        wanted = np.arange(self._starts[-1]) if rows is None else rows.cpu().numpy()
        share = RowShare(wanted, int(self._starts[-1]), self.cut)
        parts = [torch.from_numpy(part) for part in (share.local, share.mine, share.back)]
        local, self._mine, self._back = to_device(torch.cat(parts), self.device).split([len(part) for part in parts])
        self._most = share.most
        self.rows = None if rows is None else local

    def own_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """[t, ...], equal on all ranks → [own, ...], those of this rank's tokens."""
        return torch.cat([values[first:end] for first, end in self._places]) if self.cut.size > 1 else values

    def own_rows(self, values: torch.Tensor) -> torch.Tensor:
        """[k, ...], equal on all ranks → those of this rank's rows. No gradient flows."""
        return values.index_select(0, self._mine) if self.cut.size > 1 else values

    def all_rows(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of this rank's rows, all of the same type and shape → each [k, ...] of the whole pack; differentiable.
        Collective over the context-parallel ranks."""
        return GatherRows.apply(self._mine, self._back, self._most, *values) if self.cut.size > 1 else values

    def rotation(self, key: tuple[float, ...], inverse_frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rotary angles, each float32 [own, 1, head_dim / 2], computed once for all layers of
        all models with these frequencies. `key`: the same numbers on the host."""
        if key not in self._rotations:
            angles = (self.positions.float()[:, None] * inverse_frequencies)[:, None]
            self._rotations[key] = angles.cos(), angles.sin()
        return self._rotations[key]

    def _pieces(self) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
        """For every chunk of this rank: its first place among the rank's tokens, and where each piece of a segment in
        it begins and ends and where its segment begins, in the pack."""
        local = 0
        for first, end in self._places:
            inside = [
                (max(start, first), min(stop, end), start)
                for start, stop in itertools.pairwise(self._starts.tolist())
                if start < stop and start < end and stop > first
            ]
            yield local, inside
            local += end - first

    def chunks(self) -> tuple[Chunk, ...]:
        """This rank's tokens in runs."""
        if self._chunks is None:
            self._chunks = tuple(self._chunk(local, pieces) for local, pieces in self._pieces())
        return self._chunks

    def _chunk(self, local: int, pieces: list[tuple[int, int, int]]) -> Chunk:
        begins, ends, segments = zip(*pieces, strict=True)
        # Only the first piece's segment can begin before the chunk, so the keys of all are one run.
        queries = np.array([*begins, ends[-1]], np.int32) - begins[0]
        keys = np.array([*segments, ends[-1]], np.int32) - segments[0]
        starts = to_device(torch.from_numpy(np.stack((queries, keys))), self.device)
        return Chunk(
            queries=slice(local, local + ends[-1] - begins[0]),
            keys=slice(segments[0], ends[-1]),
            starts=(starts[0], starts[1]),
            longest=(int(np.diff(queries).max()), int(np.diff(keys).max())),
        )

    def batches(self) -> tuple[tuple[SegmentBatch, ...], tuple[Continued, ...], torch.Tensor]:
        """Padded batches, rests of segments, and the int64 [own] index that puts the valid cells of the batches and
        then the rests, concatenated, back in order."""
        if self._batches is None:
            self._batches = self._build_batches()
        return self._batches

    def _build_batches(self) -> tuple[tuple[SegmentBatch, ...], tuple[Continued, ...], torch.Tensor]:
        beginnings, rests = [], []
        for local, pieces in self._pieces():
            offset = local - pieces[0][0]
            for first, end, segment in pieces:
                (beginnings if first == segment else rests).append((first, end, segment, first + offset))
        beginnings.sort(key=lambda piece: piece[0] - piece[1])
        chunks: list[list[tuple[int, int, int]]] = []
        for first, end, _, local in beginnings:
            length = end - first
            if not chunks or chunks[-1][0][1] > _PADDING_LIMIT * length:
                chunks.append([])
            chunks[-1].append((first, length, local))
        batches, sources = [], []
        for chunk in chunks:
            batch, source = self._batch(*(torch.tensor(column)[:, None] for column in zip(*chunk, strict=True)))
            batches.append(batch)
            sources.append(source)
        continued = []
        for first, end, segment, local in rests:
            seen = torch.ones(end - first, end - segment, dtype=torch.bool).tril(first - segment)
            queries = slice(local, local + end - first)
            continued.append(Continued(queries, slice(segment, end), seen.to(self.device)))
            sources.append(torch.arange(queries.start, queries.stop))
        source = torch.cat(sources)
        back = torch.empty_like(source)
        back[source] = torch.arange(len(source))
        return tuple(batches), tuple(continued), back.to(self.device)

    def _batch(
        self, first: torch.Tensor, lengths: torch.Tensor, local: torch.Tensor
    ) -> tuple[SegmentBatch, torch.Tensor]:
        """The batch of segments, and which of this rank's tokens its valid cells are; arguments int64 [n, 1]."""
        width = int(lengths.max())
        column = torch.arange(width)[None]
        filled = column < lengths
        shift = torch.where(filled, column, 0)
        gather, keys = (local + shift).flatten(), (first + shift).flatten()
        valid = filled.flatten().nonzero()[:, 0]
        device = self.device
        batch = SegmentBatch(len(lengths), width, gather.to(device), keys.to(device), valid.to(device))
        return batch, gather[valid]
