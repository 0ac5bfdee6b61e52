"""The trainer's side of a weight group with one engine, for tests. Imports no torch before it is needed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from services.common.devices import COLLECTIVE_ENV
from services.common.process import free_port
from services.rollout.core.engine_port import GroupSpec, TensorSpec


async def in_thread(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """Runs a blocking call in a daemon thread; one that hangs is left behind. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def settle(error: BaseException | None, result: Any) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(result)

    def run() -> None:
        error, result = None, None
        try:
            result = function(*args)
        except Exception as failure:
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop has gone
            loop.call_soon_threadsafe(settle, error, result)

    threading.Thread(target=run, daemon=True, name=getattr(function, "__name__", "call")).start()
    return await asyncio.wait_for(done, seconds)


class TrainerSide:
    """Rank 0 of a weight group, as a trainer holds it: joins, broadcasts flat buckets, leaves.

    Args:
        name: of the group.
        backend: "gloo" (bytes in host memory) or "nccl".
        device: where the bytes are.
    """

    def __init__(self, name: str, backend: str = "gloo", device: str = "cpu") -> None:
        self.spec = GroupSpec(name, backend, "127.0.0.1", free_port(), world_size=2, rank_offset=1)
        self._device = device
        self._group = None
        self._store = None

    def join(self, seconds: float = 20.0) -> None:
        """Join. gloo: blocks until the engine does; NCCL: meets it at the first broadcast."""
        from torch.distributed import TCPStore
        from torch.distributed import distributed_c10d as c10d

        if self.spec.backend == "nccl":
            _prepare_nccl()
        wait = timedelta(seconds=seconds)
        store = TCPStore("127.0.0.1", self.spec.master_port, 2, True, wait, wait_for_workers=False)
        self._group, _ = c10d._new_process_group_helper(
            2,
            0,
            [],
            c10d.Backend(self.spec.backend),
            c10d.PrefixStore(self.spec.name, store),
            group_name=self.spec.name,
            timeout=wait,
        )
        c10d._world.pg_group_ranks[self._group] = {0: 0, 1: 1}
        self._store = store

    def send(self, tensors: dict, seconds: float = 20.0) -> None:
        """Broadcast the bytes of `tensors` (name -> torch tensor) one after the other, as one flat tensor.

        Raises TimeoutError when they did not leave within `seconds` (NCCL: the group is aborted then)."""
        import torch

        flat = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors.values()])
        if self.spec.backend != "nccl":
            self._group.broadcast(flat, 0).wait(timedelta(seconds=seconds))
            return
        device = torch.device(self._device)
        torch.cuda.set_device(device)
        deadline = time.monotonic() + seconds
        with torch.cuda.stream(torch.cuda.Stream(device)):
            self._group.broadcast(flat.to(device), 0).wait()  # orders streams, waits for nothing
            sent = torch.cuda.Event()
            sent.record()
            while not sent.query():
                if time.monotonic() > deadline:
                    self.abort()
                    raise TimeoutError(f"group {self.spec.name}: no broadcast within {seconds:g} s")
                time.sleep(0.001)

    def abort(self) -> None:
        """End what NCCL has under way. Without a communicator there is nothing to end."""
        import torch

        if self._group is not None and self.spec.backend == "nccl":
            with contextlib.suppress(RuntimeError):
                self._group._get_backend(torch.device(self._device)).abort()

    def leave(self) -> None:
        """Leave the group and close its store; the engine's side sees closed connections."""
        import torch.distributed

        self.abort()
        if self._group is not None:
            with contextlib.suppress(RuntimeError):  # aborted
                torch.distributed.destroy_process_group(self._group)
        self._group = None
        self._store = None
        gc.collect()


def _prepare_nccl() -> None:
    """What the trainer sets as well: agreement with the engine, and no watchdog that ends this process."""
    from services.trainer.ranks.groups import NCCL_WATCHDOG_OFF

    for name, value in (COLLECTIVE_ENV | NCCL_WATCHDOG_OFF).items():
        os.environ.setdefault(name, value)


def tensor_specs(tensors: dict) -> list[TensorSpec]:
    """Specs of torch tensors by name."""
    return [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()]


def raw_bytes(tensor):
    """A torch tensor as uint8 [any] of the same bytes."""
    import torch

    return tensor.contiguous().flatten().view(torch.uint8)


def tensor_bytes(tensor) -> bytes:
    """Raw bytes of a torch tensor."""
    return raw_bytes(tensor).numpy().tobytes()
