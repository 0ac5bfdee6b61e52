"""Loss formulas on hand-computed tokens; tests/oracle compares with other libraries."""

from __future__ import annotations

import math

import pytest
import torch

from services.trainer.core.algorithms.kl import kl_estimate
from services.trainer.core.algorithms.policy_losses import PolicyLossSettings, policy_terms

SETTINGS = PolicyLossSettings(eps_low=0.2, eps_high=0.3)


def terms_of(ratio: float, advantage: float):
    log_probs = torch.tensor([math.log(ratio)], requires_grad=True)
    terms = policy_terms(
        log_probs, torch.zeros(1), torch.tensor([advantage]), SETTINGS, torch.zeros(1, dtype=torch.int64), 1
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


def test_on_policy_is_exact() -> None:
    log_probs = torch.randn(50)
    terms = policy_terms(log_probs, log_probs.clone(), torch.randn(50), SETTINGS, torch.zeros(50, dtype=torch.int64), 1)
    assert (terms.ratio == 1).all()
    assert (terms.log_ratio == 0).all()
    assert terms.clipped.sum() == 0


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
