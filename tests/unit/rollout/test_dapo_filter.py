"""Dynamic sampling as DAPO has it: a group is kept when some of its answers are right and some are wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from services.rollout.core.filters import check_reward_nonzero_std


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([0, 0, 0, 0], False),
        ([1, 1, 1, 1], False),
        ([1, 0, 0, 0], True),
        ([-1, 1, 1, 1], True),
        ([0.1, 0.1, 0.1], False),  # whose mean is not 0.1
        ([1, None, 1], False),  # an unscored answer is neither
        ([1, None, 0], True),
        ([None, None], False),
        ([1], False),
    ],
)
def test_groups_that_teach_are_kept(rewards: list[float | None], kept: bool) -> None:
    group = [SimpleNamespace(reward=reward) for reward in rewards]
    verdict = check_reward_nonzero_std(None, group)
    assert verdict["keep"] is kept
    assert bool(verdict["reason"]) is not kept
