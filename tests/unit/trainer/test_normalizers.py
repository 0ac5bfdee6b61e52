"""What a trained token counts in the loss."""

from __future__ import annotations

import numpy as np
import pytest

from services.trainer.core.algorithms.normalizers import sample_weights, token_weights

TOKENS = [2, 0, 4, 1]


@pytest.mark.parametrize(
    ("kind", "weights", "counts"),
    [
        ("token_mean", [1, 1, 1, 1], [2, 0, 4, 1]),
        ("sample_mean", [1 / 2, 1, 1 / 4, 1], [1, 1, 1, 1]),
        ("rollout_mean", [1 / 6, 1, 1 / 6, 1], [1, 1, 0, 1]),
        ("constant", [1 / 8, 1 / 8, 1 / 8, 1 / 8], [1, 1, 1, 1]),
    ],
)
def test_kinds(kind: str, weights: list[float], counts: list[int]) -> None:
    got = sample_weights(TOKENS, kind, rollouts=["a", "b", "a", "c"], constant=8)
    assert got.weights.tolist() == pytest.approx(weights)
    assert got.counts.tolist() == counts


def test_weights_of_tokens() -> None:
    got = token_weights(TOKENS, [0.5, 9, 0.25, 1])
    assert got.dtype == np.float32
    assert got.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 1]
    assert token_weights([], []).shape == (0,)


@pytest.mark.parametrize("kind", ["token_mean", "sample_mean", "rollout_mean", "constant"])
def test_a_step_of_nothing(kind: str) -> None:
    got = sample_weights([], kind, rollouts=[], constant=8)
    assert got.weights.shape == got.counts.shape == (0,)
    assert np.isfinite(sample_weights([0, 0], kind, rollouts=["a", "a"], constant=8).weights).all()


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="needs the rollout of every sample"):
        sample_weights(TOKENS, "rollout_mean")
    with pytest.raises(ValueError, match="needs loss_constant"):
        sample_weights(TOKENS, "constant")


@pytest.mark.parametrize("seed", range(20))
def test_rollouts_count_the_same_whatever_they_are_split_into(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, rollouts = rng.integers(0, 4, 12), rng.integers(0, 6, 12).astype(str)
    got = sample_weights(tokens.tolist(), "rollout_mean", rollouts=rollouts.tolist())
    assert got.counts.sum() == len(set(rollouts))
    for name in set(rollouts):
        members = rollouts == name
        mass = (got.weights * tokens)[members].sum()
        assert mass == pytest.approx(1 if tokens[members].any() else 0)
