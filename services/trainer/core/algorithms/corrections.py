"""Corrections of the difference between the trainer's and the engine's policy, as pure torch functions of log-probs.

Arguments are float32 [k], one entry for each trained token of a pack (`segments.py`). The result multiplies the policy
loss: `weights · keep`. Divisors stay what they are, so a token that is left out only leaves the sum.

Invariants: nothing here has a gradient. Equal log-probs give weights of exactly 1 and leave nothing out. Numbers to be
reported, and what batch normalisation needs, are sums (float64 []), so that packs and ranks can be added up in any
split.

A function of `custom_tis_function_path` is called as `function(train_log_probs=, engine_log_probs=, segments=, count=,
settings=)`, the arguments of `correct` with the trainer's settings of the run (AlgorithmSettings), and returns
(weights, keep), both [k]; `custom_correction` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from services.common.run_spec.algorithm import AlgorithmSettings, Level
from services.trainer.core.algorithms.policy_losses import LOG_RATIO_LIMIT, limited_exp
from services.trainer.core.algorithms.segments import expand, segment_mean, segment_sizes, segment_sum

_SMALLEST_MEAN = 1e-8

CORRECTION_SUMS = (
    "tokens",
    "sequences",
    "weight",
    "weight_square",
    "distance",
    "above",
    "below",
    "left_out",
    "left_out_sequences",
    "vetoed_sequences",
    "level_weight",
    "level_count",
)
"""Keys of `Correction.sums`, in order. distance: |ratio − 1|; above, below: tokens whose ratio is outside of the bounds
of the weights; left_out: tokens rejected or vetoed; left_out_sequences: samples with such a token; level_weight and
level_count: weights, and their number, of tokens or of samples, whichever the level is."""

MISMATCH_SUMS = (
    "tokens",
    "sequences",
    "kl",
    "k3_kl",
    "square_ratio",
    "train_log_ppl",
    "train_ppl",
    "engine_log_ppl",
    "engine_ppl",
    "log_ppl_abs_diff",
    "ppl_ratio",
    "sequence_square_ratio",
)
"""Keys of `mismatch_sums`, in order."""


@dataclass(frozen=True)
class CorrectionSettings:
    """weigh: weights are ratios of `level`, bounded by low and high as `mode` says, else 1. reject: leave out what is
    outside of reject_low and reject_high. veto: leave out samples with a token of a smaller ratio, or None."""

    weigh: bool = True
    level: Level = "token"
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    low: float = 0.0
    high: float = 2.0
    reject: bool = False
    reject_level: Level = "geometric"
    reject_low: float = 0.5
    reject_high: float = 2.0
    veto: float | None = None


@dataclass(frozen=True)
class Correction:
    """weights and keep (1, or 0 where a token is left out), both [k] and before batch normalisation; sums: see
    CORRECTION_SUMS."""

    weights: torch.Tensor
    keep: torch.Tensor
    sums: dict[str, torch.Tensor]


def correction_settings(settings: AlgorithmSettings) -> CorrectionSettings:
    """The formula's settings out of the run's."""
    high = settings.tis_clip if settings.rs_clip is None else settings.rs_clip
    return CorrectionSettings(
        weigh=settings.use_tis,
        level=settings.tis_level,
        mode=settings.tis_mode,
        low=settings.tis_clip_low,
        high=settings.tis_clip,
        reject=settings.use_rs,
        reject_level=settings.rs_level,
        reject_low=1 / high if settings.rs_clip_low is None else settings.rs_clip_low,
        reject_high=high,
        veto=settings.rs_veto_threshold,
    )


@torch.no_grad()
def correct(
    train_log_probs: torch.Tensor,
    engine_log_probs: torch.Tensor,
    segments: torch.Tensor,
    count: int,
    settings: CorrectionSettings,
) -> Correction:
    """Importance weights trainer / engine, and what is to be left out.

    Levels, with d = trainer − engine by token: token exp(d); sequence exp(Σ d); geometric exp(mean of d); over the
    trained tokens of a sample, exponents within ±20. Modes: truncate min(ratio, high), clip to [low, high], mask: the
    ratio inside of [low, high] and 0 outside.

    Sources: truncation, Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025);
    mask by token (IcePop), Ling team, "Every Step Evolves" (2025); levels, rejection and veto (MIS), Liu, Li et
    al., "When speed kills stability" (2025).

    Args:
        train_log_probs: of the trainer's own policy with the weights before the step.
        engine_log_probs: of the engine, when it chose the tokens.
        segments: int64 [k], the sample of each token.
        count: samples of the pack.
    """
    difference = train_log_probs - engine_log_probs
    ratio = _ratio(difference, segments, count, settings.level)
    weights = _bounded(ratio, settings) if settings.weigh else torch.ones_like(difference)
    keep = torch.ones_like(difference)
    vetoed = torch.zeros(count, dtype=torch.bool, device=difference.device)
    if settings.reject:
        judged = _ratio(difference, segments, count, settings.reject_level)
        keep *= _inside(judged, settings.reject_low, settings.reject_high)
    if settings.veto is not None:
        vetoed = segment_sum((limited_exp(difference) < settings.veto).float(), segments, count) > 0
        keep *= ~expand(vetoed.float(), segments).bool()
    bounds = (settings.low if settings.mode != "truncate" else 0.0, settings.high)
    sums = _sums(weights, keep, segments, count)
    sums |= _ratio_sums(ratio, bounds) if settings.weigh else {}
    sums["vetoed_sequences"] = vetoed.sum().double()
    if settings.level != "token":
        sums["level_weight"] = segment_mean(weights.double(), segments, count).sum()
        sums["level_count"] = sums["sequences"]
    return Correction(weights, keep, {name: sums[name] for name in CORRECTION_SUMS})


@torch.no_grad()
def custom_correction(
    function: Callable[..., object],
    train_log_probs: torch.Tensor,
    engine_log_probs: torch.Tensor,
    segments: torch.Tensor,
    count: int,
    settings: AlgorithmSettings,
) -> Correction:
    """The result of a function of the user's. Raises ValueError when that is not (weights, keep) of the tokens."""
    result = function(
        train_log_probs=train_log_probs,
        engine_log_probs=engine_log_probs,
        segments=segments,
        count=count,
        settings=settings,
    )
    shape = train_log_probs.shape
    if not (isinstance(result, tuple) and len(result) == 2 and all(getattr(x, "shape", None) == shape for x in result)):
        raise ValueError(
            f"custom_tis_function_path {settings.custom_tis_function_path!r} must return (weights, keep), two tensors"
            f" of {len(train_log_probs)} entries, one for each trained token; it returned {_described(result)}"
        )
    weights, keep = (x.detach().to(train_log_probs) for x in result)
    return Correction(weights, keep, _sums(weights, keep, segments, count))


def batch_normalized(weights: torch.Tensor, level_weight: float, level_count: float) -> torch.Tensor:
    """Weights over their mean in the whole step, [k]; as they are where the mean is 0.

    Args:
        level_weight: sum of `level_weight` over all packs and data-parallel ranks of the step (tis_batch_normalize is
            over the step, so that it does not depend on the micro-batches).
        level_count: the same of `level_count`.
    """
    mean = level_weight / max(level_count, 1)
    return weights / mean if mean > _SMALLEST_MEAN else weights


def correction_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means out of the reduced sums of `Correction`; 0 without tokens.

    tis: mean weight before batch normalisation; tis_abs: mean |ratio − 1|; tis_clipfrac: share of tokens outside of the
    bounds; tis_ess: effective sample size of the weights as a share of the tokens; rs_token_fraction and
    rs_sequence_fraction: shares of tokens left out, and of samples with such tokens; rs_veto_fraction: of samples.
    """
    tokens, sequences = max(sums["tokens"], 1), max(sums["sequences"], 1)
    square = sums["weight_square"]
    return {
        "tis": sums["weight"] / tokens,
        "tis_abs": sums["distance"] / tokens,
        "tis_clipfrac": (sums["above"] + sums["below"]) / tokens,
        "tis_ess": sums["weight"] ** 2 / (tokens * square) if square else 0.0,
        "rs_token_fraction": sums["left_out"] / tokens,
        "rs_sequence_fraction": sums["left_out_sequences"] / sequences,
        "rs_veto_fraction": sums["vetoed_sequences"] / sequences,
    }


@torch.no_grad()
def opsm(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    segments: torch.Tensor,
    count: int,
    delta: float,
) -> torch.Tensor:
    """0 at tokens with negative advantage of samples whose mean old − current log-prob is above `delta`, else 1; [k].

    Off-policy sequence masking. Formula: DeepSeek-AI, DeepSeek-V3.2 (2025), §3.1.
    """
    divergence = expand(segment_mean(old_log_probs - log_probs, segments, count), segments)
    return 1 - ((advantages < 0) & (divergence > delta)).to(log_probs.dtype)


@torch.no_grad()
def mismatch_sums(
    train_log_probs: torch.Tensor, engine_log_probs: torch.Tensor, segments: torch.Tensor, count: int
) -> dict[str, torch.Tensor]:
    """How far trainer and engine are apart: the keys of MISMATCH_SUMS, each float64 [], over tokens or over samples
    with trained tokens."""
    train, engine = train_log_probs.double(), engine_log_probs.double()
    difference = train - engine
    some = segment_sizes(segments, count) > 0
    train_log_ppl, engine_log_ppl = (-segment_mean(x, segments, count)[some] for x in (train, engine))
    whole = segment_sum(difference, segments, count)[some].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = limited_exp(difference)
    values = {
        "tokens": torch.ones_like(difference),
        "sequences": some.double(),
        "kl": -difference,
        "k3_kl": ratio - 1 - difference,
        "square_ratio": ratio.square(),
        "train_log_ppl": train_log_ppl,
        "train_ppl": train_log_ppl.exp(),
        "engine_log_ppl": engine_log_ppl,
        "engine_ppl": engine_log_ppl.exp(),
        "log_ppl_abs_diff": (train_log_ppl - engine_log_ppl).abs(),
        "ppl_ratio": (train_log_ppl - engine_log_ppl).exp(),
        "sequence_square_ratio": (2 * whole).exp(),
    }
    return {name: values[name].sum() for name in MISMATCH_SUMS}


def mismatch_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means out of the reduced `mismatch_sums`, as `mis_<name>`; empty without tokens.

    kl, k3_kl: KL(engine ‖ trainer) by token, directly and as exp(d) − 1 − d (Schulman 2020); train_, engine_ppl and
    log_ppl: perplexities of a sample; log_ppl_diff, log_ppl_abs_diff and ppl_ratio: trainer against engine; chi2_token
    and chi2_seq: mean squared ratio − 1, of tokens and of whole samples.
    """
    if not sums["tokens"]:
        return {}
    mean = {name: sums[name] / sums["tokens"] for name in ("kl", "k3_kl", "square_ratio")}
    mean |= {name: sums[name] / sums["sequences"] for name in MISMATCH_SUMS[5:]}
    mean["log_ppl_diff"] = mean["train_log_ppl"] - mean["engine_log_ppl"]
    mean["chi2_token"] = mean.pop("square_ratio") - 1
    mean["chi2_seq"] = mean.pop("sequence_square_ratio") - 1
    return {f"mis_{name}": value for name, value in mean.items()}


def _ratio(difference: torch.Tensor, segments: torch.Tensor, count: int, level: Level) -> torch.Tensor:
    """The ratio of a level at each token, [k]."""
    if level == "token":
        return limited_exp(difference)
    whole = segment_sum if level == "sequence" else segment_mean
    return limited_exp(expand(whole(difference, segments, count), segments))


def _inside(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (ratio >= low) & (ratio <= high)


def _bounded(ratio: torch.Tensor, settings: CorrectionSettings) -> torch.Tensor:
    if settings.mode == "truncate":
        return ratio.clamp(max=settings.high)
    if settings.mode == "clip":
        return ratio.clamp(settings.low, settings.high)
    return ratio * _inside(ratio, settings.low, settings.high)


def _sums(weights: torch.Tensor, keep: torch.Tensor, segments: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    """Every key of CORRECTION_SUMS, at the level of tokens and without bounds or veto."""
    exact, left_out = weights.double(), (keep == 0).double()
    sums: dict[str, torch.Tensor] = dict.fromkeys(CORRECTION_SUMS, exact.new_zeros(()))
    sums["tokens"] = sums["level_count"] = exact.new_tensor(len(weights))
    sums["sequences"] = (segment_sizes(segments, count) > 0).sum().double()
    sums["weight"] = sums["level_weight"] = exact.sum()
    sums["weight_square"] = exact.square().sum()
    sums["left_out"] = left_out.sum()
    sums["left_out_sequences"] = (segment_sum(left_out, segments, count) > 0).sum().double()
    return sums


def _ratio_sums(ratio: torch.Tensor, bounds: tuple[float, float]) -> dict[str, torch.Tensor]:
    low, high = bounds
    return {
        "distance": (ratio.double() - 1).abs().sum(),
        "above": (ratio > high).sum().double(),
        "below": (ratio < low).sum().double(),
    }


def _described(result: object) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(str(list(getattr(x, 'shape', [type(x).__name__]))) for x in result)})"
    return type(result).__name__
