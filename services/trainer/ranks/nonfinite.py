"""Stops a step whose numbers are not numbers, on every rank, before anything is updated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from services.common.errors import Code, ServiceError

_NAMED = 5
"""Samples that a sentence names."""


def check_finite(broken: Sequence[tuple[tuple[str, ...], torch.Tensor]], what: str) -> None:
    """Raises on all ranks when any rank has a broken sample. All ranks must call it.

    Args:
        broken: by pack: its sample ids, and whether each is broken, bool [count].
        what: which number, as in "the loss of optimizer step 3".

    Raises:
        ServiceError: LOSS_NOT_FINITE, with the samples at fault.
    """
    found = torch.stack([flags.any() for _, flags in broken]).any().float()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if not found.item():
        return
    own = [name for ids, flags in broken for name, bad in zip(ids, flags.tolist(), strict=True) if bad]
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    names = sorted({name for part in gathered for name in part})
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    raise ServiceError(
        Code.FAILED_PRECONDITION,
        "LOSS_NOT_FINITE",
        f"{what} is infinite or not a number for {'sample' if len(names) == 1 else 'samples'}"
        f" {', '.join(names[:_NAMED])}{more}; nothing was updated, and the last checkpoint stands. Look at the"
        " rewards and log-probs of these samples, or lower lr.",
        sample_ids=",".join(names),
    )


def not_finite(values: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
    """Which samples have a token whose value is infinite or no number, bool [count]."""
    failed = (~values.isfinite()).long()
    return failed.new_zeros(count).index_add(0, segments, failed) > 0
