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
from services.trainer.core.losses import token_weights
from services.trainer.core.schedule import round_up
from services.trainer.ranks.model.packing import PackLayout, to_device


@dataclass(frozen=True)
class Pack:
    """One micro-batch of t tokens, k of them trained.

    tokens int64 [t]; rows int64 [k], where the trained tokens are predicted; targets int64 [k], the trained tokens;
    weights, advantages, engine_log_probs float32 [k]; count: this pack's part of the step's divisor, a number and the
    same as int32 []; total_tokens: t without padding.
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


@dataclass(frozen=True)
class PackSettings:
    """per_token: normalise over tokens instead of samples; pad_multiple: divisor of every pack's length;
    supervised: advantages do not matter, every sample is trained."""

    per_token: bool
    pad_multiple: int
    supervised: bool


def make_pack(
    samples: Sequence[Sample], advantages: Mapping[str, float], settings: PackSettings, device: torch.device
) -> Pack:
    """Packs samples one after another; pads with a segment of its own. Without samples the pack is padding only."""
    lengths = np.array([len(sample.tokens) for sample in samples], np.int64)
    total = int(lengths.sum())
    padding = max(round_up(total, settings.pad_multiple), settings.pad_multiple) - total
    tokens = np.concatenate([*(sample.tokens for sample in samples), np.zeros(padding, np.int32)])
    rows, trained, real = _trained(samples, lengths, advantages, settings)
    row, token = torch.from_numpy(rows), torch.from_numpy(tokens.astype(np.int64))
    whole = to_device(torch.cat([token, row, token[row + 1]]), device).split([len(token), len(row), len(row)])
    weights = token_weights(trained.tolist(), per_token=settings.per_token)
    weights, advantage, engine = to_device(torch.cat([weights, torch.from_numpy(real)]), device).chunk(3)
    count = int(trained.sum()) if settings.per_token else len(samples)
    return Pack(
        layout=PackLayout([*lengths.tolist(), padding] if padding else lengths.tolist(), device, whole[1]),
        tokens=whole[0],
        rows=whole[1],
        targets=whole[2],
        weights=weights,
        advantages=advantage,
        engine_log_probs=engine,
        count=count,
        divisor=to_device(torch.tensor(count, dtype=torch.int32), device),
        total_tokens=total,
    )


def _trained(
    samples: Sequence[Sample], lengths: np.ndarray, advantages: Mapping[str, float], settings: PackSettings
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of the trained tokens, int64 [k]; their number by sample, int64 [s]; their advantages and then their engine
    log-probs, float32 [2 k]. A sample without an advantage has none, unless supervised."""
    found = [0.0 if settings.supervised else advantages.get(sample.sample_id) for sample in samples]
    responses = np.array([sample.response_length for sample in samples], np.int64)
    ends = responses.cumsum()
    used = np.repeat(np.array([value is not None for value in found], bool), responses)
    index = np.flatnonzero(used & (np.concatenate([*(s.loss_mask for s in samples), np.zeros(0, np.uint8)]) != 0))
    shift = np.repeat(lengths.cumsum() - ends - 1, responses)  # response's place → row, which is one place earlier
    trained = np.diff(np.searchsorted(index, ends), prepend=0)
    engine = np.concatenate([*(sample.log_probs for sample in samples), np.zeros(0, np.float32)])[index]
    value = np.repeat(np.array([value or 0.0 for value in found], np.float32), trained)
    return index + shift[index], trained, np.concatenate([value, engine])
