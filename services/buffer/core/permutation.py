"""Which row a draw from a data set stands for.

Draws are counted: number = epoch × row count + position. Without shuffle the position is the row; with it a
permutation seeded by (seed, epoch) maps one to the other, so any buffer server computes the same answer and every
row comes exactly once an epoch. Memory does not grow with the rows: above `TABLE_ROWS` the permutation is computed
row by row (a Feistel network over the smallest power of two that holds all rows, walked until it lands on a row).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np

TABLE_ROWS = 65_536
_KEPT_EPOCHS = 3
_ROUNDS = 8
_MASK = 2**64 - 1


class RowOrder:
    """Order of drawing over epochs.

    Args:
        row_count: rows of the data set.
        shuffle: whether positions are permuted.
        seed: any integer.
        tables: hold the permutations of any number of rows, as releases before 0.2 did (4 bytes a row).
    """

    def __init__(self, row_count: int, *, shuffle: bool, seed: int, tables: bool = False) -> None:
        if row_count < 1:
            raise ValueError("an order needs at least one row")
        self.row_count = row_count
        self._shuffle = shuffle
        self._seed = seed
        self._tables = tables or row_count <= TABLE_ROWS
        self._permutations: OrderedDict[int, np.ndarray | _Network] = OrderedDict()

    def locate(self, number: int) -> tuple[int, int]:
        """(epoch, row) of a draw."""
        epoch, position = divmod(number, self.row_count)
        return epoch, int(self._permutation(epoch)[position]) if self._shuffle else position

    def locate_epoch(self, number: int) -> int:
        """Epoch of a draw."""
        return number // self.row_count

    def _permutation(self, epoch: int) -> np.ndarray | _Network:
        known = self._permutations.get(epoch)
        if known is None:
            known = self._table(epoch) if self._tables else _Network(self.row_count, self._seed, epoch)
            self._permutations[epoch] = known
            while len(self._permutations) > _KEPT_EPOCHS:
                self._permutations.popitem(last=False)
        else:
            self._permutations.move_to_end(epoch)
        return known

    def _table(self, epoch: int) -> np.ndarray:
        # Philox is counter-based and its stream is fixed by numpy's compatibility policy.
        key = np.array([self._seed % 2**64, epoch], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        return np.argsort(generator.random(self.row_count), kind="stable").astype(np.int32)


class _Network:
    """A permutation of range(size) without a table."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        bits = max(2, (size - 1).bit_length())
        self._size = size
        self._low_bits = bits // 2
        self._masks = ((1 << self._low_bits) - 1, (1 << (bits - self._low_bits)) - 1)
        digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8)]

    def __getitem__(self, position: int) -> int:
        low_mask, high_mask = self._masks
        value = position
        while True:
            low, high = value & low_mask, value >> self._low_bits
            for at in range(0, _ROUNDS, 2):
                low ^= _mix(high + self._keys[at]) & low_mask
                high ^= _mix(low + self._keys[at + 1]) & high_mask
            value = high << self._low_bits | low
            if value < self._size:
                return value


def _mix(value: int) -> int:
    """Finalizer of SplitMix64 (Steele, Lea, Flood 2014): every output bit depends on every input bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
