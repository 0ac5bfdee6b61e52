"""Random batches as ragged as real ones: uneven groups, masks with holes, samples without a trained token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

SEEDS = tuple(range(20))
WIDTH = 200


@dataclass(frozen=True)
class Ragged:
    """A batch of s samples with at most w response tokens, k of them trained.

    Padded, for other libraries: mask bool [s, w]; current, old, reference, engine: log-probs, float32 [s, w]; values,
    old_values: float32 [s, w]. Of samples: rewards float32 [s]; scored, removed: bool [s]; groups, rollouts: str [s].
    Whatever is float32 here can be given to both sides, to one of them as float64.
    """

    mask: torch.Tensor
    current: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor
    engine: torch.Tensor
    values: torch.Tensor
    old_values: torch.Tensor
    rewards: np.ndarray
    scored: np.ndarray
    removed: np.ndarray
    groups: np.ndarray
    rollouts: np.ndarray

    @property
    def count(self) -> int:
        """Samples."""
        return len(self.mask)

    @property
    def segments(self) -> torch.Tensor:
        """Sample of each trained token, int64 [k]."""
        return self.mask.nonzero()[:, 0]

    @property
    def trained(self) -> list[int]:
        """Trained tokens by sample."""
        return self.mask.sum(1).tolist()

    def flat(self, padded: torch.Tensor) -> torch.Tensor:
        """The trained tokens' entries [k] of [s, w], or of one number a sample [s]."""
        if padded.dim() == 1:
            padded = padded[:, None].expand(self.mask.shape)
        return padded[self.mask]

    def padded(self, flat: torch.Tensor) -> torch.Tensor:
        """[k] → [s, w], 0 elsewhere."""
        return torch.zeros(self.mask.shape, dtype=flat.dtype).masked_scatter(self.mask, flat)

    def rows(self, flat: torch.Tensor) -> list[np.ndarray]:
        """[k] by sample, as float64: what references written here loop over."""
        return [part.double().numpy() for part in flat.detach().split(self.trained)]


def ragged(seed: int) -> Ragged:
    """A batch of 1 to 7 groups of 1 to 6 samples each. Seed 0 has no trained token at all, seed 1 a single one."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 7, rng.integers(1, 8)) if seed else np.array([2, 1])
    groups = rng.permutation(np.repeat([f"g{i}" for i in range(len(sizes))], sizes))
    count = len(groups)
    lengths = rng.integers(0, WIDTH + 1, count) * (rng.random(count) > 0.15)
    mask = (np.arange(WIDTH) < lengths[:, None]) & (rng.random((count, WIDTH)) > 0.2) & (rng.random((count, 1)) > 0.1)
    if seed == 1:
        mask[:] = False
        mask[-1, 3] = True
    mask &= bool(seed)
    old = -rng.exponential(1.0, (count, WIDTH))
    noisy = [torch.from_numpy((old + rng.normal(0, scale, old.shape)).astype(np.float32)) for scale in (0.2, 0.4, 0.1)]
    values = rng.normal(0, 1, (2, count, WIDTH)).astype(np.float32)
    return Ragged(
        mask=torch.from_numpy(mask),
        current=noisy[0],
        old=torch.from_numpy(old.astype(np.float32)),
        reference=noisy[1],
        engine=noisy[2],
        values=torch.from_numpy(values[0]),
        old_values=torch.from_numpy(values[1]),
        rewards=rng.normal(0, 1, count).round(1).astype(np.float32),
        scored=rng.random(count) > 0.15,
        removed=rng.random(count) < 0.15,
        groups=groups,
        rollouts=np.array([f"{group}/{rng.integers(3)}" for group in groups]),
    )
