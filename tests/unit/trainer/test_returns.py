"""Returns, generalized advantages, whitening and the adaptive KL: hand-computed cases and edges; the table of formulas
(tests/oracle/test_algorithms.py) compares with other libraries."""

from __future__ import annotations

import pytest
import torch

from services.trainer.core.algorithms.kl import AdaptiveKl, kl_estimate
from services.trainer.core.algorithms.returns import discounted, gae, token_rewards
from services.trainer.core.algorithms.whitening import moments, whiten

NONE = torch.zeros(0)
NO_SEGMENTS = torch.zeros(0, dtype=torch.int64)


def test_the_scalar_is_at_the_last_trained_token() -> None:
    segments = torch.tensor([0, 0, 2])  # sample 1 has no trained token: its scalar is dropped
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0]), segments, 0.5)
    assert rewards.tolist() == [-0.5, 9.0, 28.5]


def test_returns_by_hand() -> None:
    segments = torch.tensor([0, 0, 0, 3])
    assert discounted(torch.tensor([1.0, 2.0, 4.0, 8.0]), segments, 0.5).tolist() == [3.0, 4.0, 4.0, 8.0]
    assert discounted(torch.tensor([1.0, 2.0, 4.0, 8.0]), segments, 0.0).tolist() == [1.0, 2.0, 4.0, 8.0]


def test_generalized_advantages_by_hand() -> None:
    rewards, values = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0.5, 0.25, 2.0])
    advantages, returns = gae(rewards, values, torch.tensor([0, 0, 1]), 1.0, 0.5)
    assert advantages.tolist() == [0.25 - 0.5 + 0.5 * 0.75, 0.75, 3.0]
    assert returns.tolist() == [0.625, 1.0, 5.0]


@pytest.mark.parametrize("length", [1, 127, 128, 129, 256, 300])
def test_long_samples_are_summed_over_chunks(length: int) -> None:
    rewards = torch.arange(length, dtype=torch.float32)
    expected, total = [], 0.0
    for reward in reversed(rewards.tolist()):
        total = reward + 0.9 * total
        expected.append(total)
    found = discounted(rewards, torch.zeros(length, dtype=torch.int64), 0.9)
    torch.testing.assert_close(found, torch.tensor(expected[::-1]), rtol=1e-6, atol=1e-6)


def test_nothing_trained_is_nothing() -> None:
    assert token_rewards(NONE, torch.tensor([1.0]), NO_SEGMENTS, 0.1).shape == (0,)
    assert discounted(NONE, NO_SEGMENTS, 0.9).shape == (0,)
    assert [part.shape for part in gae(NONE, NONE, NO_SEGMENTS, 0.9, 0.9)] == [(0,), (0,)]
    assert whiten(NONE, moments(NONE)).shape == (0,)
    assert whiten(torch.tensor([7.0]), moments(torch.tensor([7.0]))).tolist() == [0.0]


def test_equal_values_whiten_to_zero() -> None:
    values = torch.full((1000,), 0.1)
    assert whiten(values, moments(values)).abs().max() < 1e-3


def test_whitening_does_not_depend_on_where_tokens_are() -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0)) + 3
    one = whiten(values, moments(values))
    parts = values[:10], values[10:10], values[10:]
    whole = sum(moments(part) for part in parts)
    assert torch.equal(torch.cat([whiten(part, whole) for part in parts]), one)
    assert one.mean().abs() < 1e-6
    assert one.std() == pytest.approx(1.0)


def test_the_coefficient_follows_the_kl() -> None:
    controller = AdaptiveKl(coef=0.1, target=0.05, horizon=100)
    assert controller.update(0.05, 10) == 0.1
    assert controller.update(1.0, 10) == pytest.approx(0.1 * 1.02)  # the error counts as 20% at most
    assert controller.update(0.0, 10) == pytest.approx(0.1 * 1.02 * 0.98)
    assert AdaptiveKl(0.1, 0.05, 1).update(0.0, 1000) == 0.0  # never below
    with pytest.raises(ValueError, match="measured KL is nan"):
        controller.update(float("nan"), 10)


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="'k9' is unknown; use one of k1, k2, k3, low_var_kl"):
        kl_estimate(NONE, NONE, "k9")
