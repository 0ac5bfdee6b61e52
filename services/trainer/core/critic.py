"""How a run looks to the critic's ranks. Pure.

They are ranks like the actor's: the same settings mean the same to them. So the critic is described by a run file of
its own, in which its layout, first weights and learning rate stand where the actor's stood.
"""

from __future__ import annotations

from services.common.run_spec import RunSpec


def critic_spec(spec: RunSpec) -> RunSpec:
    """The run of the critic's ranks; for a run that trains a critic."""
    actor = spec.trainer
    ranks, tensor, context = actor.critic_layout(
        (actor.world_size, actor.tensor_model_parallel_size, actor.context_parallel_size)
    )
    warmup = actor.critic_lr_warmup_iters
    trainer = actor.model_copy(
        update={
            "actor_num_nodes": 1,
            "actor_num_gpus_per_node": ranks,
            "tensor_model_parallel_size": tensor,
            "context_parallel_size": context,
            "lr": actor.critic_lr or actor.lr,
            "lr_warmup_iters": actor.lr_warmup_iters if warmup is None else warmup,
            "num_critic_only_steps": 0,
            "use_opd": False,  # the teacher is the actor's
        }
    )
    rollout = spec.rollout.model_copy(update={"hf_checkpoint": actor.critic_load or spec.rollout.hf_checkpoint})
    return spec.model_copy(update={"trainer": trainer, "rollout": rollout})


def data_parallel_size(spec: RunSpec) -> int:
    """Copies of the model among the ranks of a run, or of a critic's run."""
    trainer = spec.trainer
    return trainer.world_size // (trainer.tensor_model_parallel_size * trainer.context_parallel_size)
