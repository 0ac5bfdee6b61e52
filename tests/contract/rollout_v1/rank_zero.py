"""The trainer's end of a weight group: rank 0 of a real gloo group, in a thread of the test process."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

from services.common.process import free_port


def checksum(*tensors: torch.Tensor) -> str:
    """ "sha256-64" of the concatenated bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()[:8].hex()


@dataclass
class RankZero:
    """One weight group; `name` must be new."""

    name: str
    port: int = field(default_factory=free_port)
    world_size: int = 2
    group: torch.distributed.ProcessGroup | None = None

    def _join(self) -> None:
        limit = timedelta(seconds=10)
        store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{self.port}", 0, self.world_size, timeout=limit))
        store.set_timeout(limit)
        group, _ = _new_process_group_helper(
            size, rank, [], Backend("gloo"), PrefixStore(self.name, store), group_name=self.name, timeout=limit
        )
        _world.pg_group_ranks[group] = {i: i for i in range(size)}
        self.group = group

    async def join(self) -> None:
        """Blocks until the engine has joined."""
        await asyncio.to_thread(self._join)

    async def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Sends the tensors as one flat byte tensor."""
        flat = torch.cat([tensor.contiguous().view(torch.uint8).flatten() for tensor in tensors])
        await asyncio.to_thread(lambda: torch.distributed.broadcast(flat, 0, group=self.group))

    def leave(self) -> None:
        """Destroys this end."""
        if self.group is not None:
            torch.distributed.destroy_process_group(self.group)
            self.group = None
