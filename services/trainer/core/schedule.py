"""Micro-batch schedule of a step: which data-parallel rank trains which samples together.

A pure function of sample lengths and settings, so that the controller and every rank agree on it. It knows
nothing of groups (a group may be split over optimizer steps and ranks), tensors or rewards.

Invariants: every sample is in exactly one micro-batch; every rank has the same number of micro-batches in an
optimizer step (ranks meet in collectives); a micro-batch holds at most `max_tokens` tokens, padding included,
unless it is a single sample that is longer by itself. A micro-batch may be empty where there are fewer samples
than ranks: the rank then computes on padding with weight zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.common.errors import Code, ServiceError
from services.common.run_spec.algorithm import Normalizer
from services.trainer.core.algorithms.normalizers import sample_weights


@dataclass(frozen=True)
class SampleSize:
    """What the schedule must know of a sample: all its tokens, and those that are trained (0 when unscored)."""

    sample_id: str
    length: int
    trained_tokens: int
    rollout_id: str = ""
    """Samples of one rollout, which come one after another, stay in one optimizer step; empty: of its own."""
    baseline: bool = False
    """Its reward was all that was wanted of it: no rank gets it."""


@dataclass(frozen=True)
class ScheduleSettings:
    """Shape of the step.

    `optimizer_steps` equal parts; `max_tokens` per micro-batch with dynamic batches, else `micro_batch_size`
    samples; packs are padded to a multiple of `pad_multiple` tokens (tensor and context parallelism split
    the sequence).
    """

    data_parallel_size: int = 1
    optimizer_steps: int = 1
    use_dynamic_batch_size: bool = True
    max_tokens: int = 4096
    micro_batch_size: int = 1
    pad_multiple: int = 1
    normalizer: Normalizer = "sample_mean"
    loss_constant: float | None = None
    """What a token counts in the loss, see `algorithms.normalizers`."""


class LossWeight(NamedTuple):
    """weight: of each trained token of a sample. divisor: what the sample adds to that of the optimizer step."""

    weight: float
    divisor: int


@dataclass(frozen=True)
class OptimizerStepPlan:
    """One optimizer step. `micro_batches[rank][i]` are the ids of the samples of a micro-batch."""

    micro_batches: tuple[tuple[tuple[str, ...], ...], ...]
    sample_count: int
    trained_tokens: int
    loss_weights: Mapping[str, LossWeight]
    """By sample."""


@dataclass(frozen=True)
class StepPlan:
    """All optimizer steps of one rollout batch, in order."""

    optimizer_steps: tuple[OptimizerStepPlan, ...]

    def sample_ids(self, data_parallel_rank: int) -> tuple[str, ...]:
        """All samples of one rank, in order of use."""
        return tuple(
            sample_id
            for step in self.optimizer_steps
            for micro_batch in step.micro_batches[data_parallel_rank]
            for sample_id in micro_batch
        )


def round_up(tokens: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `tokens`."""
    return -(-tokens // multiple) * multiple


def plan_step(samples: Sequence[SampleSize], settings: ScheduleSettings) -> StepPlan:
    """Plan of a batch: consecutive parts of equally many rollouts become optimizer steps, each packed and dealt by
    itself.

    Raises:
        ServiceError: BATCH_NOT_DIVISIBLE when the rollouts do not divide into the optimizer steps, or a step would
            have baselines only.
    """
    steps = settings.optimizer_steps
    keys = [sample.rollout_id or sample.sample_id for sample in samples]
    place = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    rollouts = len(place)
    size = rollouts // steps
    parts: list[list[SampleSize]] = [[] for _ in range(steps)]
    if size * steps == rollouts:
        for sample, key in zip(samples, keys, strict=True):
            if not sample.baseline:
                parts[place[key] // size].append(sample)
    if not all(parts):
        raise ServiceError(
            Code.FAILED_PRECONDITION,
            "BATCH_NOT_DIVISIBLE",
            f"A batch of {rollouts} rollouts does not divide into num_steps_per_rollout {steps} equal parts that have"
            " something to train; choose them by the batch law.",
            rollout_count=rollouts,
            optimizer_steps=steps,
        )
    return StepPlan(tuple(_plan_part(part, settings) for part in parts))


def _plan_part(samples: Sequence[SampleSize], settings: ScheduleSettings) -> OptimizerStepPlan:
    bins = _first_fit(samples, settings) if settings.use_dynamic_batch_size else _chunks(samples, settings)
    if settings.use_dynamic_batch_size and settings.data_parallel_size > 1:
        bins = _evened_out(samples, round_up(len(bins), settings.data_parallel_size), settings) or bins
    _fill_to_multiple(bins, settings.data_parallel_size)
    return OptimizerStepPlan(
        micro_batches=_deal(bins, settings.data_parallel_size),
        sample_count=len(samples),
        trained_tokens=sum(sample.trained_tokens for sample in samples),
        loss_weights=_loss_weights(samples, settings),
    )


def _loss_weights(samples: Sequence[SampleSize], settings: ScheduleSettings) -> dict[str, LossWeight]:
    found = sample_weights(
        [sample.trained_tokens for sample in samples],
        settings.normalizer,
        rollouts=[sample.rollout_id or sample.sample_id for sample in samples],
        constant=settings.loss_constant,
    )
    pairs = zip(found.weights.tolist(), found.counts.tolist(), strict=True)
    return {sample.sample_id: LossWeight(*pair) for sample, pair in zip(samples, pairs, strict=True)}


def _tokens(micro_batch: Sequence[SampleSize]) -> int:
    return sum(sample.length for sample in micro_batch)


def _first_fit(samples: Sequence[SampleSize], settings: ScheduleSettings) -> list[list[SampleSize]]:
    """First-fit decreasing; equal lengths keep their order."""
    bins: list[list[SampleSize]] = []
    loads: list[int] = []
    for sample in sorted(samples, key=lambda s: -s.length):
        for i, load in enumerate(loads):
            if round_up(load + sample.length, settings.pad_multiple) <= settings.max_tokens:
                bins[i].append(sample)
                loads[i] += sample.length
                break
        else:
            bins.append([sample])
            loads.append(sample.length)
    return bins


def _evened_out(samples: Sequence[SampleSize], count: int, settings: ScheduleSettings) -> list[list[SampleSize]] | None:
    """`count` bins of about equal tokens, or None when that breaks the budget: ranks then have equal work."""
    bins: list[list[SampleSize]] = [[] for _ in range(count)]
    loads = [0] * count
    for sample in sorted(samples, key=lambda s: -s.length):
        lightest = loads.index(min(loads))
        bins[lightest].append(sample)
        loads[lightest] += sample.length
    within = all(
        len(content) < 2 or round_up(load, settings.pad_multiple) <= settings.max_tokens
        for content, load in zip(bins, loads, strict=True)
    )
    return bins if within else None


def _chunks(samples: Sequence[SampleSize], settings: ScheduleSettings) -> list[list[SampleSize]]:
    size = settings.micro_batch_size
    return [list(samples[i : i + size]) for i in range(0, len(samples), size)]


def _fill_to_multiple(bins: list[list[SampleSize]], multiple: int) -> None:
    """Splits the largest divisible bins, then adds empty ones, until the count is a multiple."""
    while len(bins) % multiple:
        divisible = [i for i, content in enumerate(bins) if len(content) > 1]
        if not divisible:
            bins.append([])
            continue
        content = bins.pop(max(divisible, key=lambda i: (_tokens(bins[i]), -i)))
        bins.extend(_halves(content))


def _halves(content: list[SampleSize]) -> tuple[list[SampleSize], list[SampleSize]]:
    """Two parts of about equal tokens, each with at least one sample."""
    parts: tuple[list[SampleSize], list[SampleSize]] = ([], [])
    for sample in sorted(content, key=lambda s: -s.length):
        min(parts, key=_tokens).append(sample)
    if not parts[1]:  # only samples without tokens could do that
        parts[1].append(parts[0].pop())
    return parts


def _deal(bins: list[list[SampleSize]], ranks: int) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Equal counts per rank; the heaviest bin left goes to the lightest rank that has room."""
    count = len(bins) // ranks
    dealt: list[list[tuple[str, ...]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for content in sorted(bins, key=lambda c: -_tokens(c)):
        rank = min((r for r in range(ranks) if len(dealt[r]) < count), key=lambda r: (loads[r], r))
        dealt[rank].append(tuple(sample.sample_id for sample in content))
        loads[rank] += _tokens(content)
    return tuple(tuple(rank) for rank in dealt)
