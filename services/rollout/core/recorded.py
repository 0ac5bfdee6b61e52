"""What engines told of a sample's generation, turn by turn, and the large tensors it becomes.

Rows of experts grow with the tokens that engines have read: a row is kept as it was told first, when the token took
part in generating; what a later turn, or a request that went on, tells of the same token again does not count.
Shapes: P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from services.common.errors import Code, ServiceError
from services.common.records import Sample
from services.common.side_payloads import KEPT_TOKENS, ROUTED_EXPERTS
from services.rollout.core.completion import Generation, KeptTokens, Recording


def join_experts(one: np.ndarray | None, two: np.ndarray | None) -> np.ndarray | None:
    """Rows of a request and of the one that went on from it, which tells of the same tokens again."""
    if one is None or two is None:
        return two if one is None else one
    return np.concatenate([one, two[len(one) :]])


def join_kept(one: KeptTokens | None, two: KeptTokens | None) -> KeptTokens | None:
    """Kept tokens of response tokens, one after the other."""
    if one is None or two is None:
        return two if one is None else one
    return KeptTokens(np.concatenate([one.counts, two.counts]), np.concatenate([one.ids, two.ids]))


class Recorded:
    """Collects over the turns of one trajectory."""

    def __init__(self) -> None:
        self._experts: np.ndarray | None = None
        self._kept: list[tuple[int, KeptTokens]] = []

    def add(self, generation: Generation, start: int, token_count: int) -> None:
        """Of a turn whose first token is number `start` of the response, and after which there are `token_count`
        tokens with the prompt. Raises TRAJECTORY_INVALID when an engine read other tokens than these."""
        if generation.kept is not None:
            self._kept.append((start, generation.kept))
        rows = generation.routed_experts
        if rows is None:
            return
        if len(rows) != token_count - 1:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "TRAJECTORY_INVALID",
                f"A trajectory of {token_count} tokens cannot be extended: the engine told where {len(rows)} tokens"
                f" were routed instead of {token_count - 1}; generate from the trajectory's own input_ids.",
            )
        self._experts = join_experts(self._experts, rows)

    def side(self, response_length: int) -> Mapping[str, np.ndarray]:
        """Tensors that go beside the sample, by name; empty when nothing was recorded."""
        tensors: dict[str, np.ndarray] = {}
        if self._experts is not None:
            narrow = self._experts.size and self._experts.max() < 256
            tensors[ROUTED_EXPERTS] = self._experts.astype(np.uint8 if narrow else np.int32)
        if self._kept:
            counts = np.zeros(response_length, np.int32)
            for start, kept in self._kept:
                counts[start : start + len(kept.counts)] = kept.counts
            tensors[KEPT_TOKENS] = np.concatenate([counts, *(kept.ids for _, kept in self._kept)])
        return tensors


def check_recorded(sample: Sample, record: Recording) -> None:
    """Raises RECORDING_MISSING when training could not replay what it is to."""
    trained = np.flatnonzero(sample.loss_mask)
    if not len(trained):
        return
    rows = len(sample.side.get(ROUTED_EXPERTS, ()))
    needed = sample.prompt_length + int(trained[-1])
    kept = sample.side.get(KEPT_TOKENS, np.zeros(sample.response_length, np.int32))[trained]
    if record.experts and rows < needed:
        what = f"where {needed} tokens were routed is needed, but of {rows} it was told"
    elif record.kept and not kept.all():
        what = f"which tokens the sampler had to choose from was not told for {int((kept == 0).sum())} trained tokens"
    else:
        return
    raise ServiceError(
        Code.FAILED_PRECONDITION,
        "RECORDING_MISSING",
        f"Sample {sample.sample_id} cannot be replayed in training: {what}; a generate function must use"
        " context.generate and append_generation.",
        sample_id=sample.sample_id,
    )
