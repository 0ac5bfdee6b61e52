"""Which tokens top-p and top-k left to the sampler, for the log-softmax over these alone.

Invariant: the token that was sampled is among the kept ones, whatever an engine said: its log-prob is finite.
Knows nothing of samples, packs and other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class KeptTokens:
    """Kept tokens of k places. counts, starts int64 [k]: number of ids and the first of them in `ids`, int64 [n]; a
    count of 0 keeps the whole vocabulary."""

    counts: torch.Tensor
    starts: torch.Tensor
    ids: torch.Tensor

    @staticmethod
    def of(counts: np.ndarray, ids: np.ndarray, targets: np.ndarray, device: torch.device) -> KeptTokens:
        """From counts [k] and the ids [sum of counts] in order; adds targets [k] that are missing where ids are."""
        counts = counts.astype(np.int64)
        owners = np.repeat(np.arange(len(counts)), counts)
        found = np.zeros(len(counts), bool)
        found[owners[ids == targets[owners]]] = True
        (lacking,) = np.nonzero(~found & (counts > 0))
        ids = np.insert(ids.astype(np.int64), counts.cumsum()[lacking], targets[lacking])
        counts[lacking] += 1
        starts = counts.cumsum() - counts
        return KeptTokens(*(torch.from_numpy(x).to(device) for x in (counts, starts, ids)))

    def at(self, take: Callable[[torch.Tensor], torch.Tensor]) -> KeptTokens:
        """Of some of the places, which `take` takes of a tensor [k]."""
        return KeptTokens(take(self.counts), take(self.starts), self.ids)

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Place and id of every kept token, each int64."""
        places = torch.repeat_interleave(torch.arange(len(self.counts), device=self.ids.device), self.counts)
        first = self.counts.cumsum(0) - self.counts
        within = torch.arange(len(places), device=self.ids.device) - first[places]
        return places, self.ids[self.starts[places] + within]


@dataclass(frozen=True)
class KeptShard:
    """Those kept tokens that are in this rank's part of the vocabulary.

    places, columns int64 [n]; cut bool [k]: places where not all tokens are kept; group: of the ranks that have the
    other parts, None without.
    """

    places: torch.Tensor
    columns: torch.Tensor
    cut: torch.Tensor
    group: torch.distributed.ProcessGroup | None

    @staticmethod
    def of(kept: KeptTokens, start: int, width: int, group: torch.distributed.ProcessGroup | None) -> KeptShard:
        """The part of the vocabulary [start, start + width)."""
        places, ids = kept.flat()
        inside = (ids >= start) & (ids < start + width)
        return KeptShard(places[inside], ids[inside] - start, kept.counts > 0, group)

    def log_probs(self, logits: torch.Tensor, normaliser: torch.Tensor, temperature: float) -> torch.Tensor:
        """log p of the whole vocabulary at the kept tokens, float32 [n]; normaliser [k]: log Σ exp of the whole."""
        return logits[self.places, self.columns].float() / temperature - normaliser[self.places]

    def log_mass(self, kept_log_probs: torch.Tensor) -> torch.Tensor:
        """log Σ p over the kept tokens of every place, float32 [k]; 0 where all are kept."""
        largest = kept_log_probs.new_full((len(self.cut),), -torch.inf)
        largest.scatter_reduce_(0, self.places, kept_log_probs, "amax")
        if self.group is not None:
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=self.group)
        largest = torch.where(self.cut, largest, 0.0)
        total = torch.zeros_like(largest).index_add_(0, self.places, (kept_log_probs - largest[self.places]).exp())
        if self.group is not None:
            torch.distributed.all_reduce(total, group=self.group)
        return torch.where(self.cut, largest + total.clamp(min=torch.finfo(total.dtype).tiny).log(), 0.0)

    def add_gradient(
        self, gradient: torch.Tensor, column: torch.Tensor, pull: torch.Tensor, kept_probs: torch.Tensor
    ) -> None:
        """Adds pull · (onehot − p) of the distribution over the kept tokens, in place.

        gradient [k, shard]; column int64 [k]: place of the target in the shard, −1 outside; pull float32 [k]: gradient
        of log p over temperature; kept_probs float32 [n].
        """
        own = torch.where(self.cut & (column >= 0))[0]
        gradient.index_put_((own, column[own]), pull[own].to(gradient.dtype), accumulate=True)
        values = (-pull[self.places] * kept_probs).to(gradient.dtype)
        gradient.index_put_((self.places, self.columns), values, accumulate=True)
