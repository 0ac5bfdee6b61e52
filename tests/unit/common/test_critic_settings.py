"""The critic's settings: what it takes over from the actor, and options that would have no effect."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.common.run_spec import TrainerSettings
from services.trainer.core.critic import critic_spec, data_parallel_size
from tests.support.trainer_world import make_spec

GIVEN = {
    "critic_load": "/critic",
    "critic_num_gpus_per_node": 2,
    "critic_tensor_model_parallel_size": 2,
    "critic_context_parallel_size": 2,
    "critic_lr": 1e-5,
    "critic_lr_warmup_iters": 3,
    "value_clip": 0.5,
    "num_critic_only_steps": 2,
}


@pytest.mark.parametrize("key", GIVEN)
@pytest.mark.parametrize("other", [{}, {"loss_type": "sft_loss"}])
def test_an_option_of_the_critic_without_one_is_refused_by_name(key, other):
    with pytest.raises(ValidationError, match=rf"{key} .* has no effect .* use advantage_estimator ppo"):
        TrainerSettings(**other, **{key: GIVEN[key]})


def test_ranks_that_do_not_divide_are_refused_by_name():
    with pytest.raises(ValidationError, match=r"critic_tensor_model_parallel_size 2 .* does not divide .* 3 ranks"):
        TrainerSettings(advantage_estimator="ppo", critic_num_gpus_per_node=3, critic_tensor_model_parallel_size=2)


def test_without_options_the_critic_is_as_the_actor(tmp_path):
    layout = {"actor_num_gpus_per_node": 4, "tensor_model_parallel_size": 2, "lr": 3e-4, "lr_warmup_iters": 7}
    spec = make_spec(tmp_path, trainer={"advantage_estimator": "ppo", **layout})
    assert spec.trainer.critic_world_size == 4
    assert critic_spec(spec) == spec
    assert data_parallel_size(critic_spec(spec)) == 2


def test_the_critics_run_has_its_own_layout_weights_and_rate(tmp_path):
    own = {"critic_load": "/critic", "critic_num_gpus_per_node": 4, "critic_tensor_model_parallel_size": 2}
    own |= {"critic_lr": 1e-3, "critic_lr_warmup_iters": 0, "num_critic_only_steps": 1}
    spec = make_spec(tmp_path, trainer={"advantage_estimator": "ppo", "lr": 1e-5, "lr_warmup_iters": 5, **own})
    critic = critic_spec(spec)
    assert spec.trainer.critic_world_size == critic.trainer.world_size == 4
    assert (critic.trainer.tensor_model_parallel_size, data_parallel_size(critic)) == (2, 2)
    assert (critic.trainer.lr, critic.trainer.lr_warmup_iters) == (1e-3, 0)
    assert (critic.rollout.hf_checkpoint, spec.rollout.hf_checkpoint) == ("/critic", "hf")
    assert critic.trainer.num_critic_only_steps == 0, "it is trained from the first step"


def test_a_run_without_a_critic_has_no_ranks_for_it():
    assert TrainerSettings().critic_world_size == 0


def test_a_run_that_would_never_train_its_actor_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="num_critic_only_steps 4 leaves none of the num_rollout 4 steps"):
        make_spec(tmp_path, steps=4, trainer={"advantage_estimator": "ppo", "num_critic_only_steps": 4})
