"""Policy losses of users: what such a function is given, and the check of what it returns. Pure torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from services.common.errors import Code, ServiceError
from services.common.import_path import load_function
from services.common.run_spec.algorithm import AlgorithmSettings

CUSTOM_LOSS_KEY = "custom_loss_function_path"


@dataclass(frozen=True)
class LossInputs:
    """A pack of k trained tokens, those of a sample side by side; every tensor is float32 [k] but for `segments` and
    `versions`. k may be 0.

    log_probs: of the current policy, with gradient. entropy: of the current policy at each place; with gradient where
    entropy_coef is set. old_log_probs: of the policy that ratios are taken to. engine_log_probs: as the engine said.
    reference_log_probs: of the reference model, or None. advantages: of each token. segments: int64, ascending: place
    of the token's sample in `sample_ids`. versions: int32, the weight version that generated the token.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    old_log_probs: torch.Tensor
    engine_log_probs: torch.Tensor
    reference_log_probs: torch.Tensor | None
    advantages: torch.Tensor
    segments: torch.Tensor
    versions: torch.Tensor
    sample_ids: tuple[str, ...]


CustomLoss = Callable[[LossInputs, AlgorithmSettings], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def custom_loss(settings: AlgorithmSettings) -> CustomLoss | None:
    """The run's own loss, checked at every call, or None. Raises FUNCTION_NOT_LOADABLE.

    The function is called as function(inputs, settings) and returns the loss of every token, float32 [k], or that and
    a dict of metrics by name, each [k]. Sums and divisors are not its business: they follow from loss_normalizer.
    """
    path = settings.custom_loss_function_path
    if path is None:
        return None
    function = load_function(path, CUSTOM_LOSS_KEY, "the trainer")
    return lambda inputs, own: _checked(function, path, inputs, own)


def _checked(
    function: Callable[..., Any], path: str, inputs: LossInputs, settings: AlgorithmSettings
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and metrics of a user's function. Raises CUSTOM_LOSS_FAILED."""
    try:
        said = function(inputs, settings)
    except Exception as error:
        raise _failed(path, f"raised {type(error).__name__}: {error}") from error
    said_loss, metrics = said if isinstance(said, tuple) and len(said) == 2 else (said, {})
    if not isinstance(metrics, dict):
        raise _failed(path, f"returned metrics of type {type(metrics).__name__}")
    wanted = inputs.log_probs.shape
    loss = _by_token(path, "a loss", said_loss, wanted)
    found = {str(key): _by_token(path, f"the metric {key!r}", value, wanted) for key, value in metrics.items()}
    if len(inputs.log_probs) and not loss.requires_grad:
        raise _failed(path, "returned a loss without gradient: use log_probs in it, undetached")
    return loss, {name: value.detach() for name, value in found.items()}


def _by_token(path: str, name: str, value: Any, wanted: torch.Size) -> torch.Tensor:
    """`value`, which has a number for every token. Raises CUSTOM_LOSS_FAILED."""
    if not isinstance(value, torch.Tensor) or value.shape != wanted:
        found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise _failed(path, f"returned {name} of shape {found} for {list(wanted)} tokens")
    return value


def _failed(path: str, why: str) -> ServiceError:
    sentence = (
        f"{CUSTOM_LOSS_KEY} {path!r} {why}. It must return the loss of every token, a float32 tensor like log_probs."
    )
    return ServiceError(Code.FAILED_PRECONDITION, "CUSTOM_LOSS_FAILED", sentence, path=path)
