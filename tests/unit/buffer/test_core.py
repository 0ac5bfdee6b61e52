"""Ids, order of rows, plans, waiting, checks of groups."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tetrarch.buffer.v1 import buffer_service_pb2 as pb

from services.buffer.core import ids
from services.buffer.core.groups import SampleShape, group_problem, oldest_version
from services.buffer.core.permutation import RowOrder
from services.buffer.core.plan import fixed_differences, make_plan
from services.buffer.core.waiting import Changes
from services.buffer.pack import pack_groups
from services.common.errors import ServiceError
from services.common.run_spec import RunSpec


def spec(**groups) -> RunSpec:
    rollout = {
        "hf_checkpoint": "m",
        "num_rollout": 10,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
    } | groups.pop("rollout", {})
    return RunSpec.model_validate({"rollout": rollout, **groups})


@given(st.integers(1, 300), st.integers(-5, 2**70), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_every_epoch_draws_every_row_once(rows, seed, epoch):
    order = RowOrder(rows, shuffle=True, seed=seed)
    drawn = [order.locate(epoch * rows + position) for position in range(rows)]
    assert {row for _, row in drawn} == set(range(rows))
    assert {number for number, _ in drawn} == {epoch}
    again = RowOrder(rows, shuffle=True, seed=seed)
    assert again.locate(epoch * rows) == drawn[0]


def test_epochs_and_seeds_differ_and_the_order_is_fixed_for_all_time():
    order = RowOrder(50, shuffle=True, seed=42)
    epochs = [tuple(order.locate(epoch * 50 + i)[1] for i in range(50)) for epoch in range(5)]
    assert len(set(epochs)) == 5
    # A run that goes on with another release must draw the same rows.
    assert epochs[0][:6] == (46, 11, 7, 12, 44, 27)
    assert tuple(RowOrder(50, shuffle=True, seed=43).locate(i)[1] for i in range(50)) != epochs[0]
    assert RowOrder(50, shuffle=False, seed=42).locate(103) == (2, 3)


def test_ids_say_what_they_belong_to():
    group = ids.group_id("run-1", 17)
    assert ids.parse_group_id("run-1", group) == 17
    assert ids.parse_sample_id("run-1", ids.sample_id(group, 3)) == (17, 3)
    assert ids.parse_lease_id("17.2.0") == ids.LeaseId("17.2.0", 17, 2, 0)
    assert ids.parse_lease_id("17.2") is None
    for text in ("run-17", "run-1-x", "other-17", ""):
        with pytest.raises(ServiceError, match="No group"):
            ids.parse_group_id("run-1", text)
    with pytest.raises(ServiceError, match="not stored"):
        ids.parse_sample_id("run-1", group)
    for name in ("", "-a", "a b", "x" * 65, "a/b"):
        with pytest.raises(ServiceError, match="run_id"):
            ids.check_run_id(name)


def test_a_plan_holds_what_the_buffer_acts_on():
    plan = make_plan(spec(data={"num_epoch": 3}, trainer={"max_staleness": 2}))
    assert (plan.batch, plan.samples, plan.steps, plan.max_staleness, plan.saves) == (4, 2, 10, 2, False)
    assert plan.draw_limit(7) == 21
    assert make_plan(spec()).draw_limit(7) == -1
    with pytest.raises(ServiceError, match="async_buffer_size is 3: it is below rollout_batch_size 4"):
        make_plan(spec(data={"async_buffer_size": 3}))


def test_differences_name_only_what_may_not_change():
    old = spec().model_dump_json()
    changed = spec(rollout={"num_rollout": 99, "lease_ttl": 5}, services={"buffer": "a:1"}).model_dump_json()
    assert fixed_differences(old, changed) == []
    other = json.loads(old)
    other["reward"]["rm_type"] = "math"
    other["data"]["extra"] = 1
    assert fixed_differences(old, json.dumps(other)) == [
        "data.extra (None → 1)",
        "reward.rm_type ('exact_match' → 'math')",
    ]


async def test_waiting_ends_at_a_change_or_at_the_deadline():
    changes, answers = Changes(), [0]

    async def attempt() -> int:
        return answers[0]

    started = time.monotonic()
    assert await changes.until("r", 0.0, attempt, bool) == 0
    assert await changes.until("r", 0.05, attempt, bool) == 0
    assert time.monotonic() - started < 1
    waiting = asyncio.create_task(changes.until("r", 30, attempt, bool))
    await asyncio.sleep(0.01)
    answers[0] = 7
    changes.notify("r")
    assert await asyncio.wait_for(waiting, 0.15) == 7  # sooner than the poll


def shape(**changes) -> SampleShape:
    return replace(SampleShape("r-3-0", "r-3", 0, 2, 6, 4, 4, ((5, 0, 1), (6, 1, 4))), **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"spans": ()}, ""),
        ({"token_count": 2, "mask_count": 0, "log_prob_count": 0, "spans": ()}, ""),
        ({"prompt_length": 0}, "prompt_length 0 does not fit 6"),
        ({"prompt_length": 7}, "prompt_length 7 does not fit 6"),
        ({"mask_count": 5}, "loss_mask has 5 entries for 4"),
        ({"log_prob_count": 3}, "log_probs has 3 entries for 4"),
        ({"spans": ((5, 0, 3),)}, "do not cover its 4"),
        ({"spans": ((5, 0, 2), (6, 3, 4))}, "do not cover its 4"),
        ({"index": 1}, "stands at position 0"),
        ({"sample_id": "r-3-1"}, "where r-3-0 belongs"),
        ({"group_id": "r-4"}, "stands at position 0"),
    ],
)
def test_what_is_wrong_with_a_sample_is_said(changes, words):
    problem = group_problem("r", "r-3", 3, [shape(**changes)], 1)
    assert (words in problem) if words else problem == ""


def test_what_is_wrong_with_a_group_is_said():
    assert "does not belong to ordinal 4" in group_problem("r", "r-3", 4, [shape()], 1)
    assert "n_samples_per_prompt of the run is 2" in group_problem("r", "r-3", 3, [shape()], 2)
    assert oldest_version([shape(), shape(spans=())]) == 5
    assert oldest_version([shape(spans=())]) is None


def test_a_rollout_may_give_several_samples():
    def group(*rollouts):
        samples = [
            shape(index=index, sample_id=f"r-3-{index}", rollout=rollout) for index, rollout in enumerate(rollouts)
        ]
        return group_problem("r", "r-3", 3, samples, 2)

    assert group(0, 1) == group(0, 0, 0, 1) == group(0, 1, 1) == ""
    assert "samples of 1 rollouts" in group(0, 0)
    assert "numbers its samples' rollouts [0, 1, 0]" in group(0, 1, 0)
    assert "numbers its samples' rollouts [1, 2]" in group(1, 2)


def test_a_message_with_wrong_tensors_is_refused_without_failing_the_request():
    item = pb.LeasedGroup(lease_id="3.1.0")
    item.group.group_id, item.group.ordinal = "r-3", 3
    sample = item.group.samples.add(sample_id="r-3-0", group_id="r-3", status=1, prompt_length=1)
    sample.tokens.data, sample.tokens.data_type = b"\0" * 7, 3
    sample.tokens.shape.append(2)
    (result,) = pack_groups([item], "r", 1)
    assert result.outcome.value == "INVALID"
    assert "tokens has 7 bytes in shape [2]; it must be int32" in result.message
    sample.ClearField("status")
    assert "set status" in pack_groups([item], "r", 1)[0].message
