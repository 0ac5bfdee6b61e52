"""Weight groups over gloo, in host memory; `tests/gpu` has these and more scenarios over NCCL."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from services.trainer.core.commands import GroupSpec
from services.trainer.ranks import groups as weight_groups
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


def test_a_group_that_is_joined_too_late_is_not_kept(monkeypatch):
    monkeypatch.setattr(weight_groups, "_GRACE_SECONDS", 0.1)
    go_on, joined = threading.Event(), threading.Event()

    def slow(self, spec, timeout):
        go_on.wait(5)
        joined.set()
        return object()

    monkeypatch.setattr(weight_groups.WeightGroups, "_new_group", slow)
    groups = weight_groups.WeightGroups(torch.device("cpu"))
    (error,) = groups.join([GroupSpec("late", "gloo", "127.0.0.1", 9, 2)], 0.1).values()
    assert "did not come back" in error
    go_on.set()
    assert joined.wait(5)
    time.sleep(0.05)  # its thread ends
    assert groups.names == ()
