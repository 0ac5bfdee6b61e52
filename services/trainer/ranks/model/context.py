"""Context parallelism: how the tokens of a pack are cut over ranks, and what the ranks tell each other.

A pack of t tokens is cut into 2 n equal chunks, and rank r of n has chunks r and 2 n − 1 − r: with causal attention
early tokens are cheap and late ones dear, so every rank gets some of both. What a rank has is in the order of the pack.

Keys and values of all ranks are gathered for attention. Values of the trained rows (log-probs, entropies, a critic's
values) are gathered too, so every formula sees whole packs on every rank and knows nothing of the cut. Invariant: each
rank computes the same loss of the whole pack and passes back gradients of its own rows only; the sum over ranks is the
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


@dataclass(frozen=True)
class ContextCut:
    """The part of rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def chunks(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """First place and end of the rank's chunks in a pack of `tokens`; one chunk when nothing is cut."""
        if self.size == 1:
            return ((0, tokens),)
        chunk, odd = divmod(tokens, 2 * self.size)
        if odd:
            raise ValueError(f"a pack of {tokens} tokens cannot be cut over {self.size} context-parallel ranks")
        return tuple((i * chunk, (i + 1) * chunk) for i in (self.rank, 2 * self.size - 1 - self.rank))

    def owners(self, places: np.ndarray, tokens: int) -> np.ndarray:
        """Rank that has each place, int64 [k]."""
        chunk = places // (tokens // (2 * self.size))
        return np.minimum(chunk, 2 * self.size - 1 - chunk)


WHOLE = ContextCut()


def context_cut() -> ContextCut:
    """This rank's part under megatron's present layout."""
    return ContextCut(parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size())


class RowShare:
    """Which rows of a pack this rank has, and how those of all ranks come together.

    Attributes:
        local: int64 [own], places of the own rows among the rank's tokens.
        mine: int64 [own], the own rows in the order of the pack.
        back: int64 [k], where each row is in the ranks' rows, each padded to `most`, one rank after the other.
    """

    def __init__(self, rows: np.ndarray, tokens: int, cut: ContextCut) -> None:
        owners = cut.owners(rows, tokens)
        counts = np.bincount(owners, minlength=cut.size)
        self.most = int(counts.max())
        self.back = np.empty(len(rows), np.int64)
        for rank in range(cut.size):
            (found,) = np.nonzero(owners == rank)
            self.back[found] = rank * self.most + np.arange(len(found))
        (self.mine,) = np.nonzero(owners == cut.rank)
        (early, _), (late, _) = cut.chunks(tokens)
        own, chunk = rows[self.mine], tokens // (2 * cut.size)
        self.local = np.where(own < early + chunk, own - early, own - late + chunk)


def gather_keys_values(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [t / n, heads, d] of this rank → [t, heads, d] in the order of the pack.

    Backward sums the gradients of all ranks and returns each its own.
    """
    group = parallel_state.get_context_parallel_group()
    gathered = gather_from_sequence_parallel_region(torch.stack((key, value), 1), group=group)
    by_rank = gathered.view(group.size(), 2, -1, *gathered.shape[1:])
    ordered = torch.cat((by_rank[:, 0], by_rank[:, 1].flip(0))).flatten(0, 1)
    return ordered[:, 0], ordered[:, 1]


class GatherRows(torch.autograd.Function):
    """Values of this rank's rows, each [own, ...] of the same type and shape → of all rows, each [k, ...].

    mine, back and most are those of a `RowShare`, on the device. Backward takes the own rows' gradients, for every rank
    computes the same loss.
    """

    @staticmethod
    def forward(ctx, mine, back, most, *values):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(mine)
        if not most:
            return tuple(value.clone() for value in values)
        group = parallel_state.get_context_parallel_group()
        own = values[0].new_zeros(most, len(values), *values[0].shape[1:])
        own[: len(mine)] = torch.stack(values, 1)
        parts = own.new_empty(group.size() * most, *own.shape[1:])
        dist.all_gather_into_tensor(parts, own, group=group)
        return parts.index_select(0, back).unbind(1)

    @staticmethod
    def backward(ctx, *gradients):
        (mine,) = ctx.saved_tensors
        return None, None, None, *(None if g is None else g.index_select(0, mine) for g in gradients)
