"""The trained model with everything that updates it: gradients' buffers, optimizer, learning rate; and the reference.

Knows how to run the model over a pack and how to make one optimizer step; knows no losses, samples or commands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from services.common.errors import Code, ServiceError
from services.common.run_spec import RunSpec, TrainerSettings
from services.trainer.core.learning_rate import learning_rate
from services.trainer.ranks.batches import Pack
from services.trainer.ranks.companions import Companions, build_companions
from services.trainer.ranks.log_probs import log_probs_and_entropy
from services.trainer.ranks.model.build import build_model, transformer_config
from services.trainer.ranks.model.hf_config import HfConfig, read_hf_config
from services.trainer.ranks.model.hf_weights import list_weights, load_weights
from services.trainer.ranks.model.value_head import build_value_model
from services.trainer.ranks.routing_replay import replaying

ForwardStep = Callable[[Iterator[Any], torch.nn.Module], tuple[torch.Tensor, Callable[[torch.Tensor], tuple]]]
"""Megatron's: → the model's output, and the function that makes loss, divisor and anything else of it."""


@dataclass
class Policy:
    """model: the bare GPTModel; wrapped: the same inside megatron's data-parallel wrapper, for training.

    optimizer_steps counts those made in the life of the run.
    """

    hf: HfConfig
    model: GPTModel
    wrapped: DistributedDataParallel
    optimizer: object
    settings: TrainerSettings
    temperature: float
    total_optimizer_steps: int
    optimizer_steps: int = 0
    beside: Companions = field(default_factory=Companions)

    def parameter_count(self) -> int:
        """Parameters of the whole model."""
        return sum(math.prod(spec.shape) for spec in list_weights(self.model, self.hf))

    def next_learning_rate(self) -> float:
        """Rate of the optimizer step to come."""
        s = self.settings
        return learning_rate(
            self.optimizer_steps,
            peak=s.lr,
            minimum=s.min_lr,
            warmup=s.lr_warmup_iters,
            total=self.total_optimizer_steps,
            style=s.lr_decay_style,
        )

    def zero_grad(self) -> None:
        """Clears gradients before an optimizer step."""
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def forward_backward(self, forward_step: ForwardStep, work: Sequence[Any]) -> list[Any]:
        """Gradients of one optimizer step over the micro-batches `work`, which `forward_step` takes from its iterator
        one by one; → what each one's loss function said beside the loss."""
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(work),
            model=self.wrapped,
            num_microbatches=len(work),
            seq_length=1,  # of pipelines with a fixed length; ours is variable
            micro_batch_size=1,
            forward_only=False,
        )

    def update(self) -> float:
        """Clips and applies the gradients; returns their norm before clipping.

        Raises:
            ServiceError: GRADIENT_NOT_FINITE; the weights are unchanged then.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.next_learning_rate()
            # Norms and biases are exempt: Megatron marks their groups, and leaves it to its scheduler to obey the mark.
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]
        overflow = self.optimizer.prepare_grads()
        norm = math.nan if overflow else float(self.optimizer.clip_grad_norm(self.optimizer.config.clip_grad))
        if not math.isfinite(norm):
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "GRADIENT_NOT_FINITE",
                f"The gradient norm of optimizer step {self.optimizer_steps} is {norm}; nothing was updated."
                " Lower lr, or look at the samples of this step.",
                optimizer_step=self.optimizer_steps,
            )
        self.optimizer.step_with_ready_grads()
        self.optimizer_steps += 1
        return norm


def build_policy(spec: RunSpec, device: torch.device, *, values: bool = False) -> Policy:
    """Model with the weights of `hf_checkpoint`, wrapped, with a fresh optimizer. `values`: a critic's model."""
    settings = spec.trainer
    hf = read_hf_config(spec.rollout.hf_checkpoint)
    config = transformer_config(hf, bf16=settings.bf16, device=device)
    model = (build_value_model if values else build_model)(hf, config, device)
    load_weights(model, hf, spec.rollout.hf_checkpoint)
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False),
        Float16Module(config, model) if settings.bf16 else model,
    )
    config.no_sync_func = wrapped.no_sync
    chained = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            # An infinite bound clips nothing, but the norm is still computed.
            clip_grad=settings.clip_grad or math.inf,
            bf16=settings.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=False,
        ),
        [wrapped],
        use_gloo_process_groups=False,
    )
    (optimizer,) = chained.chained_optimizers  # one for dense parameters; experts would add a second
    if device.type == "cuda":
        for group in optimizer.param_groups:
            group["fused"] = True  # one kernel, and no temporaries as large as the model
    complete_adam_state(optimizer)
    return Policy(
        hf=hf,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        settings=settings,
        temperature=1.0 if settings.loss_type == "sft_loss" else spec.rollout.rollout_temperature,
        total_optimizer_steps=(spec.rollout.num_rollout - settings.num_critic_only_steps)
        * settings.num_steps_per_rollout,
    )


def complete_adam_state(optimizer) -> None:
    """Gives every parameter the state it would get at the first step.

    Checkpoints need it: torch creates it lazily, and megatron's own initialisation leaves out the step.
    """
    inner = optimizer.optimizer
    for group in inner.param_groups:
        for parameter in group["params"]:
            inner.state[parameter].update(
                step=torch.tensor(0.0, device=parameter.device if group["fused"] else "cpu"),
                exp_avg=torch.zeros_like(parameter),
                exp_avg_sq=torch.zeros_like(parameter),
            )


def add_companions(spec: RunSpec, policy: Policy, device: torch.device) -> None:
    """Puts beside a policy what its run's settings want. Raises REFERENCE_DIFFERS."""
    reference = build_reference(spec, device) if spec.trainer.needs_reference else None
    policy.beside = build_companions(spec, policy.model, reference)


def build_reference(spec: RunSpec, device: torch.device) -> GPTModel:
    """A frozen model with the weights of `ref_load`, or of `hf_checkpoint`."""
    path = spec.trainer.ref_load or spec.rollout.hf_checkpoint
    hf = read_hf_config(path)
    model = build_model(hf, transformer_config(hf, bf16=spec.trainer.bf16, device=device), device)
    load_weights(model, hf, path)
    return model.requires_grad_(False)


def logits_of(model: torch.nn.Module, pack: Pack, **options) -> torch.Tensor:
    """[own, vocabulary shard] at this rank's rows of a pack."""
    layout = pack.layout
    tokens = layout.own_tokens(pack.tokens)
    with replaying(model, pack.routing):
        return model(tokens[None], layout.positions[None], None, packed_seq_params=layout, **options)[0]


def trained_log_probs(
    logits: torch.Tensor, pack: Pack, hf: HfConfig, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of all trained tokens of a pack and the entropies at their places, each float32 [k], from this
    rank's logits. Collective over the context-parallel ranks."""
    layout = pack.layout
    targets = layout.own_rows(pack.targets)
    kept = None if pack.kept is None else pack.kept.at(layout.own_rows)
    return layout.all_rows(
        *log_probs_and_entropy(logits, targets, vocab_size=hf.vocab_size, temperature=temperature, kept=kept)
    )


@torch.no_grad()
def evaluate_log_probs(model: GPTModel, packs: Sequence[Pack], hf: HfConfig, temperature: float) -> list[torch.Tensor]:
    """Log-probabilities of the trained tokens of every pack, without gradients."""
    return [trained_log_probs(logits_of(model, pack), pack, hf, temperature)[0] for pack in packs]
