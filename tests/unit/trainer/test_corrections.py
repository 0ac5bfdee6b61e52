"""Corrections on hand-computed tokens; the rows of benchmarks.algorithms compare with other libraries."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from services.common.run_spec.algorithm import AlgorithmSettings
from services.trainer.core.algorithms.corrections import (
    CORRECTION_SUMS,
    MISMATCH_SUMS,
    Correction,
    CorrectionSettings,
    batch_normalized,
    correct,
    correction_metrics,
    correction_settings,
    custom_correction,
    mismatch_metrics,
    mismatch_sums,
    opsm,
)

SEGMENTS = torch.tensor([0, 0, 2, 2, 2])  # sample 1 has no trained token
COUNT = 3
RATIOS = (4.0, 1.0, 0.5, 0.25, 1.0)
NONE = torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64)


def corrected(settings: CorrectionSettings) -> Correction:
    engine = torch.full((5,), -1.0)
    return correct(engine + torch.tensor(RATIOS).log(), engine, SEGMENTS, COUNT, settings)


def numbers(correction: Correction) -> dict[str, float]:
    return {name: value.item() for name, value in correction.sums.items()}


@pytest.mark.parametrize(
    ("level", "mode", "expected"),
    [
        ("token", "truncate", [2, 1, 0.5, 0.25, 1]),
        ("token", "clip", [2, 1, 0.5, 0.4, 1]),
        ("token", "mask", [0, 1, 0.5, 0, 1]),
        ("sequence", "truncate", [2, 2, 0.125, 0.125, 0.125]),
        ("sequence", "clip", [2, 2, 0.4, 0.4, 0.4]),
        ("sequence", "mask", [0, 0, 0, 0, 0]),
        ("geometric", "truncate", [2, 2, 0.5, 0.5, 0.5]),
        ("geometric", "mask", [2, 2, 0.5, 0.5, 0.5]),
    ],
)
def test_weights(level: str, mode: str, expected: list[float]) -> None:
    got = corrected(CorrectionSettings(level=level, mode=mode, low=0.4, high=2.00001))
    assert got.weights.tolist() == pytest.approx(expected, abs=1e-4)
    assert got.keep.tolist() == [1] * 5


@pytest.mark.parametrize(
    ("level", "kept"), [("token", [0, 1, 1, 0, 1]), ("sequence", [0, 0, 0, 0, 0]), ("geometric", [1, 1, 1, 1, 1])]
)
def test_rejection_needs_no_weights(level: str, kept: list[int]) -> None:
    got = corrected(CorrectionSettings(weigh=False, reject=True, reject_level=level, reject_low=0.4, reject_high=2.5))
    assert got.keep.tolist() == kept
    assert got.weights.tolist() == [1] * 5
    sums = numbers(got)
    assert sums["left_out"] == kept.count(0)
    assert sums["left_out_sequences"] == {"token": 2, "sequence": 2, "geometric": 0}[level]
    assert sums["above"] == sums["below"] == sums["distance"] == 0


def test_veto_takes_the_whole_sample() -> None:
    got = corrected(CorrectionSettings(veto=0.3))
    assert got.keep.tolist() == [1, 1, 0, 0, 0]
    assert numbers(got)["vetoed_sequences"] == 1
    assert correction_metrics(numbers(got))["rs_veto_fraction"] == 0.5  # of two samples with tokens


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_equal_log_probs_change_nothing(level: str) -> None:
    log_probs = torch.randn(5)
    settings = CorrectionSettings(level=level, mode="mask", low=0.9, reject=True, reject_level=level, veto=0.5)
    got = correct(log_probs, log_probs.clone(), SEGMENTS, COUNT, settings)
    assert (got.weights == 1).all()
    assert (got.keep == 1).all()
    metrics = correction_metrics(numbers(got))
    assert metrics["tis"] == metrics["tis_ess"] == 1
    assert not any(value for name, value in metrics.items() if name not in ("tis", "tis_ess"))


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_nothing_trained(level: str, count: int) -> None:
    train, engine, segments = NONE
    settings = CorrectionSettings(level=level, reject=True, reject_level=level, veto=0.1)
    got = correct(train, engine, segments, count, settings)
    assert got.weights.shape == got.keep.shape == (0,)
    assert tuple(got.sums) == CORRECTION_SUMS
    assert not any(correction_metrics(numbers(got)).values())
    assert len(batch_normalized(got.weights, 0.0, 0.0)) == 0
    assert len(opsm(train, engine, train, segments, count, 0.0)) == 0
    sums = mismatch_sums(train, engine, segments, count)
    assert tuple(sums) == MISMATCH_SUMS
    assert mismatch_metrics({name: value.item() for name, value in sums.items()}) == {}


def test_the_mean_is_over_the_step_whatever_the_packs() -> None:
    settings = CorrectionSettings(level="sequence", high=100.0)
    train, engine = torch.randn(5), torch.randn(5)
    whole = correct(train, engine, SEGMENTS, COUNT, settings)
    packs = [
        correct(train[2:], engine[2:], SEGMENTS[2:] - 2, 1, settings),
        correct(train[:2], engine[:2], SEGMENTS[:2], 2, settings),
    ]
    added = {name: sum(numbers(pack)[name] for pack in packs) for name in CORRECTION_SUMS}
    assert added == pytest.approx(numbers(whole))
    normalized = [batch_normalized(pack.weights, added["level_weight"], added["level_count"]) for pack in packs]
    assert (normalized[0][0] + normalized[1][0]).item() / 2 == pytest.approx(1, rel=1e-6)  # one weight a sample


def test_a_mean_of_zero_is_no_divisor() -> None:
    assert batch_normalized(torch.zeros(3), 0.0, 3.0).tolist() == [0, 0, 0]


def test_huge_differences_stay_finite() -> None:
    train = torch.tensor([-500.0, 500.0])
    got = correct(train, torch.zeros(2), torch.tensor([0, 1]), 2, CorrectionSettings(mode="clip", low=0.1, high=3.0))
    assert got.weights.tolist() == pytest.approx([0.1, 3.0])
    assert all(math.isfinite(x) for x in numbers(got).values())
    sums = mismatch_sums(train, torch.zeros(2), torch.tensor([0, 1]), 2)
    assert math.isfinite(sums["square_ratio"])
    assert math.isfinite(sums["sequence_square_ratio"])


def test_opsm_leaves_out_bad_samples_that_drifted() -> None:
    old = torch.zeros(5)
    current = torch.tensor([-1.0, -1.0, 0.1, -0.1, 0.0])
    assert opsm(current, old, torch.full((5,), -1.0), SEGMENTS, COUNT, 0.5).tolist() == [0, 0, 1, 1, 1]
    assert opsm(current, old, torch.full((5,), 1.0), SEGMENTS, COUNT, 0.5).tolist() == [1] * 5
    assert opsm(current, old, torch.full((5,), -1.0), SEGMENTS, COUNT, 1.0).tolist() == [1] * 5


def test_settings_of_a_run() -> None:
    plain = correction_settings(AlgorithmSettings(use_tis=True, use_rs=True, tis_clip=4.0))
    assert plain == CorrectionSettings(high=4.0, reject=True, reject_low=0.25, reject_high=4.0)
    keys = {"tis_level": "geometric", "tis_mode": "clip", "tis_clip_low": 0.5, "rs_level": "token"}
    bounds = {"rs_clip": 3.0, "rs_clip_low": 0.1, "rs_veto_threshold": 1e-4}
    full = correction_settings(AlgorithmSettings(use_tis=True, use_rs=True, **keys, **bounds))
    expected = CorrectionSettings(level="geometric", mode="clip", low=0.5, high=2.0, reject=True, veto=1e-4)
    assert full == replace(expected, reject_level="token", reject_low=0.1, reject_high=3.0)


def test_a_custom_correction() -> None:
    settings = AlgorithmSettings(custom_tis_function_path="a.b")

    def halves(*, train_log_probs: torch.Tensor, settings: AlgorithmSettings, **_: object):
        return torch.full_like(train_log_probs, settings.tis_clip / 4), torch.tensor([1.0, 0, 1, 1, 1])

    train = torch.zeros(5, requires_grad=True)
    got = custom_correction(halves, train, torch.zeros(5), SEGMENTS, COUNT, settings)
    assert got.weights.tolist() == [0.5] * 5
    assert not got.weights.requires_grad
    metrics = correction_metrics(numbers(got))
    assert metrics["tis"] == metrics["rs_sequence_fraction"] == 0.5
    assert metrics["rs_token_fraction"] == 0.2


@pytest.mark.parametrize(
    ("result", "described"),
    [
        (torch.ones(5), "it returned Tensor"),
        ((torch.ones(5), torch.ones(2)), r"it returned \(\[5\], \[2\]\)"),
        ((torch.ones(5), 3), r"it returned \(\[5\], \['int'\]\)"),
    ],
)
def test_a_custom_correction_of_wrong_shape_is_named(result: object, described: str) -> None:
    settings = AlgorithmSettings(custom_tis_function_path="my.correction")
    with pytest.raises(ValueError, match=f"custom_tis_function_path 'my.correction' must return .* of 5 .*{described}"):
        custom_correction(lambda **_: result, torch.zeros(5), torch.zeros(5), SEGMENTS, COUNT, settings)
