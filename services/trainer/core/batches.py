"""From a manifest to what the ranks need: advantages, the micro-batch plan, and the batch's own metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.common.records import SampleStatus
from services.common.run_spec import RunSpec
from services.trainer.core.algorithms.estimators import ScoredSample, advantages_of, zero_share
from services.trainer.core.algorithms.overlong import with_overlong_penalty
from services.trainer.core.commands import TrainResult
from services.trainer.core.critic import critic_spec, data_parallel_size
from services.trainer.core.records import Batch, NodeView, SampleHeader
from services.trainer.core.schedule import SampleSize, ScheduleSettings, StepPlan, plan_step


@dataclass(frozen=True)
class StepInputs:
    """What a step trains. `advantages` is empty for supervised runs; a sample without one is not trained. critic_plan:
    the same samples dealt to the critic's ranks, when there is one."""

    plan: StepPlan
    advantages: Mapping[str, float]
    metrics: Mapping[str, float]
    critic_plan: StepPlan | None = None


def schedule_settings(spec: RunSpec, data_parallel_size: int) -> ScheduleSettings:
    """Shape of every step of a run."""
    trainer = spec.trainer
    return ScheduleSettings(
        data_parallel_size=data_parallel_size,
        optimizer_steps=trainer.num_steps_per_rollout,
        use_dynamic_batch_size=trainer.use_dynamic_batch_size,
        max_tokens=trainer.micro_batch_tokens,
        micro_batch_size=trainer.micro_batch_size,
        pad_multiple=trainer.pad_multiple,
        normalizer=trainer.normalizer,
        loss_constant=trainer.loss_constant or spec.rollout.rollout_max_response_len,
    )


def step_inputs(batch: Batch, spec: RunSpec, settings: ScheduleSettings) -> StepInputs:
    """Plan and advantages of a batch. Raises BATCH_NOT_DIVISIBLE, CUSTOM_ADVANTAGE_FAILED."""
    supervised = spec.trainer.loss_type == "sft_loss"
    scored = [] if supervised else scored_samples(batch.samples, greedy_first=spec.trainer.needs_greedy_sample)
    shaped = _shaped(scored, batch.samples, spec)
    advantages = advantages_of(shaped, spec.trainer) if shaped else {}
    greedy = {sample.sample_id for sample in scored if sample.greedy}
    sizes = [
        SampleSize(
            sample_id=sample.sample_id,
            length=sample.length,
            trained_tokens=sample.trained_token_count if supervised or sample.sample_id in advantages else 0,
            rollout_id=sample.rollout_id,
            baseline=sample.sample_id in greedy,
        )
        for sample in batch.samples
    ]
    metrics = sample_metrics(batch.samples)
    if not supervised:
        metrics |= reward_metrics(scored, advantages) | staleness_metrics(batch)
    if not supervised and spec.reward.overlong_buffer_len:
        pairs = [(s.reward, r.reward) for s, r in zip(shaped, scored, strict=True)]
        penalties = [after - before for after, before in pairs if after is not None and before is not None]
        metrics["overlong_penalty_mean"] = _mean(penalties)
    critic_plan = None
    if spec.trainer.needs_critic:
        critic = critic_spec(spec)
        critic_plan = plan_step(sizes, schedule_settings(critic, data_parallel_size(critic)))
    return StepInputs(plan_step(sizes, settings), advantages, metrics, critic_plan)


def scored_samples(samples: Sequence[SampleHeader], *, greedy_first: bool) -> list[ScoredSample]:
    """Samples as estimators see them. `greedy_first`: the first rollout of every group is a greedy baseline."""
    return [
        ScoredSample(
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            reward=sample.reward,
            rollout_id=sample.rollout_id,
            # Generate functions take a sample out by its mask; one that made no token has nothing to train either.
            removed=sample.trained_token_count == 0,
            greedy=greedy_first and sample.rollout == 0,
        )
        for sample in samples
    ]


def _shaped(scored: list[ScoredSample], samples: Sequence[SampleHeader], spec: RunSpec) -> list[ScoredSample]:
    """Samples with what the run adds to rewards."""
    buffer, factor = spec.reward.overlong_buffer_len, spec.reward.overlong_penalty_factor
    if buffer is None:
        return scored
    lengths = {sample.sample_id: sample.response_length for sample in samples}
    return with_overlong_penalty(scored, lengths, spec.rollout.rollout_max_response_len, buffer, factor)


def sample_metrics(samples: Sequence[SampleHeader]) -> dict[str, float]:
    """Count and lengths of the samples of a batch."""
    lengths = [sample.response_length for sample in samples]
    return {
        "sample_count": float(len(samples)),
        "prompt_length_mean": _mean([sample.prompt_length for sample in samples]),
        "response_length_mean": _mean(lengths),
        "response_length_max": float(max(lengths, default=0)),
    }


def reward_metrics(samples: Sequence[ScoredSample], advantages: Mapping[str, float]) -> dict[str, float]:
    """Rewards of scored samples, greedy baselines apart."""
    rewards = [sample.reward for sample in samples if sample.reward is not None and not sample.greedy]
    baselines = [sample.reward for sample in samples if sample.reward is not None and sample.greedy]
    metrics = {
        "reward_mean": _mean(rewards),
        "reward_std": float(np.std(rewards)) if rewards else 0.0,
        "unscored_count": float(sum(sample.reward is None for sample in samples)),
        "removed_count": float(sum(sample.removed for sample in samples)),
        "zero_advantage_fraction": zero_share(advantages),
    }
    return metrics | ({"greedy_reward_mean": _mean(baselines)} if baselines else {})


def staleness_metrics(batch: Batch) -> dict[str, float]:
    """How the samples were made: cut ones, and by which versions."""
    samples, lags = batch.samples, _lags(batch.samples, batch.policy_version)
    return {
        "truncated_fraction": _mean([sample.status is SampleStatus.TRUNCATED for sample in samples]),
        "staleness_mean": _mean(lags),
        "staleness_max": float(max(lags, default=0)),
        "mixed_version_fraction": _mean([sample.min_version != sample.max_version for sample in samples]),
        "stale_group_count": float(batch.stale_group_count),
        "ready_group_count": float(batch.ready_group_count),
    }


def _lags(samples: Sequence[SampleHeader], policy_version: int) -> list[int]:
    """Published versions minus oldest version; a sample newer than what is published lags by 0."""
    return [max(policy_version - sample.min_version, 0) for sample in samples]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def train_metrics(results: Sequence[TrainResult]) -> dict[str, float]:
    """Rank 0's metrics, and the slowest rank's seconds as `train_<part>_seconds`."""
    parts = sorted({part for result in results for part in result.seconds})
    seconds = {f"train_{part}_seconds": max(result.seconds.get(part, 0.0) for result in results) for part in parts}
    return dict(results[0].metrics) | seconds


_NODE_COUNTERS = (
    "finished_group_count",
    "generated_token_count",
    "idle_seconds",
    "generate_seconds",
    "score_seconds",
)


class NodeDeltas:
    """What the rollout nodes did between two looks: `rollout_<counter>`, summed over nodes."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, float]] = {}

    def look(self, nodes: Sequence[NodeView]) -> dict[str, float]:
        """Growth of the counters since the last look; a node that restarted counts from 0 again."""
        totals = dict.fromkeys(_NODE_COUNTERS, 0.0)
        seen: dict[str, dict[str, float]] = {}
        for node in nodes:
            now = {name: float(getattr(node, name)) for name in _NODE_COUNTERS}
            seen[node.node_id] = now
            before = self._last.get(node.node_id)
            if before is None:
                continue  # what it did before we first saw it belongs to no step
            for name in _NODE_COUNTERS:
                grown = now[name] - before[name]
                totals[name] += grown if grown >= 0 else now[name]
        self._last |= seen
        return {f"rollout_{name}": value for name, value in totals.items()} if nodes else {}
