"""One step: samples of this rank in, weights updated, metrics out.

Every optimizer step runs its micro-batches through megatron's schedule, which sums gradients, reduces them over the
data-parallel ranks and divides by the step's count (samples, or trained tokens). Metrics use the same weights and the
same divisor, and are gathered as one tensor at the end of the step, so nothing waits for the device in between.

Old log-probs: with one optimizer step they are the current ones, so the ratio is exactly 1. With several, those of
later optimizer steps are computed before the first update. With `use_rollout_logprobs` they are the engine's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func

from services.common.records import Sample
from services.common.run_spec import RunSpec, TrainerSettings
from services.trainer.core.algorithms.kl import kl_estimate
from services.trainer.core.algorithms.policy_losses import PolicyLossSettings, policy_terms
from services.trainer.core.schedule import StepPlan
from services.trainer.ranks.batches import Pack, PackSettings, make_pack
from services.trainer.ranks.model.context import context_cut
from services.trainer.ranks.policy import Policy, evaluate_log_probs, logits_of, trained_log_probs

_MEANS = ("loss", "pg_loss", "kl_loss", "entropy", "ppo_kl", "pg_clipfrac")
_SUMS = (*_MEANS, "count", "tokens", "ratio", "compared", "difference", "distance", "all_tokens")
_MAXIMA = ("ratio_max", "log_prob_abs_diff_max")
_HIGH = 0.99


@dataclass(frozen=True)
class _Work:
    """A pack with the log-probs it is compared to; None: the current ones, and no reference."""

    pack: Pack
    old: torch.Tensor | None
    reference: torch.Tensor | None
    before_update: bool


class PartTimer:
    """Seconds by part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time inside to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def loss_settings(settings: TrainerSettings) -> PolicyLossSettings:
    """The formula's settings out of the run's."""
    high = settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high
    kind = settings.advantage_estimator
    return PolicyLossSettings(
        eps_low=settings.eps_clip,
        eps_high=high,
        kind="gspo" if kind == "gspo" else "cispo" if kind == "cispo" else "clip",
        dual_clip=settings.eps_clip_c,
    )


class StepTrainer:
    """Trains a policy on steps. `reference` is the frozen model of the KL term, or None without one."""

    def __init__(self, spec: RunSpec, policy: Policy, reference: GPTModel | None, device: torch.device) -> None:
        self._policy, self._reference, self._device = policy, reference, device
        self._settings = spec.trainer
        self._loss = loss_settings(spec.trainer)
        self._supervised = spec.trainer.loss_type == "sft_loss"
        self._packing = PackSettings(
            per_token=spec.trainer.calculate_per_token_loss,
            pad_multiple=spec.trainer.pad_multiple,
            supervised=self._supervised,
            cut=context_cut(),
        )
        self._options = {"fp32_output": False} if spec.trainer.bf16 else {}

    def train(
        self, samples: Mapping[str, Sample], plan: StepPlan, advantages: Mapping[str, float], timer: PartTimer
    ) -> dict[str, float]:
        """Makes every optimizer step of the plan with this rank's samples; returns metrics equal on all ranks."""
        rank = parallel_state.get_data_parallel_rank()
        with timer.part("pack"):
            packs = [
                [
                    make_pack([samples[i] for i in ids], advantages, self._packing, self._device)
                    for ids in step.micro_batches[rank]
                ]
                for step in plan.optimizer_steps
            ]
        work = self._compare(packs, timer)
        statistics, norms, rates = [], [], []
        for step in work:
            rates.append(self._policy.next_learning_rate())
            self._policy.zero_grad()
            with timer.part("forward_backward"):
                statistics.append(self._forward_backward(step))
            with timer.part("optimizer"):
                norms.append(self._policy.update())
        with timer.part("metrics"):  # waits for what the device has not finished
            metrics = self._reduce(statistics)
        metrics |= {
            "grad_norm": sum(norms) / len(norms),
            "lr": rates[-1],
            "optimizer_steps": float(len(norms)),
        }
        return metrics

    def _compare(self, packs: list[list[Pack]], timer: PartTimer) -> list[list[_Work]]:
        """Adds old and reference log-probs, before any update."""
        policy, work = self._policy, []
        for index, step in enumerate(packs):
            old: list[torch.Tensor | None] = [None] * len(step)
            reference: list[torch.Tensor | None] = [None] * len(step)
            if not self._supervised:
                if self._settings.use_rollout_logprobs:
                    old = [pack.engine_log_probs for pack in step]
                elif index > 0:
                    with timer.part("old_log_probs"):
                        old = evaluate_log_probs(policy.model, step, policy.hf, policy.temperature)
                if self._reference is not None:
                    with timer.part("ref_log_probs"):
                        reference = evaluate_log_probs(self._reference, step, policy.hf, policy.temperature)
            work.append([_Work(p, o, r, index == 0) for p, o, r in zip(step, old, reference, strict=True)])
        return work

    def _forward_backward(self, work: list[_Work]) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of one optimizer step; returns this rank's statistics, and |trainer − engine| by trained token."""
        outputs = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter(work),
            model=self._policy.wrapped,
            num_microbatches=len(work),
            seq_length=1,  # of pipelines with a fixed length; ours is variable
            micro_batch_size=1,
            forward_only=False,
        )
        sums = torch.stack([output["sums"] for output in outputs]).sum(0)
        maxima = torch.stack([output["maxima"] for output in outputs]).amax(0)
        return torch.cat([sums, maxima]), torch.cat([output["distances"] for output in outputs])

    def _forward_step(self, iterator: Iterator[_Work], model: torch.nn.Module):
        work = next(iterator)
        logits = logits_of(model, work.pack, **self._options)

        def loss_function(output: torch.Tensor):
            loss, statistics = self._loss_of(output, work)
            return loss, work.pack.divisor, statistics

        return logits, loss_function

    def _loss_of(self, logits: torch.Tensor, work: _Work) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        pack, policy = work.pack, self._policy
        log_probs, entropy = trained_log_probs(logits, pack, policy.hf, policy.temperature)
        if self._settings.entropy_coef == 0 or self._supervised:
            entropy = entropy.detach()
        if self._supervised:
            terms = {"loss": -log_probs, "entropy": entropy}
            ratio, before = torch.ones_like(log_probs), None
        else:
            terms, ratio = self._policy_terms(log_probs, entropy, work)
            before = self._before_updates(log_probs, work)
        loss = (terms["loss"] * pack.weights).sum()
        return loss, _statistics(terms, pack, ratio.detach(), before)

    def _before_updates(self, log_probs: torch.Tensor, work: _Work) -> torch.Tensor | None:
        """The trainer's own log-probs with the weights that generated, None where nothing computes them."""
        if work.before_update:
            return log_probs.detach()
        return None if self._settings.use_rollout_logprobs else work.old

    def _policy_terms(self, log_probs: torch.Tensor, entropy: torch.Tensor, work: _Work):
        settings, pack = self._settings, work.pack
        old = log_probs.detach() if work.old is None else work.old
        policy = policy_terms(log_probs, old, pack.advantages, self._loss, pack.segments, pack.sample_count)
        terms = {
            "loss": policy.objective,
            "pg_loss": policy.objective,
            "entropy": entropy,
            "ppo_kl": policy.log_ratio,
            "pg_clipfrac": policy.clipped,
        }
        if settings.entropy_coef:
            terms["loss"] = terms["loss"] - settings.entropy_coef * entropy
        if work.reference is not None:
            terms["kl_loss"] = kl_estimate(log_probs, work.reference, settings.kl_loss_type)
            terms["loss"] = terms["loss"] + settings.kl_loss_coef * terms["kl_loss"]
        return terms, policy.ratio

    def _reduce(self, statistics: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
        """Means over the optimizer steps; counts, maxima and percentiles over all."""
        table = torch.stack([numbers for numbers, _ in statistics])
        sums, maxima = table[:, : len(_SUMS)].contiguous(), table[:, len(_SUMS) :].amax(0)
        group = parallel_state.get_data_parallel_group()
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        rows = [dict(zip(_SUMS, row, strict=True)) for row in sums.tolist()]
        metrics = {name: sum(row[name] / max(row["count"], 1) for row in rows) / len(rows) for name in _MEANS}
        total = {name: sum(row[name] for row in rows) for name in _SUMS}
        metrics |= {"trained_tokens": total["tokens"], "total_tokens": total["all_tokens"]}
        if self._supervised:
            return {name: metrics[name] for name in ("loss", "entropy", "trained_tokens", "total_tokens")}
        tokens, compared = max(total["tokens"], 1), max(total["compared"], 1)
        metrics["ppo_kl_first"] = rows[0]["ppo_kl"] / max(rows[0]["count"], 1)
        metrics["ratio_mean"] = total["ratio"] / tokens
        metrics["log_prob_diff_mean"] = total["difference"] / compared
        metrics["log_prob_abs_diff_mean"] = total["distance"] / compared
        metrics["log_prob_abs_diff_p99"] = percentile(torch.cat([d for _, d in statistics]), _HIGH, group)
        return metrics | dict(zip(_MAXIMA, maxima.tolist(), strict=True))


def percentile(values: torch.Tensor, share: float, group: dist.ProcessGroup) -> float:
    """Smallest value that at least `share` of all values do not exceed, over every rank of a group; 0 without values.

    values: [n] with an n of each rank's own, none below 0.
    """
    if group.size() > 1:
        most = torch.tensor([len(values)], device=values.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        padded = torch.nn.functional.pad(values, (0, int(most) - len(values)), value=-1.0)
        gathered = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(gathered, padded, group=group)
        values = torch.cat(gathered)
        values = values[~(values < 0)]  # a NaN stays
    if not len(values):
        return 0.0
    return values.sort().values[math.ceil(share * len(values)) - 1].item()


@torch.no_grad()
def _statistics(
    terms: dict[str, torch.Tensor], pack: Pack, ratio: torch.Tensor, before: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """sums in the order of _SUMS and maxima in the order of _MAXIMA, float64; distances to the engine's log-probs,
    float32 [k]."""
    zero = torch.zeros((), dtype=torch.float64, device=ratio.device)
    sums = [(terms[name] * pack.weights).sum().double() if name in terms else zero for name in _MEANS]
    difference = ratio[:0] if before is None else before - pack.engine_log_probs
    distances = difference.abs()
    sums += [zero + n for n in (pack.count, len(ratio))]
    sums += [ratio.sum(dtype=torch.float64), zero + len(difference)]
    sums += [x.sum(dtype=torch.float64) for x in (difference, distances)]
    sums.append(zero + pack.total_tokens)
    maxima = [x.amax().double() if len(x) else zero for x in (ratio, distances)]
    return {"sums": torch.stack(sums), "maxima": torch.stack(maxima), "distances": distances}
