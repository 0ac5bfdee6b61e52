"""Corrections of the engine's policy, and how far trainer and engine are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks.algorithm_cases import Case, distance
from benchmarks.algorithm_cases.batch import Ragged
from services.trainer.core.algorithms.corrections import (
    Correction,
    CorrectionSettings,
    batch_normalized,
    correct,
    correction_metrics,
    mismatch_metrics,
    mismatch_sums,
    opsm,
)

LOW, HIGH = 0.8, 1.25
NEUTRAL = CorrectionSettings(low=LOW, high=HIGH, reject_low=LOW, reject_high=HIGH)
NAMES = {("token", "truncate"): "TIS", ("token", "mask"): "IcePop"}
OPTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def cases() -> Iterator[Case]:
    """Rows of this family."""
    for level, mode in product(("token", "sequence", "geometric"), ("truncate", "clip", "mask")):
        name = f"{NAMES.get((level, mode), 'MIS')}: {level}, {mode}"
        yield Case("correction", name, "float64", partial(_weights, level, mode))
        if level != "geometric" and mode != "clip":  # which it does not have
            for normalize in (False, True):
                text = f"{name}, over the batch's mean out of parts" if normalize else name
                yield Case("correction", text, "verl", partial(_verl_weights, level, mode, normalize), needs="verl")
    for level in OPTIONS:
        yield Case("correction", f"rejection: {level}", "verl", partial(_verl_rejection, level), needs="verl")
    yield Case("correction", "veto", "float64", _veto)
    yield Case("correction", "OPSM", "trl", _opsm, needs="trl")
    yield Case("mismatch", "metrics out of parts", "verl", _verl_mismatch, needs="verl")
    yield Case("mismatch", "metrics out of parts", "float64", _mismatch)


def _ours(batch: Ragged, settings: CorrectionSettings) -> Correction:
    return correct(batch.flat(batch.old), batch.flat(batch.engine), batch.segments, batch.count, settings)


def _in_parts(batch: Ragged, settings: CorrectionSettings) -> tuple[torch.Tensor, dict[str, float]]:
    """Weights and sums of the first two samples and the others as two packs."""
    halves = [(batch.segments < 2, 2), (batch.segments >= 2, batch.count)]
    train, engine = batch.flat(batch.old), batch.flat(batch.engine)
    packs = [correct(train[at], engine[at], batch.segments[at], count, settings) for at, count in halves]
    sums = {name: sum(pack.sums[name].item() for pack in packs) for name in packs[0].sums}
    return torch.cat([pack.weights for pack in packs]), sums


def _metrics(correction: Correction) -> dict[str, float]:
    return correction_metrics({name: value.item() for name, value in correction.sums.items()})


def _differences(batch: Ragged) -> list[np.ndarray]:
    """Trainer − engine by sample, float64."""
    pairs = zip(batch.rows(batch.flat(batch.old)), batch.rows(batch.flat(batch.engine)), strict=True)
    return [train - engine for train, engine in pairs]


def _weights(level: str, mode: str, batch: Ragged) -> float:
    """Weights, and the metrics of them."""
    found, ratios = [np.zeros(0)], [np.zeros(0)]
    for d in _differences(batch):
        whole = {"token": d, "sequence": d * 0 + d.sum(), "geometric": d * 0 + d.sum() / max(len(d), 1)}
        ratio = np.exp(whole[level])
        inside = (ratio >= LOW) & (ratio <= HIGH)
        bounded = {"truncate": np.minimum(ratio, HIGH), "clip": ratio.clip(LOW, HIGH), "mask": ratio * inside}
        found.append(bounded[mode])
        ratios.append(ratio)
    weights, ratio = np.concatenate(found), np.concatenate(ratios)
    outside = (ratio > HIGH) | ((ratio < LOW) & (mode != "truncate"))
    ours, count, square = _ours(batch, replace(NEUTRAL, level=level, mode=mode)), max(len(weights), 1), weights**2
    metrics, scale = _metrics(ours), max(np.abs(ratio - 1).sum() / count, 1.0)
    return max(
        distance(ours.weights, weights),
        distance(ours.keep, np.ones(len(weights))),
        distance(metrics["tis"], weights.sum() / count),
        distance(metrics["tis_clipfrac"], outside.sum() / count),
        distance(metrics["tis_abs"] / scale, np.abs(ratio - 1).sum() / count / scale),
        distance(metrics["tis_ess"], weights.sum() ** 2 / (count * square.sum()) if square.any() else 0.0),
    )


def _verl_weights(level: str, mode: str, normalize: bool, batch: Ragged) -> float:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    weights, sums = _in_parts(batch, replace(NEUTRAL, level=level, mode=mode))
    if not sums["weight"]:
        return float(weights.abs().sum())  # theirs divides by the sum of the weights
    theirs, _ = compute_rollout_correction_weights(
        batch.old.double() - batch.engine.double(),
        batch.mask.double(),
        rollout_is=level,
        rollout_is_threshold=HIGH if mode == "truncate" else f"{LOW}_{HIGH}",
        rollout_is_batch_normalize=normalize,
    )
    if normalize:
        weights = batch_normalized(weights, sums["level_weight"], sums["level_count"])
    return distance(weights, theirs[batch.mask])


def _verl_rejection(level: str, batch: Ragged) -> float:
    """What is kept, and the shares of what is not. Theirs bounds engine / trainer, and counts empty samples too."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    settings = replace(NEUTRAL, weigh=False, reject=True, reject_level=level)
    ours = _ours(batch, settings)
    if not batch.mask.any():
        return float(len(ours.keep))
    theirs, metrics = compute_rollout_rejection_mask(
        batch.old.double() - batch.engine.double(), batch.mask.double(), OPTIONS[level], f"{1 / HIGH}_{1 / LOW}"
    )
    mine, full = _metrics(ours), sum(n > 0 for n in batch.trained) / batch.count
    return max(
        distance(ours.weights, np.ones(len(ours.weights))),
        distance(ours.keep, theirs[batch.mask]),
        distance(mine["rs_token_fraction"], metrics["rollout_rs_masked_fraction"]),
        distance(mine["rs_sequence_fraction"] * full, metrics["rollout_rs_seq_masked_fraction"]),
    )


def _veto(batch: Ragged) -> float:
    threshold = 0.75
    ours = _ours(batch, replace(NEUTRAL, veto=threshold))
    rows = _differences(batch)
    bad = [bool((np.exp(d) < threshold).any()) for d in rows]
    kept = np.concatenate([np.zeros(0), *(np.full(len(d), float(not x)) for d, x in zip(rows, bad, strict=True))])
    return max(
        distance(ours.keep, kept),
        distance(ours.sums["vetoed_sequences"], sum(bad)),
        distance(ours.sums["left_out"], (kept == 0).sum()),
    )


def _opsm(batch: Ragged) -> float:
    from trl import GRPOTrainer

    delta, advantages = 0.005, torch.from_numpy(batch.rewards)
    theirs = GRPOTrainer.get_off_policy_mask(
        advantages.double()[:, None], batch.current.double(), batch.old.double(), batch.mask.double(), delta
    )
    current, old = batch.flat(batch.current), batch.flat(batch.old)
    ours = opsm(current, old, batch.flat(advantages), batch.segments, batch.count, delta)
    return distance(ours, theirs.expand(batch.mask.shape)[batch.mask])


def _mismatch_of(batch: Ragged) -> dict[str, float]:
    halves = [batch.segments < 2, batch.segments >= 2]
    train, engine = batch.flat(batch.old), batch.flat(batch.engine)
    parts = [mismatch_sums(train[at], engine[at], batch.segments[at], batch.count) for at in halves]
    return mismatch_metrics({name: sum(part[name].item() for part in parts) for name in parts[0]})


def _apart(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """Relative to numbers above 1: a χ² of whole samples may be large."""
    assert set(theirs) <= set(ours), sorted(theirs)
    return max((distance(ours[x], theirs[x]) / max(1.0, abs(theirs[x])) for x in theirs), default=0.0)


def _verl_mismatch(batch: Ragged) -> float:
    """On the samples that have tokens: theirs takes the others for samples of perplexity 1."""
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics

    ours, some = _mismatch_of(batch), batch.mask.any(1)
    if not some.any():
        return float(len(ours))
    theirs = compute_offpolicy_metrics(batch.old.double()[some], batch.engine.double()[some], batch.mask[some].double())
    names = {"training": "train", "rollout": "engine"}
    for name in list(theirs):
        side, _, rest = name.partition("_")
        theirs[f"mis_{names.get(side, side)}{'_' * bool(rest)}{rest}"] = theirs.pop(name)
    return _apart(ours, {name: theirs[name] for name in ours})


def _mismatch(batch: Ragged) -> float:
    train, engine = (batch.rows(batch.flat(x)) for x in (batch.old, batch.engine))
    samples = [(t, e) for t, e in zip(train, engine, strict=True) if len(t)]
    if not samples:
        return float(len(_mismatch_of(batch)))
    d = np.concatenate([t - e for t, e in samples])

    def mean(of: Callable[[Any, Any], float]) -> float:
        return float(np.mean([of(t, e) for t, e in samples]))

    expected = {
        "mis_kl": -d.mean(),
        "mis_k3_kl": (np.exp(d) - 1 - d).mean(),
        "mis_chi2_token": (np.exp(d) ** 2).mean() - 1,
        "mis_train_ppl": mean(lambda t, e: np.exp(-t.mean())),
        "mis_engine_ppl": mean(lambda t, e: np.exp(-e.mean())),
        "mis_train_log_ppl": mean(lambda t, e: -t.mean()),
        "mis_engine_log_ppl": mean(lambda t, e: -e.mean()),
        "mis_log_ppl_diff": mean(lambda t, e: e.mean() - t.mean()),
        "mis_log_ppl_abs_diff": mean(lambda t, e: abs(e.mean() - t.mean())),
        "mis_ppl_ratio": mean(lambda t, e: np.exp(e.mean() - t.mean())),
        "mis_chi2_seq": mean(lambda t, e: np.exp((t - e).sum()) ** 2) - 1,
    }
    return _apart(_mismatch_of(batch), expected)
