"""Numbers of trained tokens, by sample: the form in which actor and critic tell each other values and returns.

The ranks of the two deal and pack samples differently, but agree on which tokens of a sample are trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from megatron.core import parallel_state

from services.common.errors import Code, ServiceError
from services.trainer.ranks.batches import Pack
from services.trainer.ranks.model.packing import to_device

_NOTHING = np.zeros(0, np.float32)


def of_pack(pack: Pack, numbers: Mapping[str, np.ndarray], what: str) -> torch.Tensor:
    """float32 [k] on the pack's device; a sample without trained tokens may be missing.

    Raises:
        ServiceError: NUMBERS_INCOMPLETE.
    """
    found = np.concatenate([*(numbers.get(name, _NOTHING) for name in pack.sample_ids), _NOTHING])
    if len(found) != len(pack.rows):
        counts = np.bincount(pack.segments.cpu().numpy(), minlength=pack.sample_count).tolist()
        wrong = [n for n, k in zip(pack.sample_ids, counts, strict=True) if len(numbers.get(n, _NOTHING)) != k]
        raise ServiceError(
            Code.INTERNAL,
            "NUMBERS_INCOMPLETE",
            f"Actor and critic disagree on the trained tokens of sample {wrong[0]}: {what} has"
            f" {len(numbers.get(wrong[0], _NOTHING))} of them.",
            sample_id=wrong[0],
        )
    return to_device(torch.from_numpy(found), pack.rows.device)


def by_sample(packs: Iterable[tuple[Pack, torch.Tensor]]) -> dict[str, np.ndarray]:
    """float32 [trained tokens] of every sample of this rank's packs, from float32 [k] of each pack. Empty on a rank
    that has the same packs as another."""
    if parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_context_parallel_rank():
        return {}
    found: dict[str, np.ndarray] = {}
    for pack, numbers in packs:
        counts = np.bincount(pack.segments.cpu().numpy(), minlength=pack.sample_count)
        parts = np.split(numbers.detach().cpu().numpy(), counts.cumsum()[:-1]) if len(counts) else []
        found |= zip(pack.sample_ids, parts, strict=True)
    return found
