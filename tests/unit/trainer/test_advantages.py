"""Group advantages: hand-computed cases; tests/oracle compares with other libraries."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.core.algorithms.estimators import ScoredSample, group_advantages, zero_share


def test_a_group_is_centred_and_divided_by_its_unbiased_deviation() -> None:
    rewards = {"a": 1.0, "b": 0.0, "c": 0.0}
    got = group_advantages([ScoredSample(name, "g", reward) for name, reward in rewards.items()])
    deviation = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    assert got == pytest.approx({n: (r - 1 / 3) / (deviation + 1e-6) for n, r in rewards.items()})


def fan_out(*rollouts: tuple[float, ...]) -> list[ScoredSample]:
    """A group of rollouts with these rewards; sample names are rollout and place."""
    return [
        ScoredSample(f"{i}{j}", "g", reward, rollout_id=str(i))
        for i, rewards in enumerate(rollouts)
        for j, reward in enumerate(rewards)
    ]


def test_samples_of_one_rollout_are_divided_by_the_deviation_of_their_own_rewards() -> None:
    got = group_advantages(fan_out((1.0, 0.0), (0.0, 1.0)))  # the rollouts' means are equal, the rewards are not
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert got == pytest.approx({"00": half, "01": -half, "10": -half, "11": half})


def test_a_rollout_counts_once_in_the_deviation() -> None:
    mean = (0.5 + 0.0) / 2
    deviation = math.sqrt(((0.75**2 + 0.25**2) / 2 + 0.25**2) / 1)
    got = group_advantages(fan_out((1.0, 0.0), (0.0,)))
    wanted = {"00": 1 - mean, "01": -mean, "10": -mean}
    assert got == pytest.approx({name: value / (deviation + 1e-6) for name, value in wanted.items()})
    twice = group_advantages(fan_out((1.0, 1.0), (0.0,)))
    assert twice["00"] == twice["01"] == group_advantages(fan_out((1.0,), (0.0,)))["00"]


def test_equal_rewards_of_several_samples_give_zero() -> None:
    assert set(group_advantages(fan_out((0.1,) * 3, (0.1,))).values()) == {0.0}


def test_without_deviation() -> None:
    samples = [ScoredSample("a", "g", 1.0), ScoredSample("b", "g", 0.0)]
    assert group_advantages(samples, normalize_std=False) == {"a": 0.5, "b": -0.5}


def test_unscored_samples_take_no_part() -> None:
    scored = [ScoredSample("a", "g", 1.0), ScoredSample("b", "g", 0.0)]
    assert group_advantages([*scored, ScoredSample("c", "g", None)]) == group_advantages(scored)
    assert group_advantages([ScoredSample("c", "g", None)]) == {}


def test_a_single_scored_sample_teaches_nothing() -> None:
    assert group_advantages([ScoredSample("a", "g", 7.0), ScoredSample("b", "g", None)]) == {"a": 0.0}


def test_equal_rewards_give_zero() -> None:
    got = group_advantages([ScoredSample(str(i), "g", 0.1) for i in range(3)])  # their mean is not 0.1
    assert set(got.values()) == {0.0}
    assert zero_share(got) == 1
    assert zero_share({"a": 0.0, "b": 1.0}) == 0.5


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10)), max_size=30))
def test_groups_are_told_apart_by_id_whatever_the_order(rewards: list[tuple[int, float]]) -> None:
    samples = [ScoredSample(str(i), f"g{g}", r) for i, (g, r) in enumerate(rewards)]
    together = group_advantages(samples)
    apart = {}
    for group in range(4):
        apart |= group_advantages([s for s in samples if s.group_id == f"g{group}"])
    assert together == apart
