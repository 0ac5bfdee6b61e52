"""Settings of the algorithm that do not go together are refused by name, with the remedy."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.common.run_spec import RunSpec

ROLLOUT = {"hf_checkpoint": "model", "num_rollout": 3, "rollout_batch_size": 4, "n_samples_per_prompt": 2}
TIS = {"use_tis": True}
DECOUPLED = {"use_decoupled_loss": True}


def spec(trainer: dict, rollout: dict | None = None) -> RunSpec:
    return RunSpec.model_validate(
        {"rollout": ROLLOUT | (rollout or {}), "trainer": trainer, "data": {"label_key": "label"}}
    )


def refusal(trainer: dict, rollout: dict | None = None) -> str:
    with pytest.raises(ValidationError) as error:
        spec(trainer, rollout)
    return error.value.errors()[0]["msg"]


REFUSED = {
    "a custom loss without its path": ({"loss_type": "custom_loss"}, "custom_loss needs the import path"),
    "a custom loss beside a loss of its own": (
        {"custom_loss_function_path": "a.b", "advantage_estimator": "gspo"},
        "use grpo, which has the same advantages",
    ),
    "a custom advantage beside an estimator": (
        {"custom_advantage_function_path": "a.b", "advantage_estimator": "grpo"},
        "only custom uses one",
    ),
    "dual clip with cispo": ({"advantage_estimator": "cispo", "eps_clip_c": 3.0}, "cispo, whose loss has no dual clip"),
    "two normalizers": (
        {"calculate_per_token_loss": True, "loss_normalizer": "sample_mean"},
        "leave one of them out",
    ),
    "a constant that divides nothing": ({"loss_constant": 10.0}, "without loss_normalizer constant"),
    "REINFORCE++ without whitening": (
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": False},
        "set normalize_advantages, or leave it out, which sets it",
    ),
    "no deviation where none divides": (
        {"advantage_estimator": "rloo", "disable_grpo_std_normalization": True},
        "divides by no group's deviation",
    ),
    "no normalization of raw rewards": (
        {"advantage_estimator": "ppo", "disable_rewards_normalization": True},
        "takes rewards as they are",
    ),
    "nothing to divide": (
        {"disable_grpo_std_normalization": True, "disable_rewards_normalization": True},
        "disable_grpo_std_normalization has no effect with disable_rewards_normalization",
    ),
    "a discount without returns": ({"gamma": 0.9}, "gamma 0.9 has no effect without advantage_estimator"),
    "lambda without GAE": (
        {"advantage_estimator": "reinforce_plus_plus", "lambd": 0.9},
        "lambd 0.9 has no effect without advantage_estimator ppo",
    ),
    "a coefficient without its KL": ({"kl_loss_coef": 0.1}, "without use_kl_loss"),
    "a KL without its coefficient": ({"use_kl_loss": True}, "set kl_loss_coef, to 0 if the KL is only to be watched"),
    "a reference that nothing uses": (
        {"ref_load": "other"},
        "ref_load other has no effect without use_kl_loss or kl_coef",
    ),
    "an estimator of no KL": ({"kl_loss_type": "k1"}, "kl_loss_type k1 has no effect without use_kl_loss or kl_coef"),
    "KL in the rewards of a group": ({"kl_coef": 0.1}, "put the KL into the loss with use_kl_loss"),
    "two KL coefficients": (
        {"advantage_estimator": "ppo", "kl_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1},
        "would count twice",
    ),
    "an adaptive KL without a target": (
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_controller": "adaptive"},
        "needs kl_target",
    ),
    "an adaptive KL without a beginning": (
        {"kl_controller": "adaptive", "kl_target": 0.1},
        "needs a coefficient to begin with",
    ),
    "a target without its controller": ({"kl_target": 0.1}, "without kl_controller adaptive"),
    "a horizon without its controller": ({"kl_horizon": 5}, "without kl_controller adaptive"),
    "an unbiased KL without a KL": ({"use_unbiased_kl": True}, "without use_kl_loss"),
    "a moving reference that nothing uses": ({"ref_update_interval": 2}, "without use_kl_loss or kl_coef"),
    "two old policies": (
        {"use_rollout_logprobs": True, "keep_old_actor": True, "max_staleness": 1},
        "both say which policy is the old one",
    ),
    "the engine's ratio twice": ({"use_rollout_logprobs": True, **TIS}, "would count it twice"),
    "a decoupled loss that clips against the engine": (
        {"use_rollout_logprobs": True, **DECOUPLED},
        "leave use_rollout_logprobs out",
    ),
    "two weights of one ratio": ({**TIS, **DECOUPLED}, "or set keep_old_actor"),
    "a decoupled sequence": ({"advantage_estimator": "gspo", **DECOUPLED}, "ratio of single tokens"),
    "a cap without weights": ({"behave_weight_cap": 3.0}, "without use_decoupled_loss"),
    "a bound without OPSM": ({"opsm_delta": 0.1}, "without use_opsm"),
    "a correction in place of another": ({"custom_tis_function_path": "a.b", **TIS}, "leave them out"),
    "tokens' weights of a sequence": (
        {"advantage_estimator": "gspo", **TIS},
        "set tis_level to sequence or geometric",
    ),
    "a lower bound of a truncation": ({**TIS, "tis_clip_low": 0.5}, "set tis_mode to clip or mask"),
    "bounds the wrong way round": (
        {**TIS, "tis_mode": "clip", "tis_clip_low": 3.0},
        "tis_clip_low 3.0 is not below tis_clip 2.0",
    ),
    "nothing between the bounds of a rejection": ({"use_rs": True, "rs_clip": 0.9}, "set rs_clip above 1"),
    "tis_mode alone": ({"tis_mode": "mask"}, "tis_mode mask has no effect without use_tis"),
    "tis_level alone": ({"tis_level": "sequence"}, "without use_tis"),
    "tis_clip alone": ({"tis_clip": 3.0}, "without use_tis or use_rs"),
    "tis_clip_low alone": ({"tis_clip_low": 0.1}, "without use_tis"),
    "tis_batch_normalize alone": ({"tis_batch_normalize": True}, "without use_tis"),
    "rs_level alone": ({"rs_level": "token"}, "without use_rs"),
    "rs_clip alone": ({"rs_clip": 3.0}, "without use_rs"),
    "rs_clip_low alone": ({"rs_clip_low": 0.3}, "without use_rs"),
    "a veto alone": ({"rs_veto_threshold": 1e-4}, "without use_rs"),
    "labels with a KL": ({"loss_type": "sft_loss", "use_kl_loss": True}, "has no effect with loss_type sft_loss"),
    "labels with another divisor by the estimator": (
        {"loss_type": "sft_loss", "advantage_estimator": "dr_grpo"},
        "advantage_estimator dr_grpo has no effect with loss_type sft_loss",
    ),
    "labels with advantages of one's own": (
        {"loss_type": "sft_loss", "custom_advantage_function_path": "a.b"},
        "custom_advantage_function_path a.b has no effect with loss_type sft_loss",
    ),
    **{
        f"labels with {key}": (
            {"loss_type": "sft_loss", key: value},
            f"{key} {value} has no effect with loss_type sft_loss",
        )
        for key, value in {
            "eps_clip": 0.1,
            "eps_clip_high": 0.3,
            "eps_clip_c": 3.0,
            "gamma": 0.9,
            "lambd": 0.9,
            "disable_rewards_normalization": True,
            "disable_grpo_std_normalization": True,
            "kl_loss_coef": 0.1,
            "ref_load": "other",
        }.items()
    },
    "labels with a correction": ({"loss_type": "sft_loss", **TIS}, "has no effect with loss_type sft_loss"),
    "labels with a critic": ({"loss_type": "sft_loss", "value_clip": 0.5}, "which train no critic"),
    "critic options with grpo": ({"num_critic_only_steps": 2}, "which train no critic"),
    "kept actors in step with the engines": ({"keep_old_actor": True}, "raise max_staleness"),
    "kept actors and recorded routing": (
        {"keep_old_actor": True, "max_staleness": 1, "use_routing_replay": True},
        "set use_rollout_routing_replay",
    ),
    "OPSM of the current policy": ({"use_opsm": True}, "set use_rollout_logprobs or keep_old_actor"),
    "OPSM of the policy at the step's begin": (
        {"use_opsm": True, **DECOUPLED, "keep_old_actor": True, "max_staleness": 1},
        "use_opsm has no effect with use_decoupled_loss and num_steps_per_rollout 1",
    ),
    "optimizer steps of a baseline alone": (
        {"advantage_estimator": "remax", "num_steps_per_rollout": 8},
        "remax with rollout_batch_size 4 × n_samples_per_prompt 2 and num_steps_per_rollout 8",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_go_together_is_refused_with_the_remedy(what: str) -> None:
    trainer, fragment = REFUSED[what]
    message = refusal(trainer)
    assert fragment in message
    assert not message.rstrip().endswith("."), "the sentence is ended by who tells it"


@pytest.mark.parametrize(
    ("trainer", "rollout", "fragment"),
    [
        ({}, {}, "every advantage would be 0; take 2 samples or more"),
        ({"advantage_estimator": "rloo"}, {}, "compares the samples of a group"),
        ({"advantage_estimator": "remax"}, {}, "greedy baseline"),
        (
            {"advantage_estimator": "ppo"},
            {"dynamic_sampling_filter_path": "check_reward_nonzero_std"},
            "a single reward has no deviation",
        ),
    ],
)
def test_one_sample_a_prompt_is_refused_where_samples_are_compared(trainer: dict, rollout: dict, fragment: str) -> None:
    assert fragment in refusal(trainer, {"n_samples_per_prompt": 1, **rollout})


def test_kept_actors_need_versions_of_this_run() -> None:
    rollout = {"load_debug_rollout_data": "samples.jsonl"}
    assert "another run's" in refusal({"keep_old_actor": True, "max_staleness": 1}, rollout)


def test_a_greedy_baseline_is_not_looked_for_in_a_file() -> None:
    said = refusal({"advantage_estimator": "remax"}, {"load_debug_rollout_data": "samples.jsonl"})
    assert "advantage_estimator remax with load_debug_rollout_data" in said


@pytest.mark.parametrize(
    "trainer",
    [
        {"loss_type": "sft_loss"},
        {"advantage_estimator": "ppo"},
        {"advantage_estimator": "reinforce_plus_plus"},
        {"disable_rewards_normalization": True},
        {"use_opd": True, "opd_teacher_url": "http://host:1"},
    ],
)
def test_one_sample_a_prompt_is_enough_elsewhere(trainer: dict) -> None:
    assert spec(trainer, {"n_samples_per_prompt": 1})


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_comes_with_the_estimator(name: str) -> None:
    assert spec({"advantage_estimator": name}).trainer.normalize_advantages
    assert not spec({"advantage_estimator": "grpo"}).trainer.normalize_advantages


@pytest.mark.parametrize(
    "trainer",
    [
        {**TIS, **DECOUPLED, "keep_old_actor": True, "max_staleness": 2},
        {"advantage_estimator": "gspo", **TIS, "tis_level": "geometric"},
        {**TIS, "tis_mode": "mask", "tis_clip_low": 0.5, "use_rs": True, "rs_veto_threshold": 1e-4},
        {"use_rollout_logprobs": True, "use_rs": True, "use_opsm": True},
        {"use_opsm": True, **DECOUPLED, "num_steps_per_rollout": 2},
        {"advantage_estimator": "remax", "num_steps_per_rollout": 4},
        {"loss_type": "sft_loss", "advantage_estimator": "grpo", "loss_normalizer": "constant", "loss_constant": 9.0},
        {"advantage_estimator": "ppo", "kl_coef": 0.1, "kl_loss_type": "k1", "ref_load": "other"},
        {"advantage_estimator": "ppo", "kl_coef": 0.1, "kl_controller": "adaptive", "kl_target": 0.01},
        {"loss_normalizer": "constant", "loss_constant": 100.0, "custom_loss_function_path": "a.b"},
        {"use_kl_loss": True, "kl_loss_coef": 0.0},
    ],
)
def test_what_goes_together_is_taken(trainer: dict) -> None:
    assert spec(trainer)
