"""The critic's half of a step: values of a batch, and training on the returns that the actor made with them.

The packs and their values are kept from the one to the other: what a value is trained from is what advantages were
taken against. Everything else is the policy's: packs, weights of tokens, divisor, optimizer, statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from megatron.core import parallel_state

from services.common.fault_points import reach
from services.common.records import Sample
from services.common.run_spec import RunSpec
from services.trainer.core.algorithms.value_loss import explained_variance, value_sums, value_terms
from services.trainer.core.schedule import StepPlan
from services.trainer.ranks.batches import Pack, PackSettings, make_pack
from services.trainer.ranks.by_sample import by_sample, of_pack
from services.trainer.ranks.model.context import context_cut
from services.trainer.ranks.nonfinite import check_finite
from services.trainer.ranks.policy import Policy, logits_of
from services.trainer.ranks.statistics import Collected, Reduced, pack_statistics, reduce_statistics
from services.trainer.ranks.timing import PartTimer


@dataclass(frozen=True)
class _Valued:
    """A pack, the values of its trained tokens before the step, and what they should have been, each float32 [k]."""

    pack: Pack
    values: torch.Tensor
    returns: torch.Tensor | None = None


class CriticTrainer:
    """Trains a critic; `policy` is its model with its optimizer."""

    def __init__(self, spec: RunSpec, policy: Policy, device: torch.device) -> None:
        self._policy, self._device, self._clip = policy, device, spec.trainer.value_clip
        self._packing = PackSettings(
            pad_multiple=spec.trainer.pad_multiple,
            supervised=False,
            cut=context_cut(),
        )
        self._valued: list[list[_Valued]] = []

    def values(
        self, samples: Mapping[str, Sample], plan: StepPlan, advantages: Mapping[str, float], timer: PartTimer
    ) -> dict[str, np.ndarray]:
        """Values of this rank's samples before every trained token, float32 [trained tokens] by sample; empty on ranks
        that share theirs with another."""
        rank = parallel_state.get_data_parallel_rank()
        with timer.part("pack"):
            packs = [
                [
                    make_pack([samples[i] for i in ids], advantages, step.loss_weights, self._packing, self._device)
                    for ids in step.micro_batches[rank]
                ]
                for step in plan.optimizer_steps
            ]
        with timer.part("values"), torch.no_grad():
            self._valued = [
                [_Valued(pack, self._values_of(self._policy.model, pack)) for pack in step] for step in packs
            ]
        return by_sample((one.pack, one.values) for step in self._valued for one in step)

    def train(self, returns: Mapping[str, np.ndarray], timer: PartTimer) -> dict[str, float]:
        """Makes every optimizer step on the batch that was valued; returns metrics equal on all ranks.

        Raises:
            ServiceError: LOSS_NOT_FINITE, GRADIENT_NOT_FINITE, NUMBERS_INCOMPLETE.
        """
        work = [
            [replace(one, returns=of_pack(one.pack, returns, "the actor's returns")) for one in step]
            for step in self._valued
        ]
        self._valued = []
        statistics, norms, rates = [], [], []
        for step in work:
            rates.append(self._policy.next_learning_rate())
            self._policy.zero_grad()
            with timer.part("forward_backward"):
                statistics.append(self._policy.forward_backward(self._forward_step, step))
            with timer.part("optimizer"):
                broken = [(one.pack.sample_ids, s.broken) for one, s in zip(step, statistics[-1], strict=True)]
                check_finite(broken, f"The critic's loss of optimizer step {self._policy.optimizer_steps}")
                reach("critic.before_optimizer")
                norms.append(self._policy.update())
        with timer.part("metrics"):
            reduced = reduce_statistics(statistics, parallel_state.get_data_parallel_group())
        return _metrics(reduced) | {"critic_grad_norm": sum(norms) / len(norms), "critic_lr": rates[-1]}

    def _values_of(self, model: torch.nn.Module, pack: Pack) -> torch.Tensor:
        """float32 [k] of the whole pack."""
        (values,) = pack.layout.all_rows(logits_of(model, pack)[:, 0])
        return values

    def _forward_step(self, iterator: Iterator[_Valued], model: torch.nn.Module):
        one = next(iterator)
        values = self._values_of(model, one.pack)

        def loss_function(output: torch.Tensor):
            assert one.returns is not None
            loss, clipped = value_terms(output, one.values, one.returns, self._clip)
            collected = Collected({"clipped": clipped}, value_sums(one.values, one.returns))
            return (loss * one.pack.weights).sum(), one.pack.divisor, pack_statistics(loss, collected, one.pack)

        return values, loss_function


def _metrics(reduced: Reduced) -> dict[str, float]:
    sums = reduced.sums
    tokens = max(sums["tokens"], 1)
    return {
        "value_loss": reduced.mean("loss"),
        "value_clipfrac": reduced.mean("clipped"),
        "explained_variance": explained_variance(sums),
        "value_mean": (sums["returns"] - sums["errors"]) / tokens,
        "return_mean": sums["returns"] / tokens,
    }
