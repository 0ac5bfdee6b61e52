"""From the manifest of a step to advantages and plan: what is compared, what is trained, what counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.common.errors import ServiceError
from services.common.records import SampleStatus
from services.common.run_spec import RunSpec
from services.trainer.core.algorithms.estimators import ScoredSample
from services.trainer.core.batches import StepInputs, schedule_settings, step_inputs
from services.trainer.core.records import Batch, SampleHeader


def header(group: str, index: int, reward: float | None, **changes) -> SampleHeader:
    base = SampleHeader(f"{group}-{index}", group, 3, 5, 4, reward, 1, 1, SampleStatus.COMPLETED, index)
    return replace(base, **changes)


def inputs(samples: list[SampleHeader], **trainer) -> StepInputs:
    rollout = {"hf_checkpoint": "m", "num_rollout": 1, "rollout_batch_size": 2, "n_samples_per_prompt": 2}
    spec = RunSpec.model_validate({"rollout": rollout, "trainer": trainer, "data": {"label_key": "label"}})
    return step_inputs(Batch(tuple(samples), 0, 0, 1), spec, schedule_settings(spec, 1))


def planned(made: StepInputs, step: int = 0) -> set[str]:
    return set(made.plan.optimizer_steps[step].loss_weights)


def test_groups_of_any_size_are_compared_within_themselves() -> None:
    samples = [header("g", 0, 1.0), header("g", 1, 0.0), header("h", 0, 5.0), header("h", 1, 7.0), header("h", 2, 9.0)]
    made = inputs(samples, disable_grpo_std_normalization=True)
    assert made.advantages == {"g-0": 0.5, "g-1": -0.5, "h-0": -2.0, "h-1": 0.0, "h-2": 2.0}


def test_a_rollout_of_several_samples_counts_once() -> None:
    samples = [header("g", i, 1.0, rollout_index=0) for i in range(3)] + [header("g", 3, 0.0, rollout_index=1)]
    made = inputs(samples, advantage_estimator="dr_grpo")
    assert made.advantages == {"g-0": 0.5, "g-1": 0.5, "g-2": 0.5, "g-3": -0.5}
    made = inputs(samples, loss_normalizer="rollout_mean")
    weights = made.plan.optimizer_steps[0].loss_weights
    assert weights["g-0"].weight == weights["g-2"].weight == pytest.approx(1 / 12)
    assert weights["g-3"].weight == pytest.approx(1 / 4)
    assert sum(weight.divisor for weight in weights.values()) == 2


def test_a_rollout_is_not_split_over_optimizer_steps() -> None:
    samples = [header("g", i, float(i), rollout_index=0) for i in range(3)] + [header("g", 3, 0.0, rollout_index=1)]
    made = inputs(samples, num_steps_per_rollout=2, global_batch_size=2)
    assert planned(made, 0) == {"g-0", "g-1", "g-2"}
    assert planned(made, 1) == {"g-3"}


def test_unscored_samples_are_neither_compared_nor_trained() -> None:
    made = inputs([header("g", 0, 1.0), header("g", 1, None), header("g", 2, 0.0)], advantage_estimator="dr_grpo")
    assert made.advantages == {"g-0": 0.5, "g-2": -0.5}
    assert made.plan.optimizer_steps[0].trained_tokens == 8
    assert made.metrics["unscored_count"] == 1


def test_removed_samples_are_compared_but_not_trained() -> None:
    samples = [header("g", 0, 1.0), header("g", 1, 0.0, trained_token_count=0)]
    made = inputs(samples, advantage_estimator="dr_grpo")
    assert made.advantages == {"g-0": 0.5}
    assert made.metrics["removed_count"] == 1
    assert made.metrics["reward_mean"] == 0.5
    assert planned(made) == {"g-0", "g-1"}


def test_remax_compares_with_the_first_rollout_and_gives_it_to_no_rank() -> None:
    samples = [header("g", 0, 0.25), header("g", 1, 1.0), header("h", 0, 2.0), header("h", 1, 1.0)]
    made = inputs(samples, advantage_estimator="remax")
    assert made.advantages == {"g-1": 0.75, "h-1": -1.0}
    assert planned(made) == {"g-1", "h-1"}
    assert made.metrics["reward_mean"] == 1.0
    assert made.metrics["greedy_reward_mean"] == 1.125


def test_a_group_without_a_scored_baseline_is_not_trained() -> None:
    samples = [header("g", 0, None), header("g", 1, 1.0), header("h", 0, 2.0), header("h", 1, 1.0)]
    made = inputs(samples, advantage_estimator="remax")
    assert made.advantages == {"h-1": -1.0}
    assert made.plan.optimizer_steps[0].trained_tokens == 4


@pytest.mark.parametrize("steps", [1, 2])
def test_as_many_steps_as_the_rules_allow_have_something_to_train(steps: int) -> None:
    samples = [header(group, index, 1.0) for group in "gh" for index in range(2)]
    made = inputs(samples, advantage_estimator="remax", num_steps_per_rollout=steps)
    assert [step.sample_count for step in made.plan.optimizer_steps] == [2 // steps] * steps


def test_an_optimizer_step_of_baselines_only_is_refused() -> None:
    samples = [header(group, index, 1.0) for index in range(2) for group in "gh"]
    with pytest.raises(ServiceError, match="something to train") as refused:
        inputs(samples, advantage_estimator="remax", num_steps_per_rollout=2)
    assert refused.value.reason == "BATCH_NOT_DIVISIBLE"


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_rewards_are_taken_as_they_are_where_tokens_are_compared(estimator: str) -> None:
    samples = [header("g", 0, 1.0), header("g", 1, None), header("h", 0, 3.0), header("h", 1, 1.0)]
    normal = {"normalize_advantages": True} if estimator != "ppo" else {}
    made = inputs(samples, advantage_estimator=estimator, **normal)
    assert made.advantages == {"g-0": 1.0, "h-0": 3.0, "h-1": 1.0}


def test_rewards_are_not_normalized_on_demand() -> None:
    made = inputs([header("g", 0, 1.0), header("g", 1, 0.0)], disable_rewards_normalization=True)
    assert made.advantages == {"g-0": 1.0, "g-1": 0.0}


def test_supervised_steps_train_every_sample() -> None:
    made = inputs([header("g", 0, 0.0), header("h", 0, 0.0)], loss_type="sft_loss")
    assert made.advantages == {}
    assert made.plan.optimizer_steps[0].trained_tokens == 8
    assert "reward_mean" not in made.metrics


def lengths_matter(samples: list[ScoredSample], settings) -> dict[str, float]:
    assert settings.advantage_estimator == "custom"
    return {sample.sample_id: 2 * sample.reward for sample in samples if sample.reward}


def names_a_stranger(samples, settings):
    return {"nobody": 1.0}


def is_no_number(samples, settings):
    return {samples[0].sample_id: float("nan")}


def raises(samples, settings):
    raise KeyError("oops")


def test_a_custom_function_gives_the_advantages() -> None:
    samples = [header("g", 0, 1.0), header("g", 1, 0.0), header("h", 0, None), header("h", 1, 4.0)]
    made = inputs(samples, custom_advantage_function_path=f"{__name__}.lengths_matter")
    assert made.advantages == {"g-0": 2.0, "h-1": 8.0}
    assert made.plan.optimizer_steps[0].trained_tokens == 8


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("names_a_stranger", "'nobody', which is no sample of the step"),
        ("is_no_number", "gave sample 'g-0' the advantage nan"),
        ("raises", "raised KeyError: 'oops'"),
    ],
)
def test_what_a_custom_function_did_wrong_is_said(name: str, words: str) -> None:
    with pytest.raises(ServiceError, match="custom_advantage_function_path") as failed:
        inputs([header("g", 0, 1.0), header("g", 1, 0.0)], custom_advantage_function_path=f"{__name__}.{name}")
    assert failed.value.reason == "CUSTOM_ADVANTAGE_FAILED"
    assert words in failed.value.message


def test_a_custom_function_that_is_not_there_is_named() -> None:
    with pytest.raises(ServiceError, match="no function 'absent'"):
        inputs([header("g", 0, 1.0), header("g", 1, 0.0)], custom_advantage_function_path=f"{__name__}.absent")
