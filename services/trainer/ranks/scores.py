"""What is known of the tokens of a step before its first update: log-probs by several policies, values, the teacher.

`Scorer` makes the forward passes that a run's settings need, and no others. It knows no losses and no rewards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    kept: log-probs by the weights of the version that generated each token; None also where these are the present ones.
    known: int64 [j], places of the tokens whose version's weights are kept; the others have the engine's log-probs in
        `kept`. None where no weights are kept.
    reference: log-probs by the reference model.
    teacher, teacher_top: log-probs by the teacher of a distillation, and its most likely tokens.
    values: the critic's, before the step.
    """

    trainer: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    known: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    teacher: torch.Tensor | None = None
    teacher_top: TopTokens | None = None
    values: torch.Tensor | None = None


def needs_trainer_scores(settings: TrainerSettings, index: int) -> bool:
    """Whether the policy's log-probs before the step are needed for optimizer step `index` of it, before the loss."""
    if settings.loss_type == "sft_loss":
        return False
    if settings.kl_coef > 0 or settings.tis_batch_normalize:
        return True
    if settings.opd_sampled and not settings.use_rollout_logprobs:
        return True
    # Later optimizer steps have other weights. The engine's numbers can stand for them, unless both are compared.
    return index > 0 and (not settings.use_rollout_logprobs or settings.corrects)


class Scorer:
    """Scores the packs of a step."""

    def __init__(self, settings: TrainerSettings, policy: Policy) -> None:
        self._settings, self._policy = settings, policy

    def score(self, packs: list[list[Pack]], timer: PartTimer) -> list[list[Scores]]:
        """Scores of every pack, by optimizer step. Nothing has been updated yet."""
        scores = [self._score_step(step, index, timer) for index, step in enumerate(packs)]
        return self._with_kept(packs, scores, timer) if self._policy.beside.kept else scores

    def _score_step(self, packs: list[Pack], index: int, timer: PartTimer) -> list[Scores]:
        nothing: list[torch.Tensor | None] = [None] * len(packs)
        trainer, reference = nothing, nothing
        policy = self._policy
        if needs_trainer_scores(self._settings, index):
            with timer.part("old_log_probs"):
                trainer = self._evaluate(policy.model, packs)
        if policy.beside.reference is not None:
            with timer.part("ref_log_probs"):
                reference = self._evaluate(policy.beside.reference.model, packs)
        return [Scores(trainer=t, reference=r) for t, r in zip(trainer, reference, strict=True)]

    def _with_kept(self, packs: list[list[Pack]], scores: list[list[Scores]], timer: PartTimer) -> list[list[Scores]]:
        policy, flat = self._policy, list(itertools.chain(*packs))
        kept = policy.beside.kept
        assert kept is not None
        with timer.part("old_log_probs"):
            found = kept.score(flat, policy.optimizer_steps, lambda some: self._evaluate(policy.model, some))
        numbers = iter(found or [None] * len(flat))
        return [
            [replace(one, kept=next(numbers), known=kept.known(pack)) for one, pack in zip(*pair, strict=True)]
            for pair in zip(scores, packs, strict=True)
        ]

    def _evaluate(self, model: GPTModel, packs: Sequence[Pack]) -> list[torch.Tensor]:
        return evaluate_log_probs(model, packs, self._policy.hf, self._policy.temperature)
