"""Weight groups over gloo, in host memory; `tests/gpu` has these and more scenarios over NCCL."""

from __future__ import annotations

import socket
import threading
import types

import pytest
import torch

from services.trainer.ranks import groups as weight_groups
from tests.support import weight_group_scenarios as scenarios
from tests.support.group_member import spec_of

PLACE = scenarios.Place("gloo", "cpu", "cpu", 64_000_000)
HERE = (
    scenarios.used_again_and_again,
    scenarios.buckets_leave_as_they_are_gathered,
    scenarios.member_killed_in_a_transfer,
    scenarios.member_stopped_in_a_transfer,
    scenarios.member_leaves_after_us,
    scenarios.groups_joined_in_the_opposite_order,
)
"""A few: every member is a process that loads torch."""


@pytest.mark.parametrize("scenario", HERE, ids=lambda scenario: scenario.__name__)
def test_over_gloo(scenario):
    scenario(PLACE)


def test_a_group_that_is_left_while_it_is_joined_is_not_kept(monkeypatch):
    go_on, ended = threading.Event(), threading.Event()

    def slow(*_args, **_kwargs):
        go_on.wait(5)
        return object(), None

    monkeypatch.setattr(weight_groups.distributed_c10d, "_new_process_group_helper", slow)
    monkeypatch.setattr(weight_groups.distributed_c10d, "_world", types.SimpleNamespace(pg_group_ranks={}))
    monkeypatch.setattr(weight_groups.WeightGroups, "_destroy", lambda self, box, nccl: ended.set())
    groups = weight_groups.WeightGroups(torch.device("cpu"))
    spec = spec_of("late", "gloo")
    groups.join([spec], 1.0)
    groups.leave([spec.name])
    assert groups.names == ()
    go_on.set()
    assert ended.wait(5)


def test_what_hinders_a_group_on_our_side_is_told():
    spec = spec_of("taken", "gloo")
    with socket.socket() as other:
        other.bind(("127.0.0.1", spec.master_port))
        other.listen()
        groups = weight_groups.WeightGroups(torch.device("cpu"))
        groups.join([spec], 1.0)
        error = scenarios.ends(groups, [spec.name])[spec.name]
    assert "in use" in error.lower()
    groups.leave_all()
