"""Advantage estimators: one number a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from benchmarks.algorithm_cases import Case, distance
from benchmarks.algorithm_cases.batch import Ragged
from services.trainer.core.algorithms.estimators import ESTIMATORS, EstimatorOptions, ScoredSample

Plain = Callable[[list[np.ndarray]], list[np.ndarray]]
"""Rewards of a group by rollout, float64 → how each is compared."""


def cases() -> Iterator[Case]:
    """Rows of this family. Those of verl leave out what it does not know: samples alone in their group, several samples
    of a rollout, removed and unscored samples."""
    for name in ("grpo", "gspo", "cispo"):
        yield Case(
            "advantages", f"{name}: uneven groups", "verl", _against_verl(name, _verl_grpo(divide=True)), needs="verl"
        )
        yield Case("advantages", f"{name}: uneven groups, fan-out, removed, unscored", "float64", _plain(name, _grpo))
    yield Case("advantages", "grpo without deviation", "float64", _plain("grpo", _centred, divide=False))
    yield Case(
        "advantages", "dr_grpo: uneven groups", "verl", _against_verl("dr_grpo", _verl_grpo(divide=False)), needs="verl"
    )
    yield Case("advantages", "rloo: uneven groups", "verl", _against_verl("rloo", _verl_rloo), needs="verl")
    for name, plain in (("dr_grpo", _centred), ("rloo", _rloo), ("reinforce_plus_plus_baseline", _centred)):
        yield Case("advantages", f"{name}: uneven groups, fan-out, removed, unscored", "float64", _plain(name, plain))
    yield Case("advantages", "remax", "verl", _remax, needs="verl")
    yield Case("advantages", "remax: fan-out, removed, unscored", "float64", _remax_ragged)
    for name in ("ppo", "reinforce_plus_plus"):
        yield Case("advantages", f"{name}: rewards as they are", "float64", _plain(name, lambda rewards: rewards))
    yield Case("advantages", "disable_rewards_normalization", "float64", _plain("grpo", lambda r: r, normalize=False))


def _samples(batch: Ragged, *, ragged: bool, greedy: np.ndarray | None = None) -> list[ScoredSample]:
    """`ragged`: with fan-out, removed and unscored samples."""
    return [
        ScoredSample(
            sample_id=str(i),
            group_id=str(batch.groups[i]),
            reward=float(batch.rewards[i]) if batch.scored[i] or not ragged else None,
            rollout_id=str(batch.rollouts[i]) if ragged else "",
            removed=bool(batch.removed[i]) and ragged,
            greedy=greedy is not None and bool(greedy[i]),
        )
        for i in range(batch.count)
    ]


def _numbers(found: Mapping[str, float], count: int) -> np.ndarray:
    """By sample; far from any advantage where there is none."""
    return np.array([found.get(str(i), 1e9) for i in range(count)])


def _against_verl(name: str, formula: Callable[[torch.Tensor, np.ndarray], torch.Tensor]) -> Callable[[Ragged], float]:
    def error(batch: Ragged) -> float:
        ours = ESTIMATORS[name].sample_advantages(_samples(batch, ragged=False), EstimatorOptions())
        theirs = formula(torch.from_numpy(batch.rewards).double(), batch.groups)
        together = np.array([(batch.groups == group).sum() > 1 for group in batch.groups])
        return distance(_numbers(ours, batch.count)[together], theirs.numpy()[together])

    return error


def _verl_grpo(*, divide: bool) -> Callable[[torch.Tensor, np.ndarray], torch.Tensor]:
    def formula(rewards: torch.Tensor, groups: np.ndarray) -> torch.Tensor:
        from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage as compute

        return compute(rewards[:, None], torch.ones(len(groups), 1), groups, norm_adv_by_std_in_grpo=divide)[0][:, 0]

    return formula


def _verl_rloo(rewards: torch.Tensor, groups: np.ndarray) -> torch.Tensor:
    from verl.trainer.ppo.core_algos import compute_rloo_outcome_advantage as compute

    return compute(rewards[:, None], torch.ones(len(groups), 1), groups)[0][:, 0]


def _plain(name: str, formula: Plain, **options: bool) -> Callable[[Ragged], float]:
    """Against a formula of a group's rollouts: loops over groups, and over rollouts."""

    def error(batch: Ragged) -> float:
        ours = ESTIMATORS[name].sample_advantages(_samples(batch, ragged=True), EstimatorOptions(**options))
        theirs = np.full(batch.count, 1e9)
        for group in set(batch.groups):
            members = (batch.groups == group) & batch.scored
            places = [np.flatnonzero(members & (batch.rollouts == r)) for r in sorted(set(batch.rollouts[members]))]
            compared = formula([batch.rewards[place].astype(np.float64) for place in places])
            for place, values in zip(places, compared, strict=True):
                theirs[place] = np.where(batch.removed[place], 1e9, values)
        return distance(_numbers(ours, batch.count), theirs)

    return error


def _means(rollouts: list[np.ndarray]) -> np.ndarray:
    return np.array([rewards.mean() for rewards in rollouts])


def _centred(rollouts: list[np.ndarray]) -> list[np.ndarray]:
    mean = _means(rollouts).mean() if rollouts else 0.0
    return [rewards - mean for rewards in rollouts]


def _grpo(rollouts: list[np.ndarray]) -> list[np.ndarray]:
    """The variance of a sample drawn by its rollout first, then among its siblings; unbiased in the rollouts."""
    centred, count = _centred(rollouts), len(rollouts)
    if count < 2:
        return centred
    variance = sum((apart * apart).sum() / len(apart) for apart in centred) / count
    return [apart / (np.sqrt(variance * count / (count - 1)) + 1e-6) for apart in centred]


def _rloo(rollouts: list[np.ndarray]) -> list[np.ndarray]:
    if len(rollouts) < 2:
        return [np.zeros(len(rewards)) for rewards in rollouts]
    means = _means(rollouts)
    return [rewards - np.delete(means, i).mean() for i, rewards in enumerate(rollouts)]


def _first(batch: Ragged) -> np.ndarray:
    """The first sample of every group is the greedy one."""
    return np.array([i == np.flatnonzero(batch.groups == group)[0] for i, group in enumerate(batch.groups)])


def _remax(batch: Ragged) -> float:
    greedy = _first(batch)
    ours = ESTIMATORS["remax"].sample_advantages(_samples(batch, ragged=False, greedy=greedy), EstimatorOptions())
    from verl.trainer.ppo.core_algos import compute_remax_outcome_advantage as compute

    rewards = torch.from_numpy(batch.rewards).double()
    baselines = torch.stack([rewards[greedy & (batch.groups == group)][0] for group in batch.groups])
    theirs, _ = compute(rewards[:, None], baselines, torch.ones(batch.count, 1, dtype=torch.float64))
    return distance(_numbers(ours, batch.count), np.where(greedy, 1e9, theirs[:, 0].numpy()))


def _remax_ragged(batch: Ragged) -> float:
    greedy = _first(batch)
    ours = ESTIMATORS["remax"].sample_advantages(_samples(batch, ragged=True, greedy=greedy), EstimatorOptions())
    theirs = np.full(batch.count, 1e9)
    for i in np.flatnonzero(batch.scored & ~batch.removed & ~greedy):
        baseline = greedy & (batch.groups == batch.groups[i]) & batch.scored
        if baseline.any():
            theirs[i] = float(batch.rewards[i]) - float(batch.rewards[baseline][0])
    return distance(_numbers(ours, batch.count), theirs)
