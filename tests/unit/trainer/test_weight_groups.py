"""Weight groups over gloo, in host memory; `tests/gpu` has the same scenarios over NCCL."""

from __future__ import annotations

import pytest

from tests.support.weight_group_scenarios import SCENARIOS, Place, bytes_written_just_before_are_the_ones_sent

PLACE = Place("gloo", "cpu", "cpu", 64_000_000)
HERE = [scenario for scenario in SCENARIOS if scenario is not bytes_written_just_before_are_the_ones_sent]
"""A CPU has no streams."""


@pytest.mark.parametrize("scenario", HERE, ids=lambda scenario: scenario.__name__)
def test_over_gloo(scenario):
    scenario(PLACE)
