"""Staging memory beside a model, and what its receiver says that the model holds. In this process, on the CPU."""

from __future__ import annotations

import hashlib

import torch

from services.checksums.names import SHA256
from services.rollout.receiver.held import checksums
from services.rollout.receiver.staging import Staging

PLAN = [[("weight", "float32", (2, 3)), ("scale", "bfloat16", (3,))]]


class Model(torch.nn.Module):
    """Copies what it loads, or keeps the very tensors (`keeps`)."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))
        self.register_buffer("scale", torch.zeros(3, dtype=torch.bfloat16))
        self.keeps = keeps

    def load_weights(self, tensors) -> None:
        for name, tensor in tensors:
            if self.keeps:
                getattr(self, name).data = tensor
            else:
                getattr(self, name).data.copy_(tensor)


def staged(staging: Staging, value: int) -> None:
    staging.reserve(PLAN)
    for flat in staging.buffers:
        flat.fill_(value)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def test_copies_are_repeated_and_every_tensor_is_told():
    staging, model = Staging(torch.device("cpu")), Model()
    for value, how in ((1, "loaded"), (2, "copied"), (3, "copied")):
        staged(staging, value)
        assert staging.activate(model, repeat=True) == how
        held = {"weight": digest(model.weight.detach()), "scale": digest(model.scale)}
        assert checksums(model, ["weight", "scale"], SHA256) == held
        assert held["scale"] == hashlib.sha256(bytes([value]) * 6).hexdigest()[:16]


def test_nothing_is_told_of_a_model_that_lacks_a_tensor():
    assert checksums(Model(), ["weight", "bias"], SHA256) is None
    assert checksums(object(), ["weight"], SHA256) is None
    assert checksums(Model(), ["weight"], "another") is None


def test_a_model_that_keeps_the_staged_tensors_may_have_them():
    staging, model = Staging(torch.device("cpu")), Model(keeps=True)
    staged(staging, 1)
    assert staging.activate(model, repeat=True) == "loaded"
    before = model.weight.detach().clone()
    staged(staging, 2)  # the next transfer arrives while the engine serves
    assert torch.equal(model.weight.detach(), before)
    assert staging.activate(model, repeat=True) == "loaded"
    assert not torch.equal(model.weight.detach(), before)
