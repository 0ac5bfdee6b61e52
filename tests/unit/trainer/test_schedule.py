"""The micro-batch schedule's invariants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ServiceError
from services.trainer.core.schedule import SampleSize, ScheduleSettings, plan_step, round_up


def sizes(lengths: list[int]) -> list[SampleSize]:
    return [SampleSize(f"s{i}", n, n // 2) for i, n in enumerate(lengths)]


@given(
    lengths=st.lists(st.integers(2, 200), min_size=1, max_size=40),
    steps=st.integers(1, 4),
    ranks=st.integers(1, 4),
    dynamic=st.booleans(),
    limit=st.integers(16, 300),
    multiple=st.sampled_from([1, 2, 4]),
)
def test_invariants(lengths: list[int], steps: int, ranks: int, dynamic: bool, limit: int, multiple: int) -> None:
    samples = sizes(lengths * steps)
    plan = plan_step(samples, ScheduleSettings(ranks, steps, dynamic, limit, 3, multiple))
    by_id = {sample.sample_id: sample for sample in samples}
    used = [sample_id for rank in range(ranks) for sample_id in plan.sample_ids(rank)]
    assert sorted(used) == sorted(by_id)
    for index, step in enumerate(plan.optimizer_steps):
        part = samples[index * len(lengths) : (index + 1) * len(lengths)]
        ids = {i for rank in step.micro_batches for batch in rank for i in batch}
        assert ids == {sample.sample_id for sample in part}
        assert step.sample_count == len(part)
        assert step.trained_tokens == sum(sample.trained_tokens for sample in part)
        assert len({len(rank) for rank in step.micro_batches}) == 1
        for batch in (batch for rank in step.micro_batches for batch in rank):
            tokens = round_up(sum(by_id[i].length for i in batch), multiple)
            assert len(batch) <= (1 if dynamic and tokens > limit else len(part) if dynamic else 3)


@given(lengths=st.lists(st.integers(2, 60), min_size=2, max_size=40))
def test_same_input_same_plan(lengths: list[int]) -> None:
    settings = ScheduleSettings(data_parallel_size=2, max_tokens=100)
    assert plan_step(sizes(lengths), settings) == plan_step(sizes(lengths), settings)


def test_first_fit_fills_micro_batches() -> None:
    plan = plan_step(sizes([60, 40, 30, 70]), ScheduleSettings(max_tokens=100))
    assert [set(batch) for batch in plan.optimizer_steps[0].micro_batches[0]] == [{"s3", "s2"}, {"s0", "s1"}]


def test_tokens_are_balanced_over_ranks() -> None:
    lengths = [90, 80, 20, 10, 50, 50]
    plan = plan_step(sizes(lengths), ScheduleSettings(data_parallel_size=2, max_tokens=100))
    loads = [sum(lengths[int(i[1:])] for i in plan.sample_ids(rank)) for rank in range(2)]
    assert abs(loads[0] - loads[1]) <= 20


def test_fewer_samples_than_ranks_leaves_an_empty_micro_batch() -> None:
    plan = plan_step(sizes([10]), ScheduleSettings(data_parallel_size=2))
    assert plan.optimizer_steps[0].micro_batches == ((("s0",),), ((),))


@pytest.mark.parametrize("lengths", [[], [5, 5, 5]])
def test_batch_that_does_not_divide_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ServiceError, match="num_steps_per_rollout 2") as refused:
        plan_step(sizes(lengths), ScheduleSettings(optimizer_steps=2))
    assert refused.value.reason == "BATCH_NOT_DIVISIBLE"
