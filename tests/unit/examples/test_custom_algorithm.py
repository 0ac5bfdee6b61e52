"""The example's functions: a data-parallel rank without samples calls them too, with nothing."""

from __future__ import annotations

import pytest
import torch

from examples.custom_algorithm.functions import near_or_nothing, ranked, soft_clip
from services.common.run_spec.algorithm import AlgorithmSettings
from services.trainer.core.algorithms.custom_loss import LossInputs
from services.trainer.core.algorithms.estimators import ScoredSample

SETTINGS = AlgorithmSettings()
NOTHING, NO_SEGMENTS = torch.zeros(0), torch.zeros(0, dtype=torch.int64)


def test_a_loss_of_no_token() -> None:
    some = (NOTHING.clone().requires_grad_(), NOTHING, NOTHING, NOTHING, None, NOTHING)
    loss, metrics = soft_clip(LossInputs(*some, NO_SEGMENTS, NO_SEGMENTS.int(), ()), SETTINGS)
    assert loss.shape == metrics["gain"].shape == (0,)


@pytest.mark.parametrize("count", [0, 2])
def test_a_correction_of_no_token(count: int) -> None:
    weights, keep = near_or_nothing(
        train_log_probs=NOTHING, engine_log_probs=NOTHING, segments=NO_SEGMENTS, count=count, settings=SETTINGS
    )
    assert weights.shape == keep.shape == (0,)


def test_ranks_of_groups() -> None:
    samples = [ScoredSample(str(i), "g", reward) for i, reward in enumerate((1.0, 100.0, None, 1.0))]
    assert ranked(samples, SETTINGS) == {"0": -0.5, "1": 1.0, "3": -0.5}
    assert ranked([], SETTINGS) == {}
