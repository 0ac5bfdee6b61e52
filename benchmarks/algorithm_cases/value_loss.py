"""The critic's loss with its gradient, explained variance, and what a sum over tokens is divided by."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.algorithm_cases import Case, distance
from benchmarks.algorithm_cases.batch import WIDTH, Ragged
from benchmarks.algorithm_cases.policy_losses import reduced
from services.common.run_spec.algorithm import Normalizer
from services.trainer.core.algorithms.normalizers import sample_weights, token_weights
from services.trainer.core.algorithms.value_loss import explained_variance, value_sums, value_terms

CLIP = 0.3


def cases() -> Iterator[Case]:
    """Rows of these families."""
    yield Case("value loss", "clip, token mean", "verl", _verl, needs="verl", bar=5e-6)
    yield Case("value loss", "no clip", "torch mse_loss, float64", _free, bar=5e-6)
    yield Case("value loss", "explained variance out of parts", "float64", _explained)
    for kind, mode in (
        ("token_mean", "token-mean"),
        ("sample_mean", "seq-mean-token-mean"),
        ("constant", "seq-mean-token-sum-norm"),
    ):
        yield Case("normaliser", kind, "verl", partial(_normalizer, kind, mode), needs="verl")
    for kind in ("token_mean", "sample_mean", "rollout_mean", "constant"):
        yield Case("normaliser", f"{kind} in any split", "float64", partial(_split, kind))


def _returns(batch: Ragged) -> torch.Tensor:
    return 10 * (batch.engine - batch.old)  # any numbers [s, w] of the size of values


def _verl(batch: Ragged) -> float:
    """Loss, gradient and clip fraction; theirs has a factor ½."""
    from verl.trainer.ppo.core_algos import compute_value_loss

    values = batch.flat(batch.values).requires_grad_()
    loss, clipped = value_terms(values, batch.flat(batch.old_values), batch.flat(_returns(batch)), CLIP)
    if not batch.mask.any():
        return float(len(loss))
    leaf = batch.values.double().requires_grad_()
    theirs, share = compute_value_loss(
        leaf, _returns(batch).double(), batch.old_values.double(), batch.mask.double(), CLIP, "token-mean"
    )
    mean = reduced(loss, batch, "token_mean")
    mean.backward()
    (2 * theirs).backward()
    return max(
        distance(mean, 2 * theirs), distance(values.grad, leaf.grad[batch.mask]), distance(clipped.mean(), share)
    )


def _free(batch: Ragged) -> float:
    values, returns = batch.flat(batch.values), batch.flat(_returns(batch))
    loss, clipped = value_terms(values, batch.flat(batch.old_values), returns, None)
    theirs = torch.nn.functional.mse_loss(values.double(), returns.double(), reduction="none")
    return max(distance(loss, theirs), distance(clipped, torch.zeros(len(values))))


def _explained(batch: Ragged) -> float:
    """Parts of 100 tokens. Returns that do not vary are explained by 0."""
    returns = batch.flat(_returns(batch))
    values = (returns + batch.flat(batch.values) / 2).float()
    parts = [value_sums(v, r) for v, r in zip(values.split(100), returns.split(100), strict=True)]
    ours = explained_variance({name: sum(part[name].item() for part in parts) for name in parts[0]})
    v, r = values.double().numpy(), returns.double().numpy()
    return distance(ours, 1 - np.var(r - v) / np.var(r) if len(r) > 1 else 0.0)


def _normalizer(kind: Normalizer, mode: str, batch: Ragged) -> float:
    """Any loss by token; samples without tokens count in the divisor, given to theirs as the batch size."""
    from verl.trainer.ppo.core_algos import agg_loss

    if not batch.mask.any():
        return 0.0
    theirs = agg_loss(
        batch.current.double(), batch.mask.double(), mode, global_batch_size=batch.count, loss_scale_factor=WIDTH
    )
    return distance(reduced(batch.flat(batch.current), batch, kind, WIDTH), theirs)


def _split(kind: Normalizer, batch: Ragged) -> float:
    """Samples one by one as micro-batches, the loss of each its own sum, against means written out."""
    shares = sample_weights(batch.trained, kind, rollouts=batch.rollouts.tolist(), constant=WIDTH)
    rows = batch.flat(batch.current).split(batch.trained)
    parts = [
        (row * torch.from_numpy(token_weights([len(row)], [weight]))).sum().double()
        for row, weight in zip(rows, shares.weights, strict=True)
    ]
    ours = sum(parts) / max(int(shares.counts.sum()), 1)
    exact = batch.rows(batch.flat(batch.current))
    together = {name: [x for x, at in zip(exact, batch.rollouts, strict=True) if at == name] for name in batch.rollouts}
    theirs = {
        "token_mean": lambda: np.concatenate(exact).sum() / max(sum(batch.trained), 1),
        "sample_mean": lambda: np.mean([row.sum() / max(len(row), 1) for row in exact]),
        "rollout_mean": lambda: np.mean(
            [np.concatenate(x).sum() / max(len(np.concatenate(x)), 1) for x in together.values()]
        ),
        "constant": lambda: np.mean([row.sum() / WIDTH for row in exact]),
    }
    return distance(ours, theirs[kind]())
