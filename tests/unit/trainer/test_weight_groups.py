"""Weight groups over gloo, in host memory; `tests/gpu` has these and more scenarios over NCCL."""

from __future__ import annotations

import pytest

from tests.support import weight_group_scenarios as scenarios

PLACE = scenarios.Place("gloo", "cpu", "cpu", 64_000_000)
HERE = (
    scenarios.used_again_and_again,
    scenarios.member_killed_in_a_transfer,
    scenarios.member_stopped_in_a_transfer,
    scenarios.member_leaves_after_us,
)
"""A few: every member is a process that loads torch."""


@pytest.mark.parametrize("scenario", HERE, ids=lambda scenario: scenario.__name__)
def test_over_gloo(scenario):
    scenario(PLACE)
