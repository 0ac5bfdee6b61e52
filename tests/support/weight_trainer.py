"""A trainer's side of weight updates as a process of its own, which a test kills: real groups, updater and client.

Forked from a server that has imported torch once, as twenty of them would else take minutes. Its moments: "committed"
(its groups stand idle), "prepared" (engines wait for bytes that never come), "sending" (some buckets are there).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tetrarch.buffer.v1 import buffer_service_pb2, buffer_service_pb2_grpc

from services.common.channel import open_channel
from services.trainer.adapters.rollout_client import GrpcRollout
from services.trainer.ranks.weights import StagedWeights
from tests.support.weight_rank import WeightRank, updater

MOMENTS = ("committed", "prepared", "sending")


@dataclass(frozen=True)
class Where:
    """What a trainer is told."""

    run_id: str
    buffer_address: str
    node_address: str
    checkpoint: Path


class _Stalling:
    """Staged weights of which no more than `count` buckets are ever gathered: a `groups.Source`."""

    def __init__(self, staged: StagedWeights, count: int, reached: threading.Event) -> None:
        self.buckets, self._count, self._reached = staged.buckets, count, reached

    def gathered(self, index: int) -> bool:
        if index < self._count:
            return True
        self._reached.set()
        return False

    def mark(self, index: int) -> None:
        return None


class TrainerProcess:
    """One life of a trainer, which pushes a version of its own and then stands still at `moment`."""

    def __init__(self, where: Where, moment: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(where, moment, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def report(self, seconds: float = 60.0) -> dict[str, Any]:
        """What it says once it is there. Raises TimeoutError."""
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"no word from a trainer in {seconds:g} s")
        return self._pipe.recv()

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(10.0)
        self._pipe.close()


def _main(where: Where, moment: str, pipe: Connection) -> None:
    asyncio.run(_push(where, moment, pipe))


async def _push(where: Where, moment: str, pipe: Connection) -> None:
    stub = buffer_service_pb2_grpc.BufferServiceStub(open_channel(where.buffer_address, "buffer"))
    begun = await stub.BeginSession(buffer_service_pb2.BeginSessionRequest(run_id=where.run_id, caller="test"))
    epoch = begun.trainer_epoch
    request = buffer_service_pb2.ReserveVersionRequest(run_id=where.run_id, trainer_epoch=epoch)
    version = (await stub.ReserveVersion(request)).version

    async def nodes() -> list[str]:
        return [where.node_address]

    rollout = GrpcRollout(nodes)
    tensors = load_file(where.checkpoint / "model.safetensors")
    rank = WeightRank({name: tensor + 0.001 * version for name, tensor in tensors.items()})
    reached = threading.Event()
    if moment != "committed":
        rank.alter = lambda _, staged: _Stalling(staged, ("prepared", "sending").index(moment) * 2, reached)
    pusher = updater(rank, rollout, where.run_id, epoch, bucket_bytes=50_000)
    await pusher.stage()
    engines = [engine for node in await rollout.nodes() for engine in node.engines if engine.joinable]
    pushing = asyncio.create_task(pusher.push(version, engines))
    if moment == "committed":
        report = await pushing
        pipe.send({"version": version, "committed": report.committed, "failed": report.failed})
    else:
        await asyncio.to_thread(reached.wait, 60.0)
        await asyncio.sleep(0.05)
        pipe.send({"version": version, "committed": [], "failed": {}, "pushing": not pushing.done()})
    await asyncio.sleep(120.0)
