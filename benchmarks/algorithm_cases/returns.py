"""Token rewards, returns, generalized advantages, whitening."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.algorithm_cases import Case, distance
from benchmarks.algorithm_cases.batch import Ragged
from services.trainer.core.algorithms.kl import kl_estimate
from services.trainer.core.algorithms.returns import discounted, gae, token_rewards
from services.trainer.core.algorithms.whitening import moments, whiten

GAMMA, LAMBDA, KL_COEF = 0.97, 0.9, 0.05


def cases() -> Iterator[Case]:
    """Rows of this family."""
    yield Case("returns", "token rewards: KL, and the scalar at the last trained token", "float64", _rewards)
    yield Case("returns", "discounted returns", "float64", _discounted)
    yield Case("returns", "reinforce_plus_plus: returns, whitened", "verl", _reinforce, needs="verl")
    yield Case("returns", "reinforce_plus_plus_baseline: centred, whitened", "verl", _baseline, needs="verl")
    yield Case("returns", "reinforce_plus_plus_baseline: KL by token, whitened", "float64", _baseline_kl)
    yield Case("returns", "ppo: generalized advantages and returns", "float64", _gae)
    yield Case("returns", "ppo: generalized advantages, whitened, and returns", "verl", _gae_verl, needs="verl")
    yield Case("returns", "ppo: generalized advantages of 10000 tokens", "float64", _gae_long, bar=1e-5)
    yield Case("returns", "whitening over parts of a batch", "float64", _whitening)


def _ours(batch: Ragged) -> torch.Tensor:
    kl = kl_estimate(batch.flat(batch.old), batch.flat(batch.reference), "k1")
    return token_rewards(kl, torch.from_numpy(batch.rewards), batch.segments, KL_COEF)


def _theirs(batch: Ragged) -> torch.Tensor:
    """Token rewards of [s, w], float64."""
    rewards = -KL_COEF * (batch.old.double() - batch.reference.double()) * batch.mask
    for sample, places in enumerate(batch.mask):
        if places.any():
            rewards[sample, places.nonzero()[-1]] += float(batch.rewards[sample])
    return rewards


def _whole(values: torch.Tensor) -> torch.Tensor:
    """Whitened as two ranks would."""
    parts = values[: len(values) // 3], values[len(values) // 3 :]
    whole = moments(parts[0]) + moments(parts[1])
    return torch.cat([whiten(part, whole) for part in parts])


def _plain_whitening(values: np.ndarray) -> np.ndarray:
    if len(values) < 2:
        return values - values
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)


def _plain_gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lambd: float) -> np.ndarray:
    advantages, following, carried = np.zeros(len(rewards)), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        carried = rewards[t] + gamma * following - values[t] + gamma * lambd * carried
        advantages[t], following = carried, values[t]
    return advantages


def _rewards(batch: Ragged) -> float:
    return distance(_ours(batch), batch.flat(_theirs(batch)))


def _discounted(batch: Ragged) -> float:
    ours = discounted(_ours(batch), batch.segments, GAMMA)
    rewards = [_plain_gae(row, np.zeros(len(row)), GAMMA, 1.0) for row in batch.rows(_ours(batch))]
    return distance(ours, np.concatenate(rewards))


def _reinforce(batch: Ragged) -> float:
    ours = _whole(discounted(_ours(batch), batch.segments, GAMMA))
    if len(ours) < 2:  # verl refuses those
        return distance(ours, np.zeros(len(ours)))
    from verl.trainer.ppo.core_algos import compute_reinforce_plus_plus_outcome_advantage as formula

    theirs, _ = formula(_theirs(batch), batch.mask.double(), config=SimpleNamespace(gamma=GAMMA))
    return distance(ours, batch.flat(theirs))


def _baseline(batch: Ragged) -> float:
    scalars = _centred(batch)
    ours = _whole(batch.flat(torch.from_numpy(scalars.astype(np.float32))))
    sizes = {group: int((batch.groups == group).sum()) for group in batch.groups}
    if len(ours) < 2 or min(sizes.values()) < 2:  # verl refuses those, and does not centre a sample that is alone
        return distance(ours, _plain_whitening(np.repeat(scalars, batch.trained)))
    from verl.trainer.ppo.core_algos import compute_reinforce_plus_plus_baseline_outcome_advantage as formula

    scores = torch.from_numpy(batch.rewards).double()[:, None] * (torch.arange(batch.mask.shape[1]) == 0)
    theirs, _ = formula(scores, batch.mask.double(), batch.groups)
    return distance(ours, batch.flat(theirs))


def _centred(batch: Ragged) -> np.ndarray:
    rewards = batch.rewards.astype(np.float64)
    return np.array([r - rewards[batch.groups == g].mean() for r, g in zip(rewards, batch.groups, strict=True)])


def _baseline_kl(batch: Ragged) -> float:
    scalars = _centred(batch)
    kl = kl_estimate(batch.flat(batch.old), batch.flat(batch.reference), "k1")
    ours = _whole(batch.flat(torch.from_numpy(scalars.astype(np.float32))) - KL_COEF * kl)
    penalty = batch.flat(batch.old.double() - batch.reference.double()).numpy()
    return distance(ours, _plain_whitening(np.repeat(scalars, batch.trained) - KL_COEF * penalty))


def _gae(batch: Ragged) -> float:
    values = batch.flat(batch.values)
    ours = gae(_ours(batch), values, batch.segments, GAMMA, LAMBDA)
    pairs = zip(batch.rows(_ours(batch)), batch.rows(values), strict=True)
    theirs = np.concatenate([_plain_gae(r, v, GAMMA, LAMBDA) for r, v in pairs])
    return max(distance(ours[0], theirs), distance(ours[1], theirs + values.double().numpy()))


def _gae_verl(batch: Ragged) -> float:
    ours, returns = gae(_ours(batch), batch.flat(batch.values), batch.segments, GAMMA, LAMBDA)
    if len(ours) < 2:  # verl refuses those
        return distance(_whole(ours), np.zeros(len(ours)))
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return as formula

    theirs, theirs_returns = formula(_theirs(batch), batch.values.double(), batch.mask.double(), GAMMA, LAMBDA)
    return max(distance(_whole(ours), batch.flat(theirs)), distance(returns, batch.flat(theirs_returns)))


def _gae_long(batch: Ragged) -> float:
    rng = np.random.default_rng(batch.count)
    rewards, values = rng.normal(0, 1, (2, 10000)).astype(np.float32)
    segments = torch.from_numpy(np.repeat([0, 2], [7000, 3000]))
    ours, _ = gae(torch.from_numpy(rewards), torch.from_numpy(values), segments, 1.0, 0.99)
    parts = [(rewards[a:b].astype(np.float64), values[a:b].astype(np.float64)) for a, b in ((0, 7000), (7000, 10000))]
    return distance(ours, np.concatenate([_plain_gae(r, v, 1.0, 0.99) for r, v in parts]))


def _whitening(batch: Ragged) -> float:
    values = batch.flat(batch.values)
    return distance(_whole(values), _plain_whitening(values.double().numpy()))
