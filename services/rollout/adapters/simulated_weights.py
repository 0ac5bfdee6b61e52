"""The simulated engine's weights: a checkpoint's real tensors, updated over real gloo groups.

Tensors are held as bytes by Hugging Face name; torch is imported when the first group is joined. Every failure
is a `ValueError` with a sentence. Methods block: call them on a thread.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


class HeldWeights:
    """Tensors of one checkpoint and the groups that update them.

    Args:
        model_path: checkpoint directory.
        group_timeout: longest wait in seconds for the other members of a group, at the join and in each collective.
    """

    def __init__(self, model_path: Path, group_timeout: float) -> None:
        self._wait = datetime.timedelta(seconds=group_timeout)
        self._model_path = model_path
        self._data: dict[str, memoryview] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._tensors: dict[str, Any] = {}
        """Bytes as torch sees them, of tensors that were loaded."""
        self._groups: dict[str, Any] = {}
        self._open = False

    def checksums(self) -> dict[str, str]:
        """First 8 bytes of SHA-256 of every tensor's bytes, as hex digits."""
        self._load()
        return {name: hashlib.sha256(data).hexdigest()[:16] for name, data in self._data.items()}

    def fingerprint(self) -> str:
        """One digest of all tensors: equal for equal weights."""
        return hashlib.sha256(json.dumps(sorted(self.checksums().items())).encode()).hexdigest()

    def begin(self) -> None:
        """Open an update."""
        if self._open:
            raise ValueError("begin_weight_update() was called twice without end_weight_update().")
        self._open = True

    def end(self) -> None:
        """Close the update."""
        if not self._open:
            raise ValueError("end_weight_update() must follow begin_weight_update().")
        self._open = False

    def join(self, body: dict[str, Any]) -> None:
        """Join a group; blocks until all members are there."""
        name = body["group_name"]
        if name in self._groups:
            raise ValueError(f"This engine is a member of group {name} already.")
        if body["backend"] != "gloo":
            raise ValueError(f"The simulated engine joins gloo groups only, not {body['backend']}.")
        from torch.distributed import distributed_c10d as c10d

        address = f"tcp://{body['master_address']}:{body['master_port']}"
        try:
            meeting = c10d.rendezvous(address, body["rank_offset"], body["world_size"], timeout=self._wait)
            store, rank, size = next(meeting)
            store.set_timeout(self._wait)
            # The same prefixes as SGLang's, so that one trainer serves both kinds of engine.
            group, _ = c10d._new_process_group_helper(
                size, rank, [], c10d.Backend("gloo"), c10d.PrefixStore(name, store), group_name=name, timeout=self._wait
            )
        except (RuntimeError, OSError) as error:
            raise ValueError(f"Failed to join group {name}: {error}") from error
        c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}  # destruction looks it up
        self._groups[name] = group

    def leave(self, name: str) -> None:
        """Leave a group."""
        group = self._groups.pop(name, None)
        if group is None:
            raise ValueError(f"This engine is not in group {name}.")
        import torch.distributed

        torch.distributed.destroy_process_group(group)

    def receive(self, body: dict[str, Any]) -> None:
        """Receive tensors by broadcast from rank 0: one flat bucket, or one broadcast each."""
        specs = list(zip(body["names"], body["dtypes"], map(tuple, body["shapes"]), strict=True))
        group = self._groups.get(body["group_name"])
        self.require_open()
        if group is None:
            raise ValueError(f"This engine is not in group {body['group_name']}.")
        for name, _, shape in specs:
            self._check_shape(name, shape)
        if body.get("load_format") == "flattened_bucket":
            self._receive_flat(specs, group)
        else:
            for spec in specs:
                self._receive_flat([spec], group)

    def require_open(self) -> None:
        """Raises outside an update."""
        if not self._open:
            raise ValueError("Weight updates must run between begin_weight_update() and end_weight_update().")

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self._load()
        if self._shapes.get(name) != shape:
            raise ValueError(f"Tensor {name} of shape {shape} does not fit: it is {self._shapes.get(name)} here.")

    def load_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Copies torch tensors into those held, as SGLang's models do."""
        import torch

        for name, tensor in tensors:
            self._check_shape(name, tuple(tensor.shape))
            if name not in self._tensors:
                held = torch.empty(tensor.nbytes, dtype=torch.uint8)
                self._tensors[name], self._data[name] = held, memoryview(held.numpy())
            self._tensors[name].copy_(tensor.flatten().view(torch.uint8))

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Loaded tensors by name, as torch's modules tell them."""
        return iter(list(self._tensors.items()))

    def load_files(self, body: dict[str, Any]) -> None:
        """Take the tensors of a checkpoint."""
        self._load()
        for name, tensor in _tensors_in(Path(body["model_path"])):
            self._check_shape(name, tuple(tensor["shape"]))
            self._tensors.pop(name, None)
            self._data[name] = memoryview(tensor["data"])

    def _receive_flat(self, specs: Sequence[tuple[str, str, tuple[int, ...]]], group: Any) -> None:
        import torch

        sizes = [torch.Size(shape).numel() * getattr(torch, dtype).itemsize for _, dtype, shape in specs]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        # gloo moves bytes, so a sender's float tensor lands in a byte tensor of the same size.
        try:
            group.broadcast(flat, 0).wait()
        except RuntimeError as error:
            raise ValueError(f"The broadcast failed: {error}") from error
        view, position = memoryview(flat.numpy()), 0
        for (name, _, _), size in zip(specs, sizes, strict=True):
            self._tensors.pop(name, None)
            self._data[name] = view[position : position + size]
            position += size

    def _load(self) -> None:
        """Read the checkpoint; the first use pays for it."""
        if self._data:
            return
        for name, tensor in _tensors_in(self._model_path):
            self._data[name] = memoryview(tensor["data"])
            self._shapes[name] = tuple(tensor["shape"])


def _tensors_in(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Tensors of a checkpoint: data, dtype, shape."""
    from safetensors import SafetensorError, deserialize

    index = directory / "model.safetensors.index.json"
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else None
        for file in names or ["model.safetensors"]:
            yield from deserialize((directory / file).read_bytes())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"The checkpoint {directory} cannot be read: {error}") from error
