"""The buffer over gRPC. Implements `ports.Buffer`.

Every call is repeated while the buffer cannot be reached or its store is full, up to a deadline: a restart of either
is no end of a run. That is safe: all calls are idempotent, or only skip a number when repeated.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from tetrarch.buffer.v1 import (
    buffer_service_pb2,
    buffer_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
    run_pb2,
)

from services.common.channel import service_error
from services.common.errors import Code, ServiceError
from services.common.fault_points import reach_async
from services.common.sample_rows import sample_rows
from services.common.telemetry import get_logger
from services.trainer import convert
from services.trainer.core.records import Batch, GroupCounts, Run, Session

log = get_logger(__name__)

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 3.0
_CALL_SECONDS = 30.0
_RESTORE_SECONDS = 120.0


class GrpcBuffer:
    """Client of one buffer.

    Args:
        channel: to the buffer.
        address: of the buffer, for messages.
        patience: seconds for which an unreachable buffer is asked again.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, patience: float) -> None:
        self._buffer = buffer_service_pb2_grpc.BufferServiceStub(channel)
        self._registry = registry_service_pb2_grpc.RegistryServiceStub(channel)
        self._address = address
        self._patience = patience
        self._caller = f"{socket.gethostname()}-{os.getpid()}"

    async def _call(self, method, request, timeout: float = _CALL_SECONDS):
        """Answer of a call. Raises ServiceError: BUFFER_UNREACHABLE, or of a full store, only after `patience` s."""
        deadline, pause = time.monotonic() + self._patience, _FIRST_PAUSE
        while True:
            try:
                return await method(request, timeout=timeout)
            except grpc.aio.AioRpcError as error:
                failure = service_error(error)
            # A store that is full, or whose disk is, takes no writes until there is room.
            full = failure.code is Code.RESOURCE_EXHAUSTED and failure.retry_seconds is not None
            if not full and failure.code not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
                raise failure
            if time.monotonic() > deadline:
                if full:
                    raise failure
                raise ServiceError(
                    Code.UNAVAILABLE,
                    "BUFFER_UNREACHABLE",
                    f"The buffer at {self._address} did not answer for {self._patience:.0f} s: {failure.message}",
                    address=self._address,
                ) from failure
            what = "takes no writes" if full else "does not answer"
            log.warning(f"buffer {what}, trying again", address=self._address, error=failure.message)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def get_run(self, run_id: str) -> Run:
        """The run."""
        response = await self._call(self._buffer.GetRun, buffer_service_pb2.GetRunRequest(run_id=run_id))
        return convert.run_from_proto(response.run)

    async def active_runs(self) -> Sequence[Run]:
        """Active runs, newest first."""
        request = buffer_service_pb2.ListRunsRequest(states=[run_pb2.RUN_STATE_ACTIVE])
        response = await self._call(self._buffer.ListRuns, request)
        return [convert.run_from_proto(run) for run in response.runs]

    async def begin_session(self, run_id: str) -> Session:
        """Fences earlier trainers."""
        request = buffer_service_pb2.BeginSessionRequest(run_id=run_id, caller=self._caller)
        response = await self._call(self._buffer.BeginSession, request)
        return Session(response.trainer_epoch, convert.run_from_proto(response.run))

    async def finish_run(self, run_id: str, epoch: int, state: str, reason: str) -> Run:
        """Ends the run as FINISHED, FAILED or STOPPED."""
        request = buffer_service_pb2.FinishRunRequest(
            run_id=run_id, trainer_epoch=epoch, state=run_pb2.RunState.Value(f"RUN_STATE_{state}"), reason=reason
        )
        return convert.run_from_proto((await self._call(self._buffer.FinishRun, request)).run)

    async def take_batch(self, run_id: str, epoch: int, step: int, group_count: int, max_wait: float) -> Batch | None:
        """None when there are too few groups after `max_wait` seconds."""
        wait = Duration()
        wait.FromMilliseconds(int(max_wait * 1000))
        request = buffer_service_pb2.TakeBatchRequest(
            run_id=run_id, trainer_epoch=epoch, step=step, group_count=group_count, max_wait=wait
        )
        response = await self._call(self._buffer.TakeBatch, request, max_wait + _CALL_SECONDS)
        if not response.samples:
            return None
        await reach_async("trainer.before_optimizer")
        return convert.batch_from_proto(response)

    async def commit_step(self, run_id: str, epoch: int, step: int) -> int:
        """Groups consumed."""
        request = buffer_service_pb2.CommitStepRequest(run_id=run_id, trainer_epoch=epoch, step=step)
        await reach_async("trainer.after_optimizer")
        answer = await self._call(self._buffer.CommitStep, request)
        await reach_async("trainer.after_commit_step")
        return answer.group_count

    async def record_checkpoint(self, run_id: str, epoch: int, step: int, path: str) -> None:
        """The state after `step` is safe."""
        request = buffer_service_pb2.RecordCheckpointRequest(run_id=run_id, trainer_epoch=epoch, step=step, path=path)
        await reach_async("trainer.after_checkpoint")
        await self._call(self._buffer.RecordCheckpoint, request)

    async def restore_run(self, run_id: str, epoch: int, step: int) -> tuple[int, int]:
        """(groups returned to READY, leases cancelled)."""
        request = buffer_service_pb2.RestoreRunRequest(run_id=run_id, trainer_epoch=epoch, step=step)
        response = await self._call(self._buffer.RestoreRun, request, _RESTORE_SECONDS)
        return response.returned_group_count, response.released_lease_count

    async def reserve_version(self, run_id: str, epoch: int) -> int:
        """A version above all before."""
        request = buffer_service_pb2.ReserveVersionRequest(run_id=run_id, trainer_epoch=epoch)
        return (await self._call(self._buffer.ReserveVersion, request)).version

    async def publish_version(self, run_id: str, epoch: int, version: int, step_count: int) -> None:
        """Makes a version current."""
        request = buffer_service_pb2.PublishVersionRequest(
            run_id=run_id, trainer_epoch=epoch, version=version, step_count=step_count
        )
        await self._call(self._buffer.PublishVersion, request)

    async def group_rows(self, run_id: str, group_ids: Sequence[str], step: int) -> list[dict[str, Any]]:
        """Samples of groups whose tokens are stored, as rows of a file."""
        rows: list[dict[str, Any]] = []
        for group_id in group_ids:
            request = buffer_service_pb2.GetGroupRequest(run_id=run_id, group_id=group_id)
            rows += sample_rows(await self._call(self._buffer.GetGroup, request), run_id, step)
        return rows

    async def counts(self, run_id: str) -> GroupCounts:
        """Groups by state."""
        response = await self._call(self._buffer.GetStats, buffer_service_pb2.GetStatsRequest(run_id=run_id))
        return convert.counts_from_proto(response.stats)

    async def rollout_addresses(self) -> list[str]:
        """host:port of every live rollout node."""
        request = registry_service_pb2.ListMembersRequest(tier="rollout")
        response = await self._call(self._registry.ListMembers, request)
        return [member.address for member in response.members]

    async def register(self, address: str, incarnation: str, ttl: float, run_id: str) -> None:
        """Renews this trainer's own lease in the registry, once."""
        lease = Duration()
        lease.FromMilliseconds(int(ttl * 1000))
        member = registry_service_pb2.Member(
            member_id=f"trainer-{address}",
            tier="trainer",
            address=address,
            incarnation=incarnation,
            attributes={"run_id": run_id},
        )
        request = registry_service_pb2.RegisterMemberRequest(member=member, ttl=lease)
        try:
            await self._registry.RegisterMember(request, timeout=ttl)
        except grpc.aio.AioRpcError as error:
            raise service_error(error) from error
