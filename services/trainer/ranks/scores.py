"""What is known of the tokens of a step before its first update: log-probs by several policies, values, the teacher.

`Scorer` makes the forward passes that a run's settings need, and no others. It knows no losses and no rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel

from services.common.run_spec import TrainerSettings
from services.trainer.ranks.batches import Pack
from services.trainer.ranks.policy import Policy, evaluate_log_probs
from services.trainer.ranks.timing import PartTimer


@dataclass(frozen=True)
class TopTokens:
    """A teacher's n most likely tokens at each of this rank's rows: ids int64 [own, n], log_probs float32 [own, n]."""

    ids: torch.Tensor
    log_probs: torch.Tensor


@dataclass(frozen=True)
class Scores:
    """Of the trained tokens of one pack, each float32 [k], without gradient; None: the run does not need it.

    trainer: log-probs by the trained policy as it is before the step. None for the first optimizer step unless
        something needs them before the loss: the current log-probs are the same there.
    kept: log-probs by the weights of the version that generated each token.
    reference: log-probs by the reference model.
    teacher, teacher_top: log-probs by the teacher of a distillation, and its most likely tokens.
    values: the critic's, before the step.
    """

    trainer: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    teacher: torch.Tensor | None = None
    teacher_top: TopTokens | None = None
    values: torch.Tensor | None = None


def needs_trainer_scores(settings: TrainerSettings) -> bool:
    """Whether the policy's log-probs are needed before the loss: KL in rewards or to a teacher, weights normalised over
    the step."""
    if settings.opd_sampled and not settings.use_rollout_logprobs:
        return True
    return settings.kl_coef > 0 or settings.tis_batch_normalize


class Scorer:
    """Scores the packs of a step. `reference` is the frozen model of the KL, or None without one."""

    def __init__(self, settings: TrainerSettings, policy: Policy, reference: GPTModel | None) -> None:
        self._settings, self._policy, self._reference = settings, policy, reference

    def score(self, packs: list[list[Pack]], timer: PartTimer) -> list[list[Scores]]:
        """Scores of every pack, by optimizer step. Nothing has been updated yet."""
        return [self._score_step(step, index, timer) for index, step in enumerate(packs)]

    def _score_step(self, packs: list[Pack], index: int, timer: PartTimer) -> list[Scores]:
        nothing: list[torch.Tensor | None] = [None] * len(packs)
        trainer, reference = nothing, nothing
        settings, policy = self._settings, self._policy
        if needs_trainer_scores(settings) or (index > 0 and not settings.use_rollout_logprobs):
            with timer.part("old_log_probs"):
                trainer = evaluate_log_probs(policy.model, packs, policy.hf, policy.temperature)
        if self._reference is not None:
            with timer.part("ref_log_probs"):
                reference = evaluate_log_probs(self._reference, packs, policy.hf, policy.temperature)
        return [Scores(trainer=t, reference=r) for t, r in zip(trainer, reference, strict=True)]
