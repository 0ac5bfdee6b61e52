"""Staging in an SGLang server, by its own extension point for weights; the simulated engine has the same.

The server is started with `--custom-weight-loader` and the receiver's path. `/update_weights_from_tensor` with no
tensor and that path as load format has the scheduler of every rank call it: first it starts the receiver, later it
activates what was staged. All else goes to the receivers' sockets, and the scheduler serves on. Knows no updates.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from services.common.errors import ServiceError
from services.rollout.adapters.engine_http import HttpClient
from services.rollout.adapters.receiver_client import ReceiverSocket
from services.rollout.core.engine_port import Activation, Buckets, FilePiece, GroupSpec
from services.rollout.receiver.server import PATH

CONTROL_SECONDS, WARM_SECONDS = 30.0, 90.0
NO_TENSORS = base64.b64encode(pickle.dumps([])).decode()
"""What a rank is sent: the bytes come by another way."""


class SGLangStaging:
    """A `Staging` over the receivers of one engine.

    Args:
        client: of the engine's control API.
        environment: what the engine was started with, see `receiver_environment`.
        rank_count: tensor-parallel ranks, each with a receiver.
        algorithm: of checksums; empty: none are made.
    """

    def __init__(self, client: HttpClient, environment: Mapping[str, str], rank_count: int, algorithm: str) -> None:
        self._client = client
        self._algorithm = algorithm
        self.trusted = False
        self._sockets = [ReceiverSocket(environment, rank, client.subject) for rank in range(rank_count)]

    async def attach(self) -> None:
        """Has the ranks start their receivers, unless they have, and waits until each can take weights: an update would
        leave behind whoever still imports torch. On releases with update brackets it must lie between them. Raises
        ServiceError."""
        await self._call_loaders(CONTROL_SECONDS)
        await self._ask_all("warm", WARM_SECONDS)

    async def reserve(self, buckets: Buckets, timeout: float) -> None:
        plan = [[(spec.name, spec.dtype, spec.shape) for spec in bucket] for bucket in buckets]
        try:
            await self._ask_all("reserve", timeout, buckets=plan)
        except ServiceError:
            await self.drop()
            raise

    async def drop(self) -> None:
        await self._ask_all("drop", CONTROL_SECONDS)

    async def join_group(self, group: GroupSpec, timeout: float) -> None:
        meeting = asdict(group)
        meeting["rank"] = meeting.pop("rank_offset")  # each receiver adds its own
        await self._ask_all("join", timeout + 1.0, group=meeting, seconds=timeout)

    async def leave_group(self, name: str, timeout: float) -> None:
        await self._ask_all("leave", timeout, group=name)

    async def receive(self, epoch: int, group_name: str, timeout: float) -> float:
        answers = await self._ask_all("receive", timeout + 1.0, epoch=epoch, group=group_name, seconds=timeout)
        return max(answer["seconds"] for answer in answers)

    async def fill(self, epoch: int, pieces: Sequence[FilePiece], timeout: float) -> float:
        fields = {"epoch": epoch, "pieces": list(pieces), "seconds": timeout}
        return max(answer["seconds"] for answer in await self._ask_all("fill", timeout + 1.0, **fields))

    async def activate(self, epoch: int, timeout: float, *, repeat: bool, names: Sequence[str] = ()) -> Activation:
        wanted = {"epoch": epoch, "repeat": repeat, "names": list(names), "algorithm": self._algorithm}
        await self._ask_all("arm", timeout, **wanted)
        await self._call_loaders(timeout)
        answers = await self._ask_all("result", timeout)
        return Activation(answers[0]["how"], answers[0]["checksums"] or {})

    async def alive(self, timeout: float) -> bool:
        """True when every rank's process answers; never raises."""
        try:
            await self._ask_all("status", timeout)
        except ServiceError:
            return False
        return True

    async def ended(self) -> None:
        """Returns when the process of a rank has gone."""
        waiting = [asyncio.ensure_future(one.ended()) for one in self._sockets]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    async def _call_loaders(self, timeout: float) -> None:
        body = {
            "serialized_named_tensors": [NO_TENSORS] * len(self._sockets),
            "load_format": PATH,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await self._client.expect("POST", "/update_weights_from_tensor", body, timeout=timeout)

    async def _ask_all(self, command: str, timeout: float, **fields: Any) -> Sequence[dict[str, Any]]:
        """Every rank's answer; the first failure when one fails."""
        return await asyncio.gather(*(one.ask(command, timeout, **fields) for one in self._sockets))
