"""The run spec: batch law, key names, and sentences for mistakes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.common.run_spec import GROUPS, RunSpec, key_groups
from services.common.settings import explain

ROLLOUT = {"hf_checkpoint": "model", "num_rollout": 3, "rollout_batch_size": 4, "n_samples_per_prompt": 2}


def refuse(data: dict) -> str:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(data)
    return explain(caught.value, RunSpec)


def test_global_batch_size_follows_from_the_batch_law() -> None:
    spec = RunSpec.model_validate({"rollout": ROLLOUT, "trainer": {"num_steps_per_rollout": 2}})
    assert spec.trainer.global_batch_size == 4


def test_violated_batch_law_names_all_four_values() -> None:
    message = refuse({"rollout": ROLLOUT, "trainer": {"global_batch_size": 3}})
    assert "rollout_batch_size 4 × n_samples_per_prompt 2 = 8" in message
    assert "global_batch_size 3 × num_steps_per_rollout 1 = 3" in message


def test_steps_that_do_not_divide_the_samples_are_named() -> None:
    message = refuse({"rollout": ROLLOUT, "trainer": {"num_steps_per_rollout": 3}})
    assert "= 8 samples, which num_steps_per_rollout 3 does not divide" in message


@pytest.mark.parametrize("estimator", ["remax", "rloo"])
def test_estimators_that_compare_need_something_to_compare_with(estimator: str) -> None:
    lonely = {"rollout": ROLLOUT | {"n_samples_per_prompt": 1}, "trainer": {"advantage_estimator": estimator}}
    assert "n_samples_per_prompt 1" in (said := refuse(lonely))
    assert "take 2 samples or more" in said
    assert RunSpec.model_validate(lonely | {"rollout": ROLLOUT}).trainer.advantage_estimator == estimator


def test_misspelt_key_is_named_before_the_missing_one() -> None:
    rollout = {("rollout_batch_siz" if k == "rollout_batch_size" else k): v for k, v in ROLLOUT.items()}
    assert "rollout_batch_siz" in refuse({"rollout": rollout})
    assert refuse({"rollout": rollout}).startswith("Unknown key")


def test_every_key_name_is_unique_so_that_a_flag_is_unambiguous() -> None:
    names = [name for model in GROUPS.values() for name in model.model_fields]
    assert len(names) == len(set(names))
    assert len(key_groups()) == len(names) + 2


@pytest.mark.parametrize("group", GROUPS)
def test_every_key_is_documented(group: str) -> None:
    assert not [name for name, info in GROUPS[group].model_fields.items() if not info.description]


@pytest.mark.parametrize(
    ("group", "values", "fragment"),
    [
        ("trainer", {"advantage_estimator": "ppoo"}, "use one of grpo, dr_grpo"),
        ("reward", {"rm_type": "maths"}, "use one of exact_match, math, custom"),
        ("reward", {"rm_type": "custom"}, "needs custom_rm_path"),
        ("trainer", {"kl_loss_coef": 0.1}, "without use_kl_loss"),
        ("trainer", {"tensor_model_parallel_size": 2}, "does not divide the 1 ranks"),
        (
            "trainer",
            {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "actor_num_gpus_per_node": 2},
            "tensor_model_parallel_size 2 × context_parallel_size 2 does not divide the 2 ranks",
        ),
        ("trainer", {"save_interval": 2}, "needs save"),
        ("trainer", {"actor_num_nodes": 2}, "places its ranks on one host"),
        ("trainer", {"update_weight_mode": "delta"}, "needs update_weight_transport disk"),
        ("trainer", {"update_weight_transport": "disk"}, "needs update_weight_disk_dir"),
        ("trainer", {"update_weight_local_checkpoint_dir": "/x"}, "/x needs update_weight_disk_dir"),
    ],
)
def test_mistakes_are_named(group: str, values: dict, fragment: str) -> None:
    assert fragment in refuse({"rollout": ROLLOUT, group: values})


def test_custom_reward_path_implies_the_custom_grader() -> None:
    spec = RunSpec.model_validate({"rollout": ROLLOUT, "reward": {"custom_rm_path": "my.reward"}})
    assert spec.reward.rm_type == "custom"


def test_evaluation_sets_are_name_and_path_in_turn() -> None:
    spec = RunSpec.model_validate({"rollout": ROLLOUT, "data": {"eval_prompt_data": ["a", "a.jsonl", "b", "b.jsonl"]}})
    assert spec.data.eval_datasets == {"a": "a.jsonl", "b": "b.jsonl"}


def test_spec_survives_json() -> None:
    spec = RunSpec.model_validate({"rollout": ROLLOUT})
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
