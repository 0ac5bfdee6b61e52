"""Settings of the critic, the model whose values ppo's advantages are taken against; part of the trainer's group."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from services.common.run_spec.algorithm import AlgorithmSettings


class CriticSettings(AlgorithmSettings):
    """The critic of advantage_estimator ppo (used by the trainer). What is not named here is as for the actor."""

    critic_load: str | None = None
    """Hugging Face checkpoint of the critic's first weights; hf_checkpoint when not set. A tensor score.weight in it is
    the value head, which begins at zero otherwise."""
    critic_num_gpus_per_node: int | None = Field(default=None, ge=1)
    """Ranks of the critic, processes beside the actor's; without a GPU each is a CPU process. Not set: as many."""
    critic_tensor_model_parallel_size: int | None = Field(default=None, ge=1)
    """Ranks that share one copy of the critic; tensor_model_parallel_size when not set."""
    critic_context_parallel_size: int | None = Field(default=None, ge=1)
    """Ranks that share the critic's tokens of a micro-batch; context_parallel_size when not set."""
    critic_lr: float | None = Field(default=None, gt=0)
    """The critic's peak learning rate; lr when not set."""
    critic_lr_warmup_iters: int | None = Field(default=None, ge=0)
    """Optimizer steps of the critic's linear warm-up; lr_warmup_iters when not set."""
    value_clip: float = Field(default=0.2, gt=0)
    """How far a value may move from what it was before the step until its loss gains nothing more by it."""
    num_critic_only_steps: int = Field(default=0, ge=0)
    """First steps of a run that train the critic alone; the actor stays as it is."""

    @model_validator(mode="after")
    def _check_critic(self) -> Self:
        for name in () if self.needs_critic else _OWN:
            given = getattr(self, name)
            if given != CriticSettings.model_fields[name].default:
                raise ValueError(
                    f"{name} {given} has no effect with advantage_estimator {self.advantage_estimator} and loss_type"
                    f" {self.loss_type}, which train no critic; leave it out, or use advantage_estimator ppo with"
                    " loss_type policy_loss"
                )
        return self

    def critic_problem(self, num_rollout: int) -> str:
        """What is wrong with a warm-up in a run of `num_rollout` steps, or an empty string."""
        only = self.num_critic_only_steps
        if only < num_rollout:
            return ""
        return (
            f"num_critic_only_steps {only} leaves none of the num_rollout {num_rollout} steps to the actor, which would"
            " never be trained; lower it"
        )

    def critic_layout(self, actor: tuple[int, int, int]) -> tuple[int, int, int]:
        """Ranks of the critic, its tensor-parallel and its context-parallel size, beside those of the actor.

        Raises:
            ValueError: they do not fit.
        """
        ranks = self.critic_num_gpus_per_node or actor[0]
        tensor = self.critic_tensor_model_parallel_size or actor[1]
        context = self.critic_context_parallel_size or actor[2]
        if ranks % (tensor * context):
            raise ValueError(
                f"critic_tensor_model_parallel_size {tensor} × critic_context_parallel_size {context} does not divide"
                f" the critic's {ranks} ranks; set critic_num_gpus_per_node to a multiple of it"
            )
        return ranks, tensor, context


_OWN = tuple(name for name in CriticSettings.model_fields if name not in AlgorithmSettings.model_fields)
