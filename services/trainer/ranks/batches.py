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
    total = sum(len(sample.tokens) for sample in samples)
    padding = max(round_up(total, settings.pad_multiple), settings.pad_multiple) - total
    lengths = [len(sample.tokens) for sample in samples] + ([padding] if padding else [])
    tokens = np.concatenate([*(sample.tokens for sample in samples), np.zeros(padding, np.int32)])
    rows, trained, values, engine = [], [], [], []
    offset = 0
    for sample in samples:
        advantage = 0.0 if settings.supervised else advantages.get(sample.sample_id)
        mask = sample.loss_mask != 0 if advantage is not None else np.zeros(sample.response_length, bool)
        response = np.flatnonzero(mask)
        rows.append(offset + sample.prompt_length + response - 1)
        trained.append(len(response))
        values.append(np.full(len(response), advantage or 0.0, np.float32))
        engine.append(sample.log_probs[response])
        offset += len(sample.tokens)
    row = torch.from_numpy(np.concatenate([*rows, np.zeros(0, np.int64)]))
    token = torch.from_numpy(tokens.astype(np.int64))
    weights = token_weights(trained, per_token=settings.per_token)
    whole = to_device(torch.cat([token, row, token[row + 1]]), device).split([len(token), len(row), len(row)])
    parts = [*values, *engine, np.zeros(0, np.float32)]
    real = to_device(torch.cat([weights, torch.from_numpy(np.concatenate(parts))]), device).chunk(3)
    count = sum(trained) if settings.per_token else len(samples)
    return Pack(
        layout=PackLayout(lengths, device, whole[1]),
        tokens=whole[0],
        rows=whole[1],
        targets=whole[2],
        weights=real[0],
        advantages=real[1],
        engine_log_probs=real[2],
        count=count,
        divisor=to_device(torch.tensor(count, dtype=torch.int32), device),
        total_tokens=total,
    )
