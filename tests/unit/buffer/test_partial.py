"""What fits into an answer with unfinished groups, and which unfinished groups are refused."""

from __future__ import annotations

import numpy as np
import pytest

from services.buffer.core import partial
from services.buffer.core.groups import SampleShape, partial_problem
from services.buffer.core.records import Grant, PartialKey, PromptLease, StoredGroup
from services.common.records import Prompt


class Shares:
    """A store with one share a lease; remembers what was released."""

    def __init__(self, size: int) -> None:
        self.size, self.released = size, []

    async def partials(self, run_id, grants):
        return [StoredGroup(b"", (bytes(self.size),)) if grant.partial else None for grant in grants]

    async def release(self, run_id, leases, reason, partials=None):
        self.released.append((reason, [lease.ordinal for lease in leases]))
        return len(leases), []


def lease(ordinal: int, *, begun: bool = True) -> PromptLease:
    prompt = Prompt(f"r-{ordinal}", ordinal, 0, ordinal, "1", "", np.zeros(1, np.int32))
    return PromptLease(Grant(f"{ordinal}.1.0", ordinal, 0, 0, PartialKey("t", 1) if begun else None), prompt)


@pytest.mark.parametrize(("size", "given"), [(10, 4), (3 << 20, 2), (20 << 20, 1)])
async def test_what_does_not_fit_is_taken_back_unharmed(size, given):
    store = Shares(size)
    leases = await partial.with_partials(store, "r", [lease(at) for at in range(4)])
    assert [item.grant.ordinal for item in leases] == list(range(given))
    assert all(item.partial for item in leases)
    assert store.released == ([("UNDO", list(range(given, 4)))] if given < 4 else [])


async def test_prompts_without_a_share_cost_nothing():
    store = Shares(9 << 20)
    leases = await partial.with_partials(store, "r", [lease(0, begun=False), lease(1, begun=False)])
    assert [item.partial for item in leases] == [None, None]
    assert not store.released


def shape(index: int, **changes) -> SampleShape:
    values = {
        "sample_id": f"r-7-{index}", "group_id": "r-7", "index": index, "prompt_length": 2, "token_count": 5,
        "mask_count": 3, "log_prob_count": 3, "spans": ((1, 0, 3),),
    }  # fmt: skip
    return SampleShape(**(values | changes))


def test_any_of_the_samples_may_be_there_in_order_and_whole():
    assert partial_problem("r", "r-7", 7, [shape(1), shape(3)], 4) == ""
    assert partial_problem("r", "r-7", 7, [], 4) == ""
    assert "does not belong" in partial_problem("r", "r-8", 7, [], 4)
    for wrong in ([shape(3), shape(1)], [shape(1), shape(1)], [shape(4)], [shape(0, sample_id="x")]):
        assert "has no place" in partial_problem("r", "r-7", 7, wrong, 4)
    assert "log_probs has 2 entries" in partial_problem("r", "r-7", 7, [shape(0, log_prob_count=2)], 4)
