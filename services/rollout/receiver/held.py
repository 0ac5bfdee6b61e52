"""What an engine holds, told by its receiver: checksums of the model's tensors, on the thread that is asked.

On a GPU all of them cost one kernel and one wait for the device; the engine's own take a wait for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from services.checksums import compute
from services.checksums.names import SHA256, TILED


def checksums(model: Any, names: Sequence[str], algorithm: str) -> dict[str, str] | None:
    """By name, of parameters and buffers; None when the model has not all of them, or this machine cannot make them
    fast and without much memory."""
    if not names or not _can(algorithm, device_of(model)):
        return None
    tensors = dict(named_tensors(model))
    if any(name not in tensors for name in names):
        return None
    contents = [compute.Content([_bytes(tensors[name])]) for name in names]
    return dict(zip(names, compute.digests(contents, algorithm), strict=True))


def named_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, of a model that tells them."""
    for of_kind in ("named_parameters", "named_buffers"):
        if hasattr(model, of_kind):
            yield from getattr(model, of_kind)()


def device_of(model: Any) -> torch.device:
    """Where a model is; the CPU when it does not tell."""
    parameters = getattr(model, "parameters", None)
    return next(parameters()).device if parameters else torch.device("cpu")


def _can(algorithm: str, device: torch.device) -> bool:
    return algorithm == SHA256 if device.type == "cpu" else algorithm == TILED and compute.has_kernels(device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
