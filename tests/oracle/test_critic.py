"""The critic's numbers against transformers', and two ranks in every layout against one. All float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.oracle import models
from tests.support.rank_processes import run_ranks

VALUE_TOLERANCE = 1e-5
"""Largest absolute difference of values of a scale of about 2; measured 1.4e-6."""
LAYOUT_TOLERANCE = 1e-5
_DEADLINE_SECONDS = 240


def _run(program: str, world_size: int, root: Path) -> dict:
    run_ranks("tests.oracle.critic_program", program, world=world_size, root=root, seconds=_DEADLINE_SECONDS)
    return torch.load(root / f"{program}.pt", weights_only=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("critic")
    models.write_models(path, names=("qwen3",))
    return path


@pytest.fixture(scope="module")
def single(root: Path) -> dict:
    """Results of a world of one rank."""
    return _run("single", 1, root)


@pytest.fixture(scope="module")
def pair(root: Path, single: dict) -> dict:
    """Results of a world of two ranks, which also loads the first world's checkpoint."""
    assert single
    return _run("pair", 2, root)


@pytest.mark.timeout(300)
def test_values_loss_and_gradient_equal_transformers_autograd(single):
    expected, numbers = single["hf"]
    values, metrics = single["ours"]
    assert set(values) - set(expected) == {"s5"}, "the unscored sample has no value"
    assert max(np.abs(values[name] - expected[name]).max() for name in expected) <= VALUE_TOLERANCE
    assert {name: metrics[name] for name in numbers} == pytest.approx(numbers, rel=1e-5)


def test_a_fresh_critic_says_zero_and_explains_nothing(single):
    assert all(not numbers.any() for numbers in single["fresh"].values())
    assert single["first"][0]["explained_variance"] == 0
    assert single["first"][0]["value_mean"] == 0


def test_a_clipped_value_gains_nothing_more(single):
    assert single["first"][0]["value_clipfrac"] == 0, "values have not moved in the first optimizer step"


def test_a_checkpoint_has_both_parts_or_does_not_exist(single):
    assert single["hidden"], "the critic's part alone is no checkpoint"
    assert single["left"] == ["latest", "step_000003"]
    assert (single["counters"].step_count, single["counters"].optimizer_steps) == (3, 3)
    assert single["resumed"] == single["uninterrupted"]


def test_a_checkpoint_without_a_critic_begins_a_new_run_and_continues_none(single):
    assert (single["new_run"].step_count, single["new_run"].optimizer_steps) == (2, 0)
    assert "has no critic" in single["refused"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["data", "tensor", "context"])
def test_two_ranks_train_as_one_and_take_up_its_checkpoint(single, pair, layout):
    first, resumed = pair[layout]
    for found, expected in ((first, single["first"]), (resumed, single["uninterrupted"])):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=LAYOUT_TOLERANCE, abs=1e-5)
