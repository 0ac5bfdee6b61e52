"""What a policy is trained beside: the reference model, the coefficient of its KL, the weights of earlier versions.

The reference and the coefficient change in the course of a run, and are then part of its checkpoints; the weights of
earlier versions are not: after a restart the engines' own log-probs stand for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel

from services.common.errors import Code, ServiceError
from services.common.run_spec import RunSpec, TrainerSettings
from services.trainer.core.algorithms.kl import AdaptiveKl
from services.trainer.ranks.kept_actors import KeptActors

_PREFIX = "reference."
"""Of the reference's tensors in a checkpoint."""


@dataclass
class Reference:
    """The frozen model of the KL. `step`: steps of the run that its weights have seen; 0: those it was loaded with."""

    model: GPTModel
    step: int = 0

    def follow(self, model: GPTModel, step: int) -> None:
        """Takes over the weights of a model that has been trained for `step` steps."""
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                own[name].copy_(tensor)
        self.step = step

    def check_follows(self, model: GPTModel, path: str) -> None:
        """Raises REFERENCE_DIFFERS when it cannot take over a model's weights."""
        own = {name: tensor.shape for name, tensor in self.model.named_parameters()}
        if own != {name: tensor.shape for name, tensor in model.named_parameters()}:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "REFERENCE_DIFFERS",
                f"ref_update_interval: the reference {path} is another model than the one that is trained, so it cannot"
                " take over its weights; leave ref_update_interval out, or set ref_load to a checkpoint of the same"
                " model.",
            )


@dataclass
class Companions:
    """Each None where the run's settings have no use for it."""

    reference: Reference | None = None
    kl: AdaptiveKl | None = None
    kept: KeptActors | None = None
    ref_update_interval: int | None = None

    def pushed_as(self, version: int, optimizer_steps: int) -> None:
        """The policy's present weights, those after `optimizer_steps`, go to engines as a version; 0: as none."""
        if version and self.kept:
            self.kept.keep(version, optimizer_steps)

    def end_step(self, model: GPTModel, done: int) -> None:
        """After step number `done`, counted from 1: the reference becomes the policy's `model` when that is due."""
        if self.reference and self.ref_update_interval and done % self.ref_update_interval == 0:
            self.reference.follow(model, done)

    def sharded_state(self, reference_step: int) -> dict:
        """For a checkpoint: the reference's tensors, if it is to be that of a step."""
        if self.reference is None or not reference_step:
            return {}
        return {"reference": self.reference.model.sharded_state_dict(prefix=_PREFIX)}

    def numbers(self) -> dict[str, float]:
        """For a checkpoint: plain numbers."""
        told: dict[str, float] = {"reference_step": self.reference.step} if self.reference else {}
        return told | ({"kl_coef": self.kl.coef} if self.kl else {})

    def restore(self, numbers: dict[str, float], state: dict) -> None:
        """Takes what a checkpoint says: `numbers` of then, and the state in which `sharded_state` was read. Other
        weights are the policy's now, so no version is known any more."""
        if self.kept:
            self.kept.clear()
        if self.kl and "kl_coef" in numbers:
            self.kl.coef = numbers["kl_coef"]
        if self.reference and "reference" in state:
            own = state["reference"]
            with torch.no_grad():
                self.reference.model.load_state_dict({k.removeprefix(_PREFIX): v for k, v in own.items()})
            self.reference.step = int(numbers["reference_step"])


def build_companions(spec: RunSpec, policy_model: GPTModel, reference: GPTModel | None) -> Companions:
    """The companions of a run's policy. `reference`: the model with the weights of `ref_load`, or None.

    Raises:
        ServiceError: REFERENCE_DIFFERS.
    """
    settings = spec.trainer
    companions = Companions(kl=_adaptive_kl(settings), ref_update_interval=settings.ref_update_interval)
    if reference is not None:
        companions.reference = Reference(reference)
        if settings.ref_update_interval:
            companions.reference.check_follows(policy_model, settings.ref_load or spec.rollout.hf_checkpoint)
    if settings.keep_old_actor:
        # Of a sample's versions the oldest is at most max_staleness behind; one more is on its way to the engines.
        companions.kept = KeptActors(policy_model, most=settings.max_staleness + 2)
    return companions


def _adaptive_kl(settings: TrainerSettings) -> AdaptiveKl | None:
    if settings.kl_controller != "adaptive":
        return None
    assert settings.kl_target is not None
    return AdaptiveKl(settings.kl_coef or settings.kl_loss_coef, settings.kl_target, settings.kl_horizon)
