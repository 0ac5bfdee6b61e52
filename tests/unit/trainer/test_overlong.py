"""The soft over-long penalty: its shape, where it acts, and what it must not touch."""

from __future__ import annotations

import pytest

from services.common.records import SampleStatus
from services.common.run_spec import RunSpec
from services.trainer.core.algorithms.overlong import overlong_penalty
from services.trainer.core.batches import schedule_settings, step_inputs
from services.trainer.core.records import Batch, SampleHeader


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0), (80, 0), (81, -0.1), (90, -1.0), (99, -1.9), (100, -2.0), (130, -2.0)]
)
def test_falls_linearly_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 100, 20, 2.0) == pytest.approx(penalty)


def run(reward: dict, **trainer: object) -> RunSpec:
    rollout = {
        "hf_checkpoint": "m",
        "num_rollout": 1,
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 100,
    }
    return RunSpec.model_validate(
        {"data": {"label_key": "l"}, "rollout": rollout, "reward": reward, "trainer": trainer}
    )


def batch(lengths: list[int], rewards: list[float | None]) -> Batch:
    samples = tuple(
        SampleHeader(f"s{i}", "g", 5, length, length, reward, 1, 1, SampleStatus.COMPLETED, index=i)
        for i, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    )
    return Batch(samples, 1, 0, 1)


def test_lowers_the_reward_that_advantages_are_made_of_and_no_other() -> None:
    spec = run({"overlong_buffer_len": 20, "overlong_penalty_factor": 0.5}, disable_grpo_std_normalization=True)
    inputs = step_inputs(batch([10, 90, 100, 50], [1.0, 1.0, 1.0, None]), spec, schedule_settings(spec, 1))
    assert inputs.advantages == pytest.approx({"s0": 0.25, "s1": 0.0, "s2": -0.25})
    assert inputs.metrics["reward_mean"] == 1
    assert inputs.metrics["reward_std"] == 0
    assert inputs.metrics["overlong_penalty_mean"] == pytest.approx(-0.25)


def test_without_a_buffer_lengths_do_not_matter() -> None:
    spec = run({})
    inputs = step_inputs(batch([10, 90, 100, 50], [1.0, 1.0, 1.0, None]), spec, schedule_settings(spec, 1))
    assert set(inputs.advantages.values()) == {0.0}
    assert "overlong_penalty_mean" not in inputs.metrics


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="overlong_buffer_len 101 is more than rollout_max_response_len 100"):
        run({"overlong_buffer_len": 101})
    with pytest.raises(ValueError, match=r"overlong_penalty_factor 0\.5 has no effect without overlong_buffer_len"):
        run({"overlong_penalty_factor": 0.5})
    with pytest.raises(ValueError, match="loss_type sft_loss has none; leave it out"):
        run({"overlong_buffer_len": 10}, loss_type="sft_loss")
