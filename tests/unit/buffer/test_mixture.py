"""Which data set an ordinal is drawn from: exact shares, even spread, the same on every server."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.buffer.core import permutation
from services.buffer.core.mixture import MOST_PLACES, FixedMixture, before_all, deal, pattern, whole_weights
from services.buffer.core.permutation import TABLE_ROWS, RowOrder

WEIGHTS = st.lists(st.floats(0.001, 1000), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([1], (1,)),
        ([0.5, 0.25, 0.25], (2, 1, 1)),
        ([7, 2, 1.0], (7, 2, 1)),
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([30, 10], (3, 1)),
        ([1.0, 1e-9], (MOST_PLACES - 1, 1)),
    ],
)
def test_weights_become_places(weights, whole):
    assert whole_weights(weights) == whole


@given(WEIGHTS, st.integers(0, 10**12))
@settings(max_examples=60, deadline=None)
def test_every_ordinal_is_one_draw_of_one_set(weights, start):
    mixture = FixedMixture(whole_weights(weights))
    assert all(mixture.quotas)
    counts = mixture.counts(start)
    assert sum(counts) == start
    for ordinal in range(start, start + 50):
        part, number = mixture.locate(ordinal)
        assert number == counts[part]
        counts[part] += 1
    assert mixture.counts(start + 50) == counts


@given(WEIGHTS)
@settings(max_examples=30, deadline=None)
def test_shares_are_exact_over_a_block_and_close_on_the_way(weights):
    quotas = whole_weights(weights)
    mixture = FixedMixture(quotas)
    assert mixture.counts(7 * mixture.size) == [7 * quota for quota in quotas]
    sets, ranks = pattern(quotas)
    for part, quota in enumerate(quotas):
        places = (sets == part).nonzero()[0]
        assert ranks[places].tolist() == list(range(quota))
        # The k-th of a set stands within one turn of all sets of where an even spread would put it.
        wished = (ranks[places] + 0.5) / quota * mixture.size
        assert abs(places - wished).max() <= len(quotas)


def test_the_pattern_is_fixed_for_all_time():
    assert "".join("abc"[part] for part in pattern((5, 2, 1))[0]) == "abaacaba"


@given(st.lists(WEIGHTS.filter(lambda w: len(w) >= 3).map(lambda w: w[:3]), min_size=1, max_size=40), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_changing_weights_owe_no_set_more_than_a_draw(blocks, size):
    decided, shares = before_all(3), [0.0, 0.0, 0.0]
    for index, weights in enumerate(blocks):
        decided = decided.following(weights, size)
        shares = [share + weight * size / sum(weights) for share, weight in zip(shares, weights, strict=True)]
        assert sum(decided.block.starts) == index * size
        assert sum(decided.block.quotas) == size
        assert min(decided.block.quotas) >= 0
        drawn = decided.block.counts(size)
        for share, count, owed in zip(shares, drawn, decided.owed, strict=True):
            assert share - count == pytest.approx(owed, abs=1e-6)
            assert abs(owed) < 2


def test_a_set_without_weight_is_not_drawn():
    decided = before_all(3).following([1, 1, 1], 4).following([0, 1, 0], 4)
    assert decided.block.quotas == (0, 4, 0)
    assert deal([0.5, 0.5, 1.0], 2) == [1, 0, 1]


@pytest.mark.parametrize("rows", [17, 1000, 4096, 4097, 20_000])
def test_a_shuffle_without_a_table_draws_every_row_once(rows, monkeypatch):
    monkeypatch.setattr(permutation, "TABLE_ROWS", 16)
    order = RowOrder(rows, shuffle=True, seed=7)
    drawn = [order.locate(rows + position)[1] for position in range(rows)]
    assert len(set(drawn)) == rows
    assert (min(drawn), max(drawn)) == (0, rows - 1)
    if rows < 1000:
        return
    # Neighbours are as far apart as in a random order (a third of the rows on average).
    distance = sum(abs(a - b) for a, b in itertools.pairwise(drawn)) / rows / rows
    assert 0.31 < distance < 0.36
    other = RowOrder(rows, shuffle=True, seed=8)
    assert sum(other.locate(rows + position)[1] == row for position, row in enumerate(drawn)) < 20


def test_a_shuffle_without_a_table_is_fixed_for_all_time():
    order = RowOrder(1_000_000_000, shuffle=True, seed=42)
    assert [order.locate(position)[1] for position in range(4)] == [961085084, 656390314, 32207894, 180657109]
    assert order.locate(3_000_000_005)[0] == 3
    # Runs of earlier releases go on with their tables.
    old = RowOrder(TABLE_ROWS + 1, shuffle=True, seed=42, tables=True)
    assert old.locate(0)[1] != RowOrder(TABLE_ROWS + 1, shuffle=True, seed=42).locate(0)[1]
