"""The loss of a pack's tokens from their log-probs: policy loss, corrections, entropy, KL; and its metrics.

Knows no model. Which policies the ratios are between:

- begin: the policy as the step finds it. In the first optimizer step it is the current one, and ratios to it are 1.
- old, which the policy loss clips against: begin; with `keep_old_actor` the weights that generated each token; with
  `use_rollout_logprobs` the engine's numbers; with `use_decoupled_loss` always begin.
- generating: the kept weights, else begin. Compared with the engine's numbers it gives the mismatch of trainer and
  engine, which corrections and metrics go by; metrics without tokens whose weights are not kept.
- behaviour, of the decoupled loss: the engine's numbers; with `keep_old_actor` generating.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.common.run_spec import TrainerSettings
from services.trainer.core.algorithms.corrections import Correction, mismatch_sums, opsm
from services.trainer.core.algorithms.custom_loss import LossInputs, custom_loss
from services.trainer.core.algorithms.estimators import estimator
from services.trainer.core.algorithms.kl import kl_estimate, unbiased
from services.trainer.core.algorithms.policy_losses import (
    PolicyLossSettings,
    PolicyTerms,
    decoupled,
    policy_terms,
    supervised_loss,
)
from services.trainer.ranks.batches import Pack
from services.trainer.ranks.corrector import Corrector
from services.trainer.ranks.scores import Scores
from services.trainer.ranks.statistics import Collected
from services.trainer.ranks.token_stage import TokenTargets

CORRECTION, MISMATCH, BY_TOKEN = "correction ", "mismatch ", "token "
"""Prefixes of sums: of formulas that have metrics of their own, and of those whose mean over tokens is told."""


@dataclass(frozen=True)
class Work:
    """A pack with all that its loss needs. `first`: of the step's first optimizer step; correction: made for the whole
    step, or None where the loss makes its own."""

    pack: Pack
    scores: Scores
    targets: TokenTargets
    first: bool
    correction: Correction | None = None


def loss_settings(settings: TrainerSettings) -> PolicyLossSettings:
    """The policy loss's settings out of the run's."""
    return PolicyLossSettings(
        eps_low=settings.eps_clip,
        eps_high=settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high,
        kind=estimator(settings).policy_loss,
        dual_clip=settings.eps_clip_c,
    )


class Objective:
    """The loss of a run."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._supervised = settings.loss_type == "sft_loss"
        self._custom = custom_loss(settings)
        self._loss = loss_settings(settings)
        self.corrector = Corrector(settings) if settings.corrects else None

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor, work: Work, kl_loss_coef: float
    ) -> tuple[torch.Tensor, Collected]:
        """Loss by token [k], to be weighted and summed, and what metrics are made of.

        Args:
            log_probs, entropy: of the current policy, [k], with gradient.
            kl_loss_coef: weight of the KL term at this step.
        """
        settings, collected = self._settings, Collected()
        if settings.entropy_coef == 0 or self._supervised:
            entropy = entropy.detach()
        collected.means["entropy"] = entropy
        if self._supervised:
            return supervised_loss(log_probs), collected
        begin = _begin(log_probs, work)
        old = self._old(begin, work)
        policy, objective = self._policy_loss(log_probs, entropy, old, work, collected)
        objective = self._weighted(objective, (begin, log_probs, old), work, collected)
        collected.means |= {"pg_loss": objective, "ppo_kl": policy.log_ratio, "pg_clipfrac": policy.clipped}
        loss = objective
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * entropy
        if settings.use_kl_loss:
            assert work.scores.reference is not None
            kl = kl_estimate(log_probs, work.scores.reference, settings.kl_loss_type)
            collected.sums |= _by_token({"kl": kl})  # as it is: what kl_target is said in
            if settings.use_unbiased_kl:
                kl = unbiased(kl, log_probs, old)
            collected.means["kl_loss"] = kl
            loss = loss + kl_loss_coef * kl
        _collect(collected, policy, work)
        _compare(collected, _generating(begin, work), work)
        return loss, collected

    def _weighted(
        self,
        objective: torch.Tensor,
        log_probs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        work: Work,
        collected: Collected,
    ) -> torch.Tensor:
        """The objective times what the run corrects it by. log_probs: of begin, of the current policy, of old."""
        settings, pack, advantages = self._settings, work.pack, work.targets.advantages
        begin, current, old = log_probs
        generating = begin if work.scores.kept is None else work.scores.kept
        if settings.use_decoupled_loss:
            behaviour = generating if settings.keep_old_actor else pack.engine_log_probs
            weights, dropped = decoupled(begin, behaviour, settings.behave_weight_cap)
            collected.sums |= _by_token({"behave_weight": weights, "behave_dropped_fraction": dropped})
            objective = objective * weights
        if settings.use_opsm:
            kept = opsm(current, old, advantages, pack.segments, pack.sample_count, settings.opsm_delta)
            collected.sums |= _by_token({"opsm_fraction": 1 - kept})
            objective = objective * kept
        if self.corrector is not None:
            correction = work.correction or self.corrector(generating, pack)
            collected.sums |= {CORRECTION + name: value for name, value in correction.sums.items()}
            objective = objective * correction.weights * correction.keep
        return objective

    def _old(self, begin: torch.Tensor, work: Work) -> torch.Tensor:
        """Log-probs of the policy that the loss clips against."""
        if self._settings.use_decoupled_loss:
            return begin
        if self._settings.use_rollout_logprobs:
            return work.pack.engine_log_probs
        return begin if work.scores.kept is None else work.scores.kept

    def _policy_loss(
        self, log_probs: torch.Tensor, entropy: torch.Tensor, old: torch.Tensor, work: Work, collected: Collected
    ) -> tuple[PolicyTerms, torch.Tensor]:
        """Terms of the loss by name, and the objective, which is the user's where there is one."""
        pack, advantages = work.pack, work.targets.advantages
        policy = policy_terms(log_probs, old, advantages, self._loss, pack.segments, pack.sample_count)
        if self._custom is None:
            return policy, policy.objective
        inputs = LossInputs(
            log_probs=log_probs,
            entropy=entropy,
            old_log_probs=old,
            engine_log_probs=pack.engine_log_probs,
            reference_log_probs=work.scores.reference,
            advantages=advantages,
            segments=pack.segments,
            versions=pack.versions,
            sample_ids=pack.sample_ids,
        )
        objective, metrics = self._custom(inputs, self._settings)
        collected.sums |= _by_token({f"custom_{name}": value for name, value in metrics.items()})
        return policy, objective


def _begin(log_probs: torch.Tensor, work: Work) -> torch.Tensor:
    """Log-probs by the policy as the step finds it; the current ones where that is not known."""
    return log_probs.detach() if work.first or work.scores.trainer is None else work.scores.trainer


def _generating(begin: torch.Tensor, work: Work) -> torch.Tensor | None:
    """Log-probs by the weights that generated, as far as they are known; None where nothing has computed them."""
    if work.scores.kept is not None:
        return work.scores.kept
    return begin if work.first or work.scores.trainer is not None else None


def _by_token(terms: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {BY_TOKEN + name: term.detach().sum(dtype=torch.float64) for name, term in terms.items()}


def _collect(collected: Collected, policy: PolicyTerms, work: Work) -> None:
    ratio = policy.ratio.detach()
    if work.scores.known is not None:
        missing = len(ratio) - len(work.scores.known)
        missing_sum = torch.full((), missing, dtype=torch.float64, device=ratio.device)
        collected.sums[BY_TOKEN + "kept_missing_fraction"] = missing_sum
    collected.sums["ratio"] = ratio.sum(dtype=torch.float64)
    collected.maxima["ratio_max"] = ratio
    if work.targets.kl is not None:
        collected.sums |= _by_token({"kl": work.targets.kl})


def _compare(collected: Collected, generating: torch.Tensor | None, work: Work) -> None:
    """Trainer against engine, in every run: over all tokens whose log-probs the trainer knows."""
    engine, segments, known = work.pack.engine_log_probs, work.pack.segments, work.scores.known
    if generating is None:  # nothing has computed them
        engine, segments = engine[:0], segments[:0]
        generating = engine
    elif known is not None:  # the others have the engine's numbers, which would be compared with themselves
        generating, engine, segments = (x.index_select(0, known) for x in (generating, engine, segments))
    difference = generating.detach() - engine
    distances = difference.abs()
    collected.sums["compared"] = torch.full((), len(difference), dtype=torch.float64, device=engine.device)
    collected.sums["difference"] = difference.sum(dtype=torch.float64)
    collected.sums["distance"] = distances.sum(dtype=torch.float64)
    found = mismatch_sums(generating, engine, segments, work.pack.sample_count)
    collected.sums |= {MISMATCH + name: value for name, value in found.items()}
    collected.maxima["log_prob_abs_diff_max"] = distances
    collected.distances = distances
