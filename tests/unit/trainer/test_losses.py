"""Loss formulas on hand-computed tokens; tests/oracle compares with other libraries."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from services.trainer.core.algorithms.kl import kl_estimate
from services.trainer.core.algorithms.policy_losses import (
    PolicyLossSettings,
    decoupled,
    policy_terms,
    supervised_loss,
)
from services.trainer.core.algorithms.segments import expand, segment_mean, segment_sizes, segment_sum
from services.trainer.core.algorithms.value_loss import explained_variance, value_sums, value_terms

SETTINGS = PolicyLossSettings(eps_low=0.2, eps_high=0.3)
KINDS = ("clip", "gspo", "cispo")


def terms_of(ratio: float, advantage: float, settings: PolicyLossSettings = SETTINGS):
    log_probs = torch.tensor([math.log(ratio)], requires_grad=True)
    terms = policy_terms(
        log_probs, torch.zeros(1), torch.tensor([advantage]), settings, torch.zeros(1, dtype=torch.int64), 1
    )
    terms.objective.sum().backward()
    return terms, log_probs.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.1, 2.0, -2.2, 0),
        (1.5, 2.0, -2.6, 1),  # upper range: 1.3
        (1.5, -2.0, 3.0, 0),  # the clip never helps a bad action
        (0.5, 2.0, -1.0, 0),
        (0.5, -2.0, 1.6, 1),  # lower range: 0.8
    ],
)
def test_clip(ratio: float, advantage: float, loss: float, clipped: int) -> None:
    terms, gradient = terms_of(ratio, advantage)
    assert terms.objective.item() == pytest.approx(loss, rel=1e-5)
    assert terms.clipped.item() == clipped
    assert terms.log_ratio.item() == pytest.approx(-math.log(ratio), rel=1e-5)
    assert (gradient.item() == 0) == bool(clipped)


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_is_exact(kind: str) -> None:
    log_probs, segments = torch.randn(50), torch.arange(50) // 20
    terms = policy_terms(log_probs, log_probs.clone(), torch.randn(50), replace(SETTINGS, kind=kind), segments, 3)
    assert (terms.ratio == 1).all()
    assert (terms.log_ratio == 0).all()
    assert terms.clipped.sum() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 3])
def test_nothing_trained(kind: str, count: int) -> None:
    empty = torch.zeros(0, requires_grad=True)
    segments = torch.zeros(0, dtype=torch.int64)
    terms = policy_terms(empty, empty.detach(), empty.detach(), replace(SETTINGS, kind=kind), segments, count)
    terms.objective.sum().backward()
    assert all(x.shape == (0,) for x in (terms.objective, terms.clipped, terms.ratio, terms.log_ratio, empty.grad))
    assert [len(x) for x in decoupled(empty, empty, 2.0)] == [0, 0]
    assert len(supervised_loss(empty)) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("distance", [-300.0, 300.0])
def test_far_from_the_old_policy_an_advantage_of_zero_is_still_zero(kind: str, distance: float) -> None:
    log_probs = torch.tensor([distance, -1.0], requires_grad=True)
    settings, segments = replace(SETTINGS, kind=kind), torch.tensor([0, 1])
    terms = policy_terms(log_probs, torch.tensor([0.0, -1.0]), torch.zeros(2), settings, segments, 2)
    terms.objective.sum().backward()
    assert terms.objective.tolist() == log_probs.grad.tolist() == [0, 0]


def test_a_log_prob_that_is_no_number_shows() -> None:
    log_probs = torch.tensor([float("nan"), -1.0])
    for kind in KINDS:
        settings, segments = replace(SETTINGS, kind=kind), torch.tensor([0, 1])
        terms = policy_terms(log_probs, torch.full((2,), -1.0), torch.ones(2), settings, segments, 2)
        assert terms.objective.isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [(1.5, -2.0, 3.0, 0), (4.0, -2.0, 6.0, 1), (4.0, 2.0, -2.6, 1), (0.5, -2.0, 1.6, 1)],
)
def test_dual_clip(ratio: float, advantage: float, loss: float, clipped: int) -> None:
    terms, gradient = terms_of(ratio, advantage, replace(SETTINGS, dual_clip=3.0))
    assert terms.objective.item() == pytest.approx(loss, rel=1e-5)
    assert terms.clipped.item() == clipped
    assert (gradient.item() == 0) == bool(clipped)


def test_gspo_takes_the_mean_over_the_sample_and_gives_every_token_its_gradient() -> None:
    log_ratio = torch.tensor([0.2, -0.1, 0.3, 0.0], requires_grad=True)
    segments, settings = torch.tensor([0, 0, 2, 2]), replace(SETTINGS, kind="gspo", eps_high=0.1)
    terms = policy_terms(log_ratio, torch.zeros(4), torch.ones(4), settings, segments, 3)
    assert terms.ratio.tolist() == pytest.approx([math.exp(0.05)] * 2 + [math.exp(0.15)] * 2)
    assert terms.clipped.tolist() == [0, 0, 1, 1]
    terms.objective.sum().backward()
    assert log_ratio.grad.tolist() == pytest.approx([-math.exp(0.05)] * 2 + [0, 0])


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    log_probs = torch.tensor([math.log(3.0), math.log(0.1)], requires_grad=True)
    settings = replace(SETTINGS, kind="cispo", eps_low=1.0)
    terms = policy_terms(log_probs, torch.zeros(2), torch.ones(2), settings, torch.tensor([0, 0]), 1)
    assert terms.clipped.tolist() == [1, 0]
    terms.objective.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([-1.3, -0.1])


def test_decoupled_leaves_out_what_is_above_the_cap() -> None:
    proximal = torch.tensor([math.log(2.0), math.log(6.0), 0.0], requires_grad=True)
    weights, dropped = decoupled(proximal, torch.zeros(3), 5.0)
    assert weights.tolist() == pytest.approx([2, 0, 1])
    assert dropped.tolist() == [0, 1, 0]
    assert not weights.requires_grad


def test_sums_over_samples() -> None:
    values, segments = torch.tensor([1.0, 2.0, 4.0], requires_grad=True), torch.tensor([0, 0, 2])
    assert segment_sum(values, segments, 4).tolist() == [3, 0, 4, 0]
    assert segment_mean(values, segments, 4).tolist() == [1.5, 0, 4, 0]
    assert segment_sizes(segments, 4).tolist() == [2, 0, 1, 0]
    expand(segment_mean(values, segments, 4), segments).sum().backward()
    assert values.grad.tolist() == [1, 1, 1]


def test_value_clip() -> None:
    values = torch.tensor([0.9, 0.9, 0.1], requires_grad=True)
    returns = torch.tensor([1.0, 0.0, 1.0])
    loss, clipped = value_terms(values, torch.zeros(3), returns, 0.2)
    assert loss.tolist() == pytest.approx([0.64, 0.81, 0.81])  # the larger of both
    assert clipped.tolist() == [1, 0, 0]
    loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([0, 1.8, -1.8])
    assert value_terms(values, values.detach(), returns, 1e-3)[1].tolist() == [0, 0, 0]
    assert value_terms(torch.zeros(0), torch.zeros(0), torch.zeros(0), 0.2)[0].shape == (0,)


@pytest.mark.parametrize(
    ("values", "returns", "explained"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 1.0),
        ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0], 0.0),
        ([3.0, 2.0, 1.0], [1.0, 2.0, 3.0], -3.0),
        ([1.0, 2.0], [0.1, 0.1], 0.0),
        ([], [], 0.0),
    ],
)
def test_explained_variance(values: list[float], returns: list[float], explained: float) -> None:
    sums = value_sums(torch.tensor(values), torch.tensor(returns))
    assert explained_variance({name: value.item() for name, value in sums.items()}) == pytest.approx(explained)


def test_kl_estimates() -> None:
    current, reference = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.0])
    d = torch.tensor([1.0, -2.0])
    assert torch.equal(kl_estimate(current, reference, "k1"), d)
    assert torch.allclose(kl_estimate(current, reference, "k2"), d**2 / 2)
    for kind in ("k3", "low_var_kl"):
        assert torch.allclose(kl_estimate(current, reference, kind), torch.exp(-d) - 1 + d)
    far = kl_estimate(torch.tensor([-100.0]), torch.tensor([0.0]), "low_var_kl")
    assert far.item() == 10
    with pytest.raises(ValueError, match="one of k1, k2, k3, low_var_kl"):
        kl_estimate(current, reference, "k4")
