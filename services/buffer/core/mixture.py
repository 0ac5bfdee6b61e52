"""Which data set of a mixture an ordinal is drawn from.

Ordinals are cut into blocks. Within a block every set has a fixed number of places, spread evenly; so the set of
an ordinal, and how many ordinals of that set came before it, follow from the block's numbers alone. Invariants: the
same ordinal gives the same set on every server; shares are exact over every block of a fixed mixture, and off by
less than one draw a set at every block of a changing one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

MOST_PLACES = 10_000
"""Longest block of a fixed mixture: shares are kept to one part in this many."""


@dataclass(frozen=True)
class Block:
    """A block of consecutive ordinals. `starts`: draws of each set before it; `quotas`: places of each set in it."""

    starts: tuple[int, ...]
    quotas: tuple[int, ...]

    def locate(self, offset: int) -> tuple[int, int]:
        """(set, its draws before) of the ordinal at an offset within the block."""
        sets, ranks = pattern(self.quotas)
        part = int(sets[offset])
        return part, self.starts[part] + int(ranks[offset])

    def counts(self, offset: int) -> list[int]:
        """Draws of each set before the ordinal at an offset, from 0 to the size of the block."""
        sets, _ = pattern(self.quotas)
        within = np.bincount(sets[:offset], minlength=len(self.quotas))
        return [start + int(count) for start, count in zip(self.starts, within, strict=True)]


@functools.lru_cache(64)
def pattern(quotas: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(set of every place, places of that set before it), int32, of a block.

    The k-th of n places of a set wants to stand at (k + 1/2) / n of the block; sorting these wishes spreads each set
    evenly. Equal wishes go to the earlier set.
    """
    sets = np.repeat(np.arange(len(quotas), dtype=np.int32), quotas)
    ranks = np.concatenate([np.arange(quota, dtype=np.int32) for quota in quotas])
    wishes = (ranks + 0.5) / np.asarray(quotas)[sets]
    order = np.argsort(wishes, kind="stable")
    return sets[order], ranks[order]


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Places of each set in the shortest block with exactly these shares, or with the nearest ones that fit."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) <= MOST_PLACES:
        return tuple(whole)
    # Every set keeps a place, however small its weight.
    room = MOST_PLACES - sum(weight > 0 for weight in whole)
    shares = deal([room * weight / sum(whole) for weight in whole], room)
    return tuple(share + (weight > 0) for share, weight in zip(shares, whole, strict=True))


def deal(wishes: Sequence[float], places: int) -> list[int]:
    """`places` dealt to sets by largest remainder; a wish below 0 counts as 0. Earlier sets win ties."""
    bounded = [max(0.0, wish) for wish in wishes]
    total = sum(bounded)
    scaled = [wish * places / total for wish in bounded]
    dealt = [math.floor(wish) for wish in scaled]
    remainders = sorted(range(len(dealt)), key=lambda part: dealt[part] - scaled[part])
    for part in remainders[: places - sum(dealt)]:
        dealt[part] += 1
    return dealt


@dataclass(frozen=True)
class FixedMixture:
    """A mixture whose weights stay as they are: one block after the other is the same."""

    quotas: tuple[int, ...]

    @property
    def size(self) -> int:
        """Ordinals of a block."""
        return sum(self.quotas)

    def block(self, index: int) -> Block:
        """A block by its number."""
        return Block(tuple(index * quota for quota in self.quotas), self.quotas)

    def locate(self, ordinal: int) -> tuple[int, int]:
        """(set, its draws before) of an ordinal."""
        index, offset = divmod(ordinal, self.size)
        return self.block(index).locate(offset)

    def counts(self, drawn: int) -> list[int]:
        """Draws of each set among the first `drawn` ordinals."""
        index, offset = divmod(drawn, self.size)
        return self.block(index).counts(offset)


@dataclass(frozen=True)
class DecidedBlock:
    """A block of a changing mixture. `owed`: by how many draws each set is behind its share after it; sums to 0."""

    block: Block
    owed: tuple[float, ...]
    weights: tuple[float, ...]

    def following(self, weights: Sequence[float], size: int) -> DecidedBlock:
        """The next block under new weights (they need not sum to one; at least one is above 0)."""
        starts = tuple(a + b for a, b in zip(self.block.starts, self.block.quotas, strict=True))
        total = sum(weights)
        shares = [weight * size / total for weight in weights]
        # A set whose weight is 0 now is not drawn to settle what it was owed.
        wishes = [
            max(share + owed, 1e-9 * share) if share else 0.0 for share, owed in zip(shares, self.owed, strict=True)
        ]
        quotas = deal(wishes, size)
        owed = tuple(
            share + before - quota if share else before
            for share, before, quota in zip(shares, self.owed, quotas, strict=True)
        )
        return DecidedBlock(Block(starts, tuple(quotas)), owed, tuple(weights))


def before_all(set_count: int) -> DecidedBlock:
    """What comes before the first block: nothing drawn, nothing owed."""
    none = (0,) * set_count
    return DecidedBlock(Block(none, none), (0.0,) * set_count, (0.0,) * set_count)
