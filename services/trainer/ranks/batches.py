"""Samples → packed micro-batches on the rank's device.

Invariant: `rows` are exactly the positions whose next token is trained; every other token (prompt, environment,
padding, unscored samples) takes part in attention only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.common.records import Sample
from services.trainer.core.algorithms.normalizers import token_weights
from services.trainer.core.schedule import LossWeight, round_up
from services.trainer.ranks.kept_tokens import KeptTokens
from services.trainer.ranks.model.context import WHOLE, ContextCut
from services.trainer.ranks.model.packing import PackLayout, to_device
from services.trainer.ranks.routing_replay import RoutingRecord


@dataclass(frozen=True)
class Pack:
    """One micro-batch of t tokens, k of them trained.

    tokens int64 [t]; rows int64 [k], where the trained tokens are predicted; targets int64 [k], the trained tokens;
    weights, advantages, engine_log_probs float32 [k]; count: this pack's part of the step's divisor, a number and the
    same as int32 []; total_tokens: t without padding. segments int64 [k], ascending: place of a token's sample in
    `sample_ids`, of which there are `sample_count`; a sample without trained tokens has none. versions int32 [k]: the
    weight version that generated the token, 0 where no engine did. routing: experts to send its tokens to; kept: what
    log-probs are normalised over; None without replay.
    """

    layout: PackLayout
    tokens: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor
    engine_log_probs: torch.Tensor
    count: int
    divisor: torch.Tensor
    total_tokens: int
    segments: torch.Tensor
    versions: torch.Tensor
    sample_ids: tuple[str, ...]
    routing: RoutingRecord | None = None
    kept: KeptTokens | None = None

    @property
    def sample_count(self) -> int:
        """Number of samples, also of those without trained tokens."""
        return len(self.sample_ids)


@dataclass(frozen=True)
class PackSettings:
    """pad_multiple: divisor of every pack's length; supervised: advantages do not matter, every sample is trained;
    cut: this rank's part of every pack."""

    pad_multiple: int
    supervised: bool
    cut: ContextCut = WHOLE


def make_pack(
    samples: Sequence[Sample],
    advantages: Mapping[str, float],
    loss_weights: Mapping[str, LossWeight],
    settings: PackSettings,
    device: torch.device,
) -> Pack:
    """Packs samples one after another; pads with a segment of its own. Without samples the pack is padding only.
    `loss_weights` are those of the optimizer step that the pack is a part of."""
    lengths = np.array([len(sample.tokens) for sample in samples], np.int64)
    total = int(lengths.sum())
    padding = max(round_up(total, settings.pad_multiple), settings.pad_multiple) - total
    tokens = np.concatenate([*(sample.tokens for sample in samples), np.zeros(padding, np.int32)])
    trained = _trained(samples, lengths, advantages, settings)
    row, token = torch.from_numpy(trained.rows), torch.from_numpy(tokens.astype(np.int64))
    whole = torch.cat(
        [token, row, token[row + 1], torch.from_numpy(trained.segments), torch.from_numpy(trained.versions)]
    )
    whole = to_device(whole, device).split([len(token), *[len(row)] * 4])
    counts = np.bincount(trained.segments, minlength=len(samples))
    shares = [loss_weights[sample.sample_id] for sample in samples]
    weights = token_weights(counts, [share.weight for share in shares])
    real = np.concatenate([weights, trained.advantages, trained.engine_log_probs])
    weights, advantage, engine = to_device(torch.from_numpy(real), device).chunk(3)
    count = sum(share.divisor for share in shares)
    return Pack(
        layout=PackLayout(
            [*lengths.tolist(), padding] if padding else lengths.tolist(),
            device,
            whole[1] if settings.cut.size == 1 else row,
            settings.cut,
        ),
        tokens=whole[0],
        rows=whole[1],
        targets=whole[2],
        weights=weights,
        advantages=advantage,
        engine_log_probs=engine,
        count=count,
        # Ranks that share a pack add up to its count once.
        divisor=to_device(torch.tensor(count if settings.cut.rank == 0 else 0, dtype=torch.int32), device),
        total_tokens=total,
        segments=whole[3],
        versions=whole[4].to(torch.int32),
        sample_ids=tuple(sample.sample_id for sample in samples),
    )


@dataclass(frozen=True)
class _Trained:
    """What is known of the trained tokens of a pack, one entry each; names as in `Pack`, versions int64."""

    rows: np.ndarray
    segments: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    engine_log_probs: np.ndarray


def _trained(
    samples: Sequence[Sample], lengths: np.ndarray, advantages: Mapping[str, float], settings: PackSettings
) -> _Trained:
    """The trained tokens. A sample without an advantage has none, unless supervised."""
    found = [0.0 if settings.supervised else advantages.get(sample.sample_id) for sample in samples]
    responses = np.array([sample.response_length for sample in samples], np.int64)
    used = np.repeat(np.array([value is not None for value in found], bool), responses)
    index = np.flatnonzero(used & (np.concatenate([*(s.loss_mask for s in samples), np.zeros(0, np.uint8)]) != 0))
    shift = lengths.cumsum() - responses.cumsum() - 1  # response's place → row, which is one place earlier
    segments = np.repeat(np.arange(len(samples)), responses)[index]
    return _Trained(
        rows=index + shift[segments],
        segments=segments,
        versions=np.concatenate([*map(_versions, samples), np.zeros(0, np.int64)])[index],
        advantages=np.array([value or 0.0 for value in found], np.float32)[segments],
        engine_log_probs=np.concatenate([*(sample.log_probs for sample in samples), np.zeros(0, np.float32)])[index],
    )


def _versions(sample: Sample) -> np.ndarray:
    """Weight version of every response token, int64 [R]; 0 where no engine generated."""
    if not sample.versions:
        return np.zeros(sample.response_length, np.int64)
    return np.repeat([span.version for span in sample.versions], [span.end - span.start for span in sample.versions])
