"""Advantage estimators: from the rewards of a step's samples to one number a sample. Pure numpy; no tokens, no models.

What the number becomes for each token is the estimator's token stage; the ranks do that. Rules that hold for all:

- Groups are told apart by id, whatever their sizes and order.
- A rollout counts once in its group, however many samples it gave: in means with the mean of its scored samples'
  rewards, in the deviation with the mean square of their distances.
- An unscored sample (reward None) is left out of its group's statistics and gets no number.
- A removed sample counts in its group's statistics and gets no number.
- A greedy sample is a baseline (remax): it is in no statistics and gets no number.
- A sample without a number is not trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from services.common.errors import Code, ServiceError
from services.common.import_path import load_function
from services.common.run_spec.algorithm import AlgorithmSettings

STD_EPSILON = 1e-6
CUSTOM_KEY = "custom_advantage_function_path"


@dataclass(frozen=True)
class ScoredSample:
    """Who a sample is and what it got.

    reward: None when it could not be scored. rollout_id: samples with the same one come from one rollout; empty: from
    one of its own. removed: it is not to be trained. greedy: it was decoded greedily, to be a baseline.
    """

    sample_id: str
    group_id: str
    reward: float | None
    rollout_id: str = ""
    removed: bool = False
    greedy: bool = False

    @property
    def rollout(self) -> str:
        """Key of its rollout within its group."""
        return self.rollout_id or f"sample {self.sample_id}"


@dataclass(frozen=True)
class EstimatorOptions:
    """normalize: compare rewards within their group; without, they are taken as they are. divide: also by the group's
    deviation, where the estimator does."""

    normalize: bool = True
    divide: bool = True


SampleAdvantages = Callable[[Sequence[ScoredSample], EstimatorOptions], Mapping[str, float]]


@dataclass(frozen=True)
class Estimator:
    """sample_advantages: number by sample id. policy_loss: the loss it is made for.

    token_stage: broadcast: every token gets the sample's number. returns: discounted sums of token rewards, of which
    the number is the last. baseline_kl: the number minus the weighted KL of the token. gae: as returns, with values.
    """

    sample_advantages: SampleAdvantages
    policy_loss: Literal["clip", "gspo", "cispo"] = "clip"
    token_stage: Literal["broadcast", "returns", "baseline_kl", "gae"] = "broadcast"


def group_advantages(samples: Sequence[ScoredSample], *, normalize_std: bool = True) -> dict[str, float]:
    """GRPO: (reward − group mean) / (group standard deviation + 1e-6), with the unbiased deviation.

    The deviation is that of what it divides: of the samples' own rewards around the mean, those of one rollout counting
    as one together. A group with a single scored rollout is not divided. Formula: Shao et al., DeepSeekMath (2024),
    §4.1.2. Without the division: Liu et al., "Understanding R1-Zero-like training" (Dr. GRPO, 2025), §3.2.

    Returns:
        Advantage by sample id.
    """
    advantages: dict[str, float] = {}
    for members in _groups(samples).values():
        rollouts = _by_rollout(members)
        rewards = np.array([value for values in rollouts.values() for value in values])
        # The mean of equal numbers may be off by a rounding; their advantages are exactly 0.
        mean = float(np.mean(_means(rollouts)) if np.ptp(rewards) else rewards[0])
        scale = _deviation(rollouts, mean) + STD_EPSILON if normalize_std and len(rollouts) > 1 else 1.0
        advantages |= {name: (reward - mean) / scale for name, reward in _trained(members)}
    return advantages


def leave_one_out(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """RLOO: reward − mean reward of the group's other rollouts; 0 where there is no other.

    Formula: Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!" (2019); Ahmadian et al., "Back to basics"
    (2024), §3.3.
    """
    advantages: dict[str, float] = {}
    for members in _groups(samples).values():
        rollouts = _by_rollout(members)
        rewards = dict(zip(rollouts, _means(rollouts), strict=True))
        rollout = {member.sample_id: member.rollout for member in members}
        for name, reward in _trained(members):
            others = [value for key, value in rewards.items() if key != rollout[name]]
            advantages[name] = reward - math.fsum(others) / len(others) if others else 0.0
    return advantages


def greedy_baseline(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """ReMax: reward − reward of the group's greedy sample (mean, if its rollout gave several). A group without a scored
    greedy sample has no numbers.

    Formula: Li et al., "ReMax: a simple, effective, and efficient RL method for aligning LLMs" (2024), §4.
    """
    baselines: dict[str, list[float]] = {}
    for sample in samples:
        if sample.greedy and sample.reward is not None:
            baselines.setdefault(sample.group_id, []).append(sample.reward)
    advantages: dict[str, float] = {}
    for group, members in _groups(samples).items():
        if found := baselines.get(group):
            advantages |= {name: reward - math.fsum(found) / len(found) for name, reward in _trained(members)}
    return advantages


def raw_rewards(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """The rewards as they are (PPO, REINFORCE++): what they are compared with comes with the tokens."""
    return dict(pair for members in _groups(samples).values() for pair in _trained(members))


def _groups(samples: Sequence[ScoredSample]) -> dict[str, list[ScoredSample]]:
    """What counts of every group: its scored samples that are no baseline."""
    groups: dict[str, list[ScoredSample]] = {}
    for sample in samples:
        if sample.reward is not None and not sample.greedy:
            groups.setdefault(sample.group_id, []).append(sample)
    return groups


def _reward(member: ScoredSample) -> float:
    """Reward of a member of a group: all of them are scored."""
    assert member.reward is not None
    return member.reward


def _by_rollout(members: Sequence[ScoredSample]) -> dict[str, list[float]]:
    """Rewards of a group by rollout."""
    rewards: dict[str, list[float]] = {}
    for member in members:
        rewards.setdefault(member.rollout, []).append(_reward(member))
    return rewards


def _means(rollouts: Mapping[str, Sequence[float]]) -> list[float]:
    """Mean reward of every rollout."""
    return [math.fsum(rewards) / len(rewards) for rewards in rollouts.values()]


def _deviation(rollouts: Mapping[str, Sequence[float]], mean: float) -> float:
    """Unbiased deviation of two rollouts' rewards or more around their mean, each weighted 1 / siblings."""
    squares = [np.mean((np.array(rewards) - mean) ** 2) for rewards in rollouts.values()]
    return float(np.sqrt(np.sum(squares) / (len(squares) - 1)))


def _trained(members: Sequence[ScoredSample]) -> list[tuple[str, float]]:
    """Id and reward of the members that are trained."""
    return [(member.sample_id, _reward(member)) for member in members if not member.removed]


def _normalizing(function: Callable[[Sequence[ScoredSample]], dict[str, float]]) -> SampleAdvantages:
    """An estimator that compares, unless rewards are to be taken as they are."""
    return lambda samples, options: function(samples) if options.normalize else raw_rewards(samples)


def _grpo(samples: Sequence[ScoredSample], options: EstimatorOptions) -> dict[str, float]:
    if not options.normalize:
        return raw_rewards(samples)
    return group_advantages(samples, normalize_std=options.divide)


def _centred(samples: Sequence[ScoredSample]) -> dict[str, float]:
    return group_advantages(samples, normalize_std=False)


def _raw(samples: Sequence[ScoredSample], options: EstimatorOptions) -> dict[str, float]:
    return raw_rewards(samples)


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": Estimator(_grpo),
    "dr_grpo": Estimator(_normalizing(_centred)),
    "gspo": Estimator(_grpo, policy_loss="gspo"),
    "cispo": Estimator(_grpo, policy_loss="cispo"),
    "rloo": Estimator(_normalizing(leave_one_out)),
    "remax": Estimator(_normalizing(greedy_baseline)),
    "reinforce_plus_plus": Estimator(_raw, token_stage="returns"),
    "reinforce_plus_plus_baseline": Estimator(_normalizing(_centred), token_stage="baseline_kl"),
    "ppo": Estimator(_raw, token_stage="gae"),
}
"""By name, as in a run file; custom is resolved by `estimator`."""


def estimator(settings: AlgorithmSettings) -> Estimator:
    """The run's estimator. Raises FUNCTION_NOT_LOADABLE for a custom function that cannot be imported.

    A custom function is called as function(samples, settings), with all samples of a step as a list of ScoredSample
    and the run's settings, and returns the advantage of each sample that is to be trained, by sample id. Every token
    of a sample gets its advantage; the loss clips.
    """
    path = settings.custom_advantage_function_path
    if path is None:
        return ESTIMATORS[settings.advantage_estimator]
    function = load_function(path, CUSTOM_KEY, "the trainer")
    return Estimator(lambda samples, _: _custom(function, path, samples, settings))


def advantages_of(samples: Sequence[ScoredSample], settings: AlgorithmSettings) -> dict[str, float]:
    """The numbers of a step's samples with the run's estimator, by sample id."""
    options = EstimatorOptions(
        normalize=not settings.disable_rewards_normalization, divide=not settings.disable_grpo_std_normalization
    )
    return dict(estimator(settings).sample_advantages(samples, options))


def _custom(
    function: Callable[..., Any], path: str, samples: Sequence[ScoredSample], settings: AlgorithmSettings
) -> dict[str, float]:
    """What a user's function says, checked. Raises CUSTOM_ADVANTAGE_FAILED."""
    try:
        said = function(list(samples), settings)
        found = {str(name): float(value) for name, value in said.items()}
    except Exception as error:
        raise _custom_failed(path, f"raised {type(error).__name__}: {error}") from error
    usable = {name for members in _groups(samples).values() for name, _ in _trained(members)}
    if foreign := sorted(found.keys() - usable):
        why = f"gave an advantage to {foreign[0]!r}, which is no sample of the step or not one that is trained"
        raise _custom_failed(path, why)
    if broken := sorted(name for name, value in found.items() if not math.isfinite(value)):
        raise _custom_failed(path, f"gave sample {broken[0]!r} the advantage {found[broken[0]]}")
    return found


def _custom_failed(path: str, why: str) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "CUSTOM_ADVANTAGE_FAILED",
        f"{CUSTOM_KEY} {path!r} {why}. It must return a finite advantage by sample id.",
        path=path,
    )


def zero_share(advantages: Mapping[str, float]) -> float:
    """Share of samples whose advantage is 0: they teach nothing."""
    return float(np.mean([value == 0 for value in advantages.values()])) if advantages else 0.0
