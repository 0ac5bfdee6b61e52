"""Learning rates by optimizer step."""

from __future__ import annotations

import pytest

from services.trainer.core.learning_rate import learning_rate


def rates(style: str, *, warmup: int = 0, total: int = 4, minimum: float = 0.0) -> list[float]:
    return [
        learning_rate(step, peak=1.0, minimum=minimum, warmup=warmup, total=total, style=style)
        for step in range(total + 1)
    ]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert rates("constant", warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_decays_end_at_the_minimum() -> None:
    assert rates("linear", minimum=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates("cosine", minimum=0.2) == pytest.approx([1.0, 0.8828427, 0.6, 0.3171573, 0.2])
    beyond = learning_rate(9, peak=1.0, minimum=0.2, warmup=0, total=4, style="linear")
    assert beyond == pytest.approx(0.2)
