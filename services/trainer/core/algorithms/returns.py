"""Token rewards, discounted returns and generalized advantages over the trained tokens of a pack. Pure torch.

Tokens that are not trained (of tools and environments) are no steps of time: the next value and the discount are
those of the sample's next trained token. Sums are float64 inside, results float32.
"""

from __future__ import annotations

import torch

_CHUNK = 128


def token_rewards(kl: torch.Tensor, scalars: torch.Tensor, segments: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """−kl_coef · KL at every token, plus the sample's scalar at its last trained token, float32 [k].

    A sample without trained tokens drops its scalar. Formula: Ouyang et al., InstructGPT (2022), eq. 2, by token as in
    Ziegler et al. (2019), §2.

    Args:
        kl: estimates by token, float32 [k].
        scalars: one a sample, float32 [count].
        segments: int64 [k], ascending.
    """
    rewards = -kl_coef * kl
    if len(segments):
        last = torch.ones_like(segments, dtype=torch.bool)
        last[:-1] = segments[1:] != segments[:-1]
        rewards = rewards + torch.where(last, scalars[segments], 0.0)
    return rewards


def discounted(rewards: torch.Tensor, segments: torch.Tensor, gamma: float) -> torch.Tensor:
    """Σ over the sample's later tokens j ≥ t of γ^(j − t) · reward_j, float32 [k]; γ in [0, 1]."""
    if not len(rewards):
        return rewards
    row, column = _places(segments)
    table = rewards.new_zeros((int(row[-1]) + 1, int(column.max()) + 1), dtype=torch.float64)
    table[row, column] = rewards.double()
    return _suffix_sums(table, gamma)[row, column].to(rewards.dtype)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, segments: torch.Tensor, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantages and the returns (advantage + value) that values are trained on, each float32 [k].

    δ_t = reward_t + γ·V_{t+1} − V_t with V = 0 after a sample's last trained token; A_t = Σ (γλ)^(j − t) δ_j.
    Formula: Schulman et al., "High-dimensional continuous control using GAE" (2016), eq. 16.
    """
    if not len(rewards):
        return rewards, values
    values64 = values.double()
    following = torch.zeros_like(values64)
    following[:-1] = torch.where(segments[1:] == segments[:-1], values64[1:], 0.0)
    deltas = rewards.double() + gamma * following - values64
    advantages = discounted(deltas, segments, gamma * lambd)
    return advantages.to(rewards.dtype), (advantages + values64).to(rewards.dtype)


def _places(segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every token in a table with one row for each sample that has tokens, int64 [k] each."""
    _, row, lengths = torch.unique_consecutive(segments, return_inverse=True, return_counts=True)
    starts = lengths.cumsum(0) - lengths
    return row, torch.arange(len(segments), device=segments.device) - starts[row]


def _suffix_sums(table: torch.Tensor, gamma: float) -> torch.Tensor:
    """Discounted sums from every column to the end of its row: a matrix product a chunk, and what follows carried."""
    steps = torch.arange(_CHUNK, device=table.device)
    ahead = steps[:, None] - steps[None, :]  # row j, column t: j − t
    within = torch.where(ahead >= 0, torch.tensor(gamma, dtype=table.dtype) ** ahead.clamp(min=0), 0.0)
    sums = torch.empty_like(table)
    carried = table.new_zeros(len(table), 1)
    for start in range((table.shape[1] - 1) // _CHUNK * _CHUNK, -1, -_CHUNK):
        chunk = table[:, start : start + _CHUNK]
        width = chunk.shape[1]
        reach = torch.tensor(gamma, dtype=table.dtype) ** (width - steps[:width])
        sums[:, start : start + width] = chunk @ within[:width, :width] + carried * reach
        carried = sums[:, start : start + 1]
    return sums
