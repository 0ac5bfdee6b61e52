"""What a pack's loss is made of, on a hand-made pack: which policies it compares, and what its metrics are taken of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.common.run_spec import TrainerSettings
from services.trainer.core.algorithms.kl import kl_estimate
from services.trainer.ranks.batches import Pack
from services.trainer.ranks.objective import BY_TOKEN, CORRECTION, MISMATCH, Objective, Work
from services.trainer.ranks.scores import Scores
from services.trainer.ranks.statistics import Collected
from services.trainer.ranks.token_stage import TokenTargets

TOKENS, SEGMENTS = 6, [0, 0, 0, 1, 1, 1]
DECOUPLED = {"use_decoupled_loss": True, "keep_old_actor": True, "use_tis": True}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
GENERATOR = torch.Generator().manual_seed(3)
CURRENT, BEGIN, ENGINE, REFERENCE = (
    scale * torch.randn(TOKENS, generator=GENERATOR) - 2 for scale in (0.1, 0.1, 0.3, 0.2)
)


def work(scores: Scores) -> Work:
    """A pack of two samples in a later optimizer step."""
    none: Any = None
    pack = Pack(
        layout=none,
        tokens=none,
        rows=none,
        targets=none,
        weights=torch.ones(TOKENS),
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
        engine_log_probs=ENGINE,
        count=2,
        divisor=torch.tensor(2),
        total_tokens=TOKENS,
        segments=torch.tensor(SEGMENTS),
        versions=torch.ones(TOKENS, dtype=torch.int32),
        sample_ids=("a", "b"),
    )
    return Work(pack, scores, TokenTargets(pack.advantages), first=False)


def loss_of(scores: Scores, settings: dict[str, Any]) -> tuple[torch.Tensor, Collected]:
    """Loss by token, and what metrics are made of."""
    objective = Objective(TrainerSettings.model_validate(settings))
    return objective(CURRENT.clone().requires_grad_(), torch.zeros(TOKENS), work(scores), 0.1)


def test_the_decoupled_loss_of_present_weights_is_that_of_kept_ones() -> None:
    """No kept log-probs: the weights that generated are those of the step's begin, and need no pass of their own."""
    everything = torch.arange(TOKENS)
    present, told = loss_of(Scores(trainer=BEGIN, known=everything), DECOUPLED)
    kept, _ = loss_of(Scores(trainer=BEGIN, kept=BEGIN.clone(), known=everything), DECOUPLED)
    assert torch.equal(present, kept)
    assert told.sums[BY_TOKEN + "behave_weight"] == TOKENS, "the engine's part is TIS's"
    weights = (BEGIN - ENGINE).exp().clamp(max=2.0)
    assert float(told.sums[CORRECTION + "weight"]) == pytest.approx(float(weights.sum()))


def test_without_kept_weights_the_engine_is_what_generated() -> None:
    _, told = loss_of(Scores(trainer=BEGIN), {"use_decoupled_loss": True})
    assert float(told.sums[BY_TOKEN + "behave_weight"]) == pytest.approx(float((BEGIN - ENGINE).exp().sum()), rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"use_unbiased_kl": True, "kl_loss_type": "k3"}])
def test_the_kl_that_is_told_has_no_weights(settings: dict[str, Any]) -> None:
    _, told = loss_of(Scores(trainer=BEGIN, reference=REFERENCE), KL | settings)
    plain = kl_estimate(CURRENT, REFERENCE, settings.get("kl_loss_type", "low_var_kl"))
    assert float(told.sums[BY_TOKEN + "kl"]) == pytest.approx(float(plain.sum()), rel=1e-5)
    assert torch.equal(told.means["kl_loss"].detach(), plain) == (not settings)


def test_tokens_of_unknown_weights_are_not_compared_with_themselves() -> None:
    known = torch.tensor([0, 1, 4])
    kept = ENGINE.index_copy(0, known, BEGIN[known])
    settings = {"keep_old_actor": True, "use_tis": True}
    _, told = loss_of(Scores(trainer=BEGIN, kept=kept, known=known), settings)
    apart = (BEGIN - ENGINE)[known]
    assert told.sums["compared"] == told.sums[MISMATCH + "tokens"] == 3
    assert told.sums[MISMATCH + "sequences"] == 2
    assert float(told.sums[MISMATCH + "kl"]) == pytest.approx(-float(apart.sum()), rel=1e-5)
    assert told.distances is not None
    assert torch.equal(told.distances, apart.abs())
    assert told.sums[BY_TOKEN + "kept_missing_fraction"] == 3


def test_nothing_is_compared_where_all_weights_are_unknown() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    _, told = loss_of(Scores(trainer=BEGIN, kept=ENGINE.clone(), known=nothing), {"keep_old_actor": True})
    assert told.sums["compared"] == told.sums[MISMATCH + "tokens"] == told.sums[MISMATCH + "sequences"] == 0
    assert told.sums[BY_TOKEN + "kept_missing_fraction"] == TOKENS
