"""Metrics of a step: what every pack adds up on its device, and how ranks and optimizer steps are put together.

Nothing waits for the device before `reduce_statistics`. Every pack of a run has the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from services.trainer.ranks.batches import Pack
from services.trainer.ranks.nonfinite import not_finite

_HIGH = 0.99


@dataclass(frozen=True)
class PackStatistics:
    """means: sums weighted as the loss is, to be divided by the optimizer step's divisor; sums: plain ones; maxima:
    none below 0; all float64 []. distances: |trainer − engine| by token, float32 [n]. broken: samples of the pack whose
    loss is not finite, bool [count]."""

    means: Mapping[str, torch.Tensor]
    sums: Mapping[str, torch.Tensor]
    maxima: Mapping[str, torch.Tensor]
    distances: torch.Tensor
    broken: torch.Tensor


@dataclass(frozen=True)
class Reduced:
    """Over all ranks. means: by optimizer step; sums: of all; maxima; distance_p99: the distance that 99% do not
    exceed."""

    means: list[dict[str, float]]
    sums: dict[str, float]
    maxima: dict[str, float]
    distance_p99: float

    def mean(self, name: str) -> float:
        """Mean over the optimizer steps."""
        return sum(row[name] for row in self.means) / len(self.means)

    def part(self, prefix: str) -> dict[str, float]:
        """Sums whose names begin with a prefix, without it."""
        return {name.removeprefix(prefix): n for name, n in self.sums.items() if name.startswith(prefix)}


@dataclass
class Collected:
    """What a pack's loss writes down: per-token terms by kind, [k] each; sums are float64 []."""

    means: dict[str, torch.Tensor] = field(default_factory=dict)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    distances: torch.Tensor | None = None


@torch.no_grad()
def pack_statistics(loss: torch.Tensor, collected: Collected, pack: Pack) -> PackStatistics:
    """Statistics of a pack with the loss [k] of its tokens."""
    zero = torch.zeros((), dtype=torch.float64, device=loss.device)
    counts = {"count": pack.count, "samples": pack.sample_count, "tokens": len(loss), "all_tokens": pack.total_tokens}
    return PackStatistics(
        means={name: (term * pack.weights).sum().double() for name, term in {"loss": loss, **collected.means}.items()},
        sums={name: zero + n for name, n in counts.items()} | {n: t.double() for n, t in collected.sums.items()},
        maxima={name: term.amax().double() if len(term) else zero for name, term in collected.maxima.items()},
        distances=loss[:0].float() if collected.distances is None else collected.distances,
        broken=not_finite(loss, pack.segments, pack.sample_count),
    )


def reduce_statistics(steps: Sequence[Sequence[PackStatistics]], group: dist.ProcessGroup) -> Reduced:
    """All packs of all optimizer steps of all ranks of a group. The group must agree on names and steps."""
    first = steps[0][0]
    means, sums, maxima = sorted(first.means), sorted(first.sums), sorted(first.maxima)
    added = torch.stack([_added(packs, means, sums) for packs in steps])
    highest = added.new_zeros(0)
    if maxima:
        highest = torch.stack([torch.stack([p.maxima[n] for n in maxima]) for packs in steps for p in packs]).amax(0)
    if group.size() > 1:
        dist.all_reduce(added, group=group)
        if maxima:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    rows = [dict(zip([*means, *sums], row, strict=True)) for row in added.tolist()]
    distances = torch.cat([pack.distances for packs in steps for pack in packs])
    return Reduced(
        means=[{name: row[name] / max(row["count"], 1) for name in means} for row in rows],
        sums={name: sum(row[name] for row in rows) for name in sums},
        maxima=dict(zip(maxima, highest.tolist(), strict=True)),
        distance_p99=percentile(distances, _HIGH, group),
    )


def _added(packs: Sequence[PackStatistics], means: list[str], sums: list[str]) -> torch.Tensor:
    rows = [torch.stack([*(pack.means[n] for n in means), *(pack.sums[n] for n in sums)]) for pack in packs]
    return torch.stack(rows).sum(0)


def percentile(values: torch.Tensor, share: float, group: dist.ProcessGroup) -> float:
    """Smallest value that at least `share` of all values do not exceed, over every rank of a group; 0 without values.

    values: [n] with an n of each rank's own, none below 0.
    """
    if group.size() > 1:
        most = torch.tensor([len(values)], device=values.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        padded = torch.nn.functional.pad(values, (0, int(most) - len(values)), value=-1.0)
        gathered = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(gathered, padded, group=group)
        values = torch.cat(gathered)
        values = values[~(values < 0)]  # a NaN stays
    if not len(values):
        return 0.0
    return values.sort().values[math.ceil(share * len(values)) - 1].item()
