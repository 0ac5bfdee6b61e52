"""From what is known of a step's tokens to the advantage of each: KL in rewards, returns, distillation, whitening.

The stage sees all packs of the step at once, before any update, and knows no model. It is the same on every rank; only
whitening looks over the data-parallel ranks. Order: token rewards → returns or generalized advantages → distillation
→ whitening.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from services.common.run_spec import TrainerSettings
from services.trainer.core.algorithms.distillation import reverse_kl_advantage
from services.trainer.core.algorithms.estimators import estimator
from services.trainer.core.algorithms.kl import kl_estimate
from services.trainer.core.algorithms.returns import discounted, gae, token_rewards
from services.trainer.core.algorithms.whitening import moments, whiten
from services.trainer.ranks.batches import Pack
from services.trainer.ranks.nonfinite import check_finite, not_finite
from services.trainer.ranks.scores import Scores


@dataclass(frozen=True)
class StageSettings:
    """form: what a sample's number becomes for its tokens (`Estimator.token_stage`); kl: rewards hold one to the
    reference, by the estimator kl_type; gamma, lambd: of returns and generalized advantages; whiten: over all trained
    tokens of the step; opd_coef: weight of the reverse KL to a teacher, 0 without."""

    form: str
    kl: bool
    kl_type: str
    gamma: float
    lambd: float
    whiten: bool
    opd_coef: float = 0.0


@dataclass(frozen=True)
class TokenTargets:
    """What a pack is trained on, each float32 [k]. advantages; returns: what values are trained on, with a critic; kl:
    to the reference before the step, where rewards hold one; reverse_kl: to the teacher, where advantages hold it."""

    advantages: torch.Tensor
    returns: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    reverse_kl: torch.Tensor | None = None


def stage_settings(settings: TrainerSettings) -> StageSettings:
    """The stage's settings out of a run's. Raises FUNCTION_NOT_LOADABLE."""
    supervised = settings.loss_type == "sft_loss"
    return StageSettings(
        form="broadcast" if supervised else estimator(settings).token_stage,
        kl=settings.kl_coef > 0 and not supervised,
        kl_type=settings.kl_loss_type,
        gamma=settings.gamma,
        lambd=settings.lambd,
        whiten=settings.normalize_advantages and not supervised,
        opd_coef=settings.opd_kl_coef if settings.opd_sampled else 0.0,
    )


@torch.no_grad()
def token_stage(
    packs: Sequence[Pack],
    scores: Sequence[Scores],
    settings: StageSettings,
    kl_coef: float,
    group: dist.ProcessGroup,
) -> list[TokenTargets]:
    """Targets of every pack of a step.

    Args:
        packs: of all optimizer steps; `Pack.advantages` has each token's sample's number.
        scores: of each pack.
        kl_coef: weight of the KL in rewards at this step.
        group: the data-parallel ranks, over which whitening looks.

    Raises:
        ServiceError: LOSS_NOT_FINITE, on all ranks.
    """
    targets = [_targets(pack, score, settings, kl_coef) for pack, score in zip(packs, scores, strict=True)]
    if settings.opd_coef:
        everything = zip(targets, packs, scores, strict=True)
        targets = [_distilled(*of_pack, settings.opd_coef) for of_pack in everything]
    if not settings.whiten:
        return targets
    # One number that is none would make all of them so, and hide whose it was.
    found = [
        (p.sample_ids, not_finite(t.advantages, p.segments, p.sample_count))
        for p, t in zip(packs, targets, strict=True)
    ]
    check_finite(found, "The advantage")
    return _whitened(targets, group)


def _targets(pack: Pack, scores: Scores, settings: StageSettings, kl_coef: float) -> TokenTargets:
    """Targets of one pack, not whitened."""
    scalars, kl = pack.advantages, None
    if settings.kl:
        assert scores.trainer is not None
        assert scores.reference is not None
        kl = kl_estimate(scores.trainer, scores.reference, settings.kl_type)
    penalty = torch.zeros_like(scalars) if kl is None else kl
    if settings.form == "broadcast":
        return TokenTargets(scalars, kl=kl)
    if settings.form == "baseline_kl":
        return TokenTargets(scalars - kl_coef * penalty, kl=kl)
    by_sample = scalars.new_zeros(pack.sample_count).index_put((pack.segments,), scalars)
    rewards = token_rewards(penalty, by_sample, pack.segments, kl_coef)
    if settings.form == "returns":
        return TokenTargets(discounted(rewards, pack.segments, settings.gamma), kl=kl)
    assert scores.values is not None, "gae needs a critic's values"
    advantages, returns = gae(rewards, scores.values, pack.segments, settings.gamma, settings.lambd)
    return TokenTargets(advantages, returns, kl)


def _distilled(targets: TokenTargets, pack: Pack, scores: Scores, coef: float) -> TokenTargets:
    """Advantages with the reverse KL to the teacher; the student is the policy before the step, or the engine's
    numbers where the run takes these for it."""
    assert scores.teacher is not None, "distillation needs a teacher's log-probs"
    student = pack.engine_log_probs if scores.trainer is None else scores.trainer
    pull = reverse_kl_advantage(student, scores.teacher)
    return replace(targets, advantages=targets.advantages + coef * pull, reverse_kl=-pull)


def _whitened(targets: list[TokenTargets], group: dist.ProcessGroup) -> list[TokenTargets]:
    whole = torch.stack([moments(target.advantages) for target in targets]).sum(0)
    if group.size() > 1:
        dist.all_reduce(whole, group=group)
    return [replace(target, advantages=whiten(target.advantages, whole)) for target in targets]
