"""Staging memory beside an engine's weights, and the moment at which its bytes become the weights.

One flat byte tensor a bucket, on the model's device, kept from update to update. Knows models by `load_weights` alone.
The first activation runs it and notes which copies into parameters it made; when there was nothing but copies, later
ones repeat these in one call. That is never trusted by itself: who asks for it compares what the engine holds then.

Invariants: memory is refused before it is taken when too little would be left; after a failed transfer the buffers are
given up, as a sender that was left may still write into them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.rollout.receiver.held import named_tensors

_SPARE_BYTES = {"cuda": 512 * 2**20, "cpu": 256 * 2**20}
"""Left free beside the staging memory, for what the engine takes as it serves."""

Bucket = list[tuple[str, str, tuple[int, ...]]]
"""Name, dtype and shape of each tensor in a bucket, in order."""


class NoMemory(RuntimeError):
    """The staging memory does not fit beside the weights."""


@dataclass
class _Copies:
    """What the first activation did. `sources` are views of the staging memory; `constants` are fills of padding."""

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    constants: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    nothing_else: bool = True


class Staging:
    """Staging memory of one plan.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._plan: list[Bucket] = []
        self._copies: _Copies | None = None
        self.buffers: list[torch.Tensor] = []

    def reserve(self, plan: list[Bucket]) -> None:
        """Memory for a plan; what is there for the same plan is kept. Raises NoMemory with a sentence."""
        if plan == self._plan and self.buffers:
            return
        self.give_up()
        sizes = [sum(_byte_count(dtype, shape) for _, dtype, shape in bucket) for bucket in plan]
        free, spare = _free_bytes(self._device), _SPARE_BYTES[self._device.type]
        if sum(sizes) + spare > free:
            raise NoMemory(
                f"staging needs {sum(sizes) / 2**30:.2f} GiB beside the weights, and {free / 2**30:.2f} GiB are free "
                f"on {self._device}, of which {spare / 2**30:.2f} stay free"
            )
        try:
            self.buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            self.buffers = []
            raise NoMemory(str(error).splitlines()[0]) from error
        self._plan = plan

    def give_up(self) -> None:
        """Forgets the buffers; whoever still writes into them keeps them alive."""
        self.buffers, self._plan, self._copies = [], [], None

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The staged tensors by name: views of the buffers."""
        for bucket, flat in zip(self._plan, self.buffers, strict=True):
            position = 0
            for name, dtype, shape in bucket:
                size = _byte_count(dtype, shape)
                piece = flat[position : position + size]
                kind = getattr(torch, dtype)
                # A view needs an offset that is a multiple of the item: buckets of mixed dtypes may have others.
                piece = piece.clone() if position % kind.itemsize else piece
                yield name, piece.view(kind).reshape(shape)
                position += size

    @torch.no_grad()
    def activate(self, model: Any, *, repeat: bool) -> str:
        """Makes the staged bytes the model's weights, on the calling thread; → how ("copied": the noted copies,
        "loaded": by the model). `repeat`: noted copies may be used; False forgets them for good."""
        if not repeat:
            self._copies = _Copies(nothing_else=False)
        if self._copies is None:
            notes = _Notes({flat.untyped_storage().data_ptr() for flat in self.buffers})
            with notes:
                model.load_weights(self.views())
            self._copies, how = notes.copies, "loaded"
            if any(notes.is_staged(tensor) for _, tensor in named_tensors(model)):
                self.give_up()  # it keeps the staged tensors themselves: the next transfer must not write there
        elif self._copies.nothing_else:
            torch._foreach_copy_(self._copies.targets, self._copies.sources)
            for target, value in self._copies.constants:
                target.fill_(value)
            how = "copied"
        else:
            model.load_weights(self.views())
            how = "loaded"
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the next transfer may overwrite the buffers
        return how


class _Notes(TorchDispatchMode):
    """Notes copies out of the staging memory, and whether anything else was written."""

    def __init__(self, staged: set[int]) -> None:
        super().__init__()
        self._staged = staged
        self.copies = _Copies()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's guard would import its compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.is_mutable:
            self._note(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple) -> None:
        copies, target = self.copies, args[0]
        if func is torch.ops.aten.copy_.default and self.is_staged(args[1]) and target.shape == args[1].shape:
            copies.targets.append(target)
            copies.sources.append(args[1])
        elif func is torch.ops.aten.fill_.Scalar:
            copies.constants.append((target, args[1]))
        elif func is torch.ops.aten.zero_.default:
            copies.constants.append((target, 0.0))
        else:
            copies.nothing_else = False

    def is_staged(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in the staging memory."""
        return tensor.untyped_storage().data_ptr() in self._staged


def _byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * getattr(torch, dtype).itemsize


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as lines:
        found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(found) * 1024 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
