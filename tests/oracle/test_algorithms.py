"""Every formula of the trainer beside an independent one: the rows of `benchmarks.algorithms`, on fewer batches."""

from __future__ import annotations

import pytest

from benchmarks.algorithm_cases import Case, cases
from benchmarks.algorithm_cases.batch import SEEDS, ragged

BATCHES = [ragged(seed) for seed in SEEDS[:6]]
ROWS = list(cases())


@pytest.mark.parametrize("case", ROWS, ids=lambda case: f"{case.family}: {case.name} ({case.reference})")
def test_a_formula_equals_its_reference(case: Case) -> None:
    assert case.available, f"{case.needs} is not installed"
    assert max(case.error(batch) for batch in BATCHES) <= case.bar


def test_batches_are_ragged() -> None:
    """Nothing trained, one token, samples without a token, groups of one: each is among the batches."""
    assert [sum(batch.trained) for batch in BATCHES[:2]] == [0, 1]
    assert any(0 in batch.trained for batch in BATCHES[2:])
    assert any(1 in [list(batch.groups).count(group) for group in batch.groups] for batch in BATCHES[2:])
