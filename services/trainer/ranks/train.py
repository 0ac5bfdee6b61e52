"""One step: samples of this rank in, weights updated, metrics out.

Every optimizer step runs its micro-batches through megatron's schedule, which sums gradients, reduces them over the
data-parallel ranks and divides by the step's count (samples, or trained tokens). Metrics use the same weights and the
same divisor, and are gathered as one tensor at the end of the step.

Order: packs → scores (what must be known before the first update) → token stage (an advantage for every token) →
optimizer steps. An optimizer step whose loss is not finite ends the step on all ranks before it updates anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from services.common.records import Sample
from services.common.run_spec import RunSpec
from services.trainer.core.algorithms.corrections import Correction, correction_metrics, mismatch_metrics
from services.trainer.core.schedule import OptimizerStepPlan, StepPlan
from services.trainer.ranks.batches import Pack, PackSettings, make_pack
from services.trainer.ranks.by_sample import by_sample, of_pack
from services.trainer.ranks.distillation import make_distillation
from services.trainer.ranks.model.context import context_cut
from services.trainer.ranks.nonfinite import check_finite
from services.trainer.ranks.objective import BY_TOKEN, CORRECTION, MISMATCH, Objective, Work
from services.trainer.ranks.policy import Policy, logits_of, trained_log_probs
from services.trainer.ranks.replay import StepReplay
from services.trainer.ranks.scores import Scorer, Scores
from services.trainer.ranks.statistics import PackStatistics, Reduced, pack_statistics, reduce_statistics
from services.trainer.ranks.timing import PartTimer
from services.trainer.ranks.token_stage import stage_settings, token_stage


class StepTrainer:
    """Trains a policy on steps, beside its companions."""

    def __init__(self, spec: RunSpec, policy: Policy, device: torch.device) -> None:
        self._policy, self._device = policy, device
        self._settings = spec.trainer
        self._supervised = spec.trainer.loss_type == "sft_loss"
        self._packing = PackSettings(
            pad_multiple=spec.trainer.pad_multiple,
            supervised=self._supervised,
            cut=context_cut(),
        )
        self._replay = StepReplay(spec.trainer, policy)
        self._scorer = Scorer(spec.trainer, policy)
        self._objective = Objective(spec.trainer)
        self._stage = stage_settings(spec.trainer)
        self._distillation = make_distillation(spec, policy, device)
        self._options = {"fp32_output": False} if spec.trainer.bf16 else {}

    def train(
        self, samples: Mapping[str, Sample], plan: StepPlan, advantages: Mapping[str, float], timer: PartTimer
    ) -> dict[str, float]:
        """`prepare` and `update` of a step without a critic."""
        return self.update(self.prepare(samples, plan, advantages, {}, timer), timer)

    def prepare(
        self,
        samples: Mapping[str, Sample],
        plan: StepPlan,
        advantages: Mapping[str, float],
        values: Mapping[str, np.ndarray],
        timer: PartTimer,
    ) -> list[list[Work]]:
        """Everything that has to be known before the first update, of this rank's samples, by optimizer step.
        `values`: the critic's, by sample, if there is one."""
        rank = parallel_state.get_data_parallel_rank()
        with timer.part("pack"):
            packs = [
                [self._pack([samples[i] for i in ids], advantages, step) for ids in step.micro_batches[rank]]
                for step in plan.optimizer_steps
            ]
        scores = self._scorer.score(packs, timer)
        if self._distillation is not None:
            scores = self._distillation.add_scores(scores, packs, samples, timer)
        if self._settings.needs_critic:
            scores = [
                [replace(s, values=of_pack(p, values, "the critic")) for p, s in zip(*pair, strict=True)]
                for pair in zip(packs, scores, strict=True)
            ]
        return self._work(packs, scores, timer)

    def update(self, work: list[list[Work]], timer: PartTimer) -> dict[str, float]:
        """Makes every optimizer step; returns metrics equal on all ranks.

        Raises:
            ServiceError: LOSS_NOT_FINITE, GRADIENT_NOT_FINITE: what was wrong is not in the weights.
                CUSTOM_LOSS_FAILED, CUSTOM_CORRECTION_FAILED.
        """
        statistics, norms, rates = [], [], []
        for step in work:
            rates.append(self._policy.next_learning_rate())
            self._policy.zero_grad()
            with timer.part("forward_backward"):
                statistics.append(self._policy.forward_backward(self._forward_step, step))
            with timer.part("optimizer"):
                self._check(step, statistics[-1])
                norms.append(self._policy.update())
        with timer.part("metrics"):  # waits for what the device has not finished
            reduced = reduce_statistics(statistics, parallel_state.get_data_parallel_group())
        self._replay.check([[w.pack for w in step] for step in work])
        metrics = self._metrics(reduced)
        metrics |= self._adapt(metrics, reduced.sums["samples"])
        return metrics | {
            "grad_norm": sum(norms) / len(norms),
            "lr": rates[-1],
            "optimizer_steps": float(len(norms)),
        }

    def _pack(self, samples: Sequence[Sample], advantages: Mapping[str, float], step: OptimizerStepPlan) -> Pack:
        pack = make_pack(samples, advantages, step.loss_weights, self._packing, self._device)
        return self._replay.equip(pack, samples)

    def returns(self, work: list[list[Work]]) -> dict[str, np.ndarray]:
        """What the critic is to be trained on, of this rank's samples; empty without one."""
        found = ((w.pack, w.targets.returns) for step in work for w in step)
        return by_sample((pack, returns) for pack, returns in found if returns is not None)

    def untouched(self, work: list[list[Work]]) -> dict[str, float]:
        """Metrics of a step that updates nothing, equal on all ranks."""
        packs = [w.pack for step in work for w in step]
        counts = [sum(len(pack.rows) for pack in packs), sum(pack.total_tokens for pack in packs)]
        totals = torch.tensor(counts, dtype=torch.float64, device=self._device)
        group = parallel_state.get_data_parallel_group()
        if group.size() > 1:
            dist.all_reduce(totals, group=group)
        trained, total = totals.tolist()
        return {"trained_tokens": trained, "total_tokens": total, "optimizer_steps": 0.0}

    def _coefficient(self, given: float) -> float:
        """A KL's weight at this step: as the run says, 0 for none, or where the controller is."""
        kl = self._policy.beside.kl
        return kl.coef if kl is not None and given else given

    def _adapt(self, metrics: Mapping[str, float], samples: float) -> dict[str, float]:
        """The KL's coefficient follows what was measured on some samples; → metrics of the companions."""
        beside, told = self._policy.beside, {}
        if beside.kl is not None:
            told["kl_coef"] = beside.kl.coef
            beside.kl.update(metrics["kl"], int(samples))
        if beside.reference is not None and beside.ref_update_interval:
            told["reference_step"] = float(beside.reference.step)
        return told

    def _work(self, packs: list[list[Pack]], scores: list[list[Scores]], timer: PartTimer) -> list[list[Work]]:
        """Every pack with what its loss needs, by optimizer step."""
        flat, known = list(itertools.chain(*packs)), list(itertools.chain(*scores))
        group = parallel_state.get_data_parallel_group()
        with timer.part("token_stage"):
            targets = iter(token_stage(flat, known, self._stage, self._coefficient(self._settings.kl_coef), group))
            corrections: Iterator[Correction | None] = itertools.repeat(None)
            if self._settings.tis_batch_normalize and self._objective.corrector:
                generating = [one.trainer if one.kept is None else one.kept for one in known]
                corrections = iter(self._objective.corrector.of_step(flat, generating, group))
        return [
            [Work(p, s, next(targets), index == 0, next(corrections)) for p, s in zip(*pair, strict=True)]
            for index, pair in enumerate(zip(packs, scores, strict=True))
        ]

    def _forward_step(self, iterator: Iterator[Work], model: torch.nn.Module):
        work = next(iterator)
        logits = logits_of(model, work.pack, **self._options)

        def loss_function(output: torch.Tensor):
            loss, statistics = self._loss_of(output, work)
            return loss, work.pack.divisor, statistics

        return logits, loss_function

    def _loss_of(self, logits: torch.Tensor, work: Work) -> tuple[torch.Tensor, PackStatistics]:
        policy = self._policy
        log_probs, entropy = trained_log_probs(logits, work.pack, policy.hf, policy.temperature)
        loss, collected = self._objective(log_probs, entropy, work, self._coefficient(self._settings.kl_loss_coef))
        if self._distillation is not None:
            loss = self._distillation.add_loss(loss, collected, logits, log_probs, work)
        return (loss * work.pack.weights).sum(), pack_statistics(loss, collected, work.pack)

    def _check(self, work: list[Work], statistics: list[PackStatistics]) -> None:
        """Raises LOSS_NOT_FINITE on all ranks."""
        broken = [(w.pack.sample_ids, s.broken) for w, s in zip(work, statistics, strict=True)]
        check_finite(broken, f"The loss of optimizer step {self._policy.optimizer_steps}")

    def _metrics(self, reduced: Reduced) -> dict[str, float]:
        """Means over the optimizer steps; counts, maxima and percentiles over all."""
        sums = reduced.sums
        metrics = {name: reduced.mean(name) for name in reduced.means[0]}
        metrics |= {"trained_tokens": sums["tokens"], "total_tokens": sums["all_tokens"]}
        if self._supervised:
            return metrics
        metrics.setdefault("kl_loss", 0.0)
        tokens, compared = max(sums["tokens"], 1), sums["compared"]
        metrics |= reduced.maxima
        metrics |= {"ppo_kl_first": reduced.means[0]["ppo_kl"], "ratio_mean": sums["ratio"] / tokens}
        if compared:
            metrics["log_prob_diff_mean"] = sums["difference"] / compared
            metrics["log_prob_abs_diff_mean"] = sums["distance"] / compared
            metrics["log_prob_abs_diff_p99"] = reduced.distance_p99
        else:
            del metrics["log_prob_abs_diff_max"]  # of nothing; 0 would say that they agree
        metrics |= {name: total / tokens for name, total in reduced.part(BY_TOKEN).items()}
        metrics |= mismatch_metrics(reduced.part(MISMATCH))
        if self._objective.corrector:
            metrics |= correction_metrics(reduced.part(CORRECTION))
        return metrics
