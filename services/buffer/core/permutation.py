"""Which row an ordinal stands for.

Ordinals count draws: ordinal = epoch × row count + position. Without shuffle the position is the row; with it
a permutation seeded by (seed, epoch) maps one to the other, so any buffer server computes the same answer and
every row comes exactly once an epoch.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

_KEPT_EPOCHS = 3


class RowOrder:
    """Order of drawing over epochs. Holds at most three permutations: 4 bytes a row each."""

    def __init__(self, row_count: int, *, shuffle: bool, seed: int) -> None:
        if row_count < 1:
            raise ValueError("an order needs at least one row")
        self.row_count = row_count
        self._shuffle = shuffle
        self._seed = seed
        self._permutations: OrderedDict[int, np.ndarray] = OrderedDict()

    def locate(self, ordinal: int) -> tuple[int, int]:
        """(epoch, row) of an ordinal."""
        epoch, position = divmod(ordinal, self.row_count)
        return epoch, int(self._permutation(epoch)[position]) if self._shuffle else position

    def _permutation(self, epoch: int) -> np.ndarray:
        known = self._permutations.get(epoch)
        if known is None:
            # Philox is counter-based and its stream is fixed by numpy's compatibility policy.
            key = np.array([self._seed % 2**64, epoch], np.uint64)
            generator = np.random.Generator(np.random.Philox(key=key))
            known = np.argsort(generator.random(self.row_count), kind="stable").astype(np.int32)
            self._permutations[epoch] = known
            while len(self._permutations) > _KEPT_EPOCHS:
                self._permutations.popitem(last=False)
        else:
            self._permutations.move_to_end(epoch)
        return known
