"""One batch, however it is laid out over micro-batches and ranks, gives the same gradients: `benchmarks.invariance`.

Real Megatron in gloo processes, one world of one rank and one of two, float32.
"""

from __future__ import annotations

import pytest

from benchmarks.invariance import measure
from benchmarks.invariance_ranks import LAYOUTS
from benchmarks.report import Figure

ALGORITHMS = ("grpo", "gspo", "whitening", "rollout_mean", "dr_grpo", "uncorrected", "tis")
WORLDS = (1, 2)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> list[Figure]:
    return measure(tmp_path_factory.mktemp("invariance"), WORLDS, ALGORITHMS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_do_not_depend_on_the_layout(figures: list[Figure], algorithm: str) -> None:
    own = {figure.name: figure for figure in figures if figure.name.startswith(f"{algorithm}: ")}
    layouts = [name for world in WORLDS for name in LAYOUTS[world]]
    assert {f"{algorithm}: {name}" for name in layouts[1:]} <= own.keys()
    assert {name: figure.value for name, figure in own.items() if not figure.passed} == {}
