"""Calls of the console to buffer, trainer and rollout nodes. Every failure is a ServiceError with one sentence."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
from google.protobuf import duration_pb2
from tetrarch.buffer.v1 import buffer_service_pb2 as buffer_pb
from tetrarch.buffer.v1 import registry_service_pb2 as registry_pb
from tetrarch.buffer.v1 import run_pb2
from tetrarch.buffer.v1.buffer_service_pb2_grpc import BufferServiceStub
from tetrarch.buffer.v1.registry_service_pb2_grpc import RegistryServiceStub
from tetrarch.rollout.v1 import engine_pb2
from tetrarch.rollout.v1 import rollout_service_pb2 as rollout_pb
from tetrarch.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from tetrarch.trainer.v1 import trainer_service_pb2 as trainer_pb
from tetrarch.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

from services.common.channel import open_channel, translate_errors
from services.common.errors import Code, ServiceError


def _duration(seconds: float) -> duration_pb2.Duration:
    value = duration_pb2.Duration()
    value.FromMilliseconds(int(seconds * 1000))
    return value


@dataclass(frozen=True)
class GroupQuery:
    """Filters of ListGroups. `step` from 0; empty filters let everything pass."""

    states: tuple[int, ...] = ()
    step: int | None = None
    reasons: tuple[str, ...] = ()
    dataset: str = ""
    min_ordinal: int = 0


class Clients:
    """Use as an async context manager.

    Args:
        buffer: host:port.
        trainer: host:port; None where no call to it is made.
    """

    def __init__(self, buffer: str, trainer: str | None) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {"buffer": open_channel(buffer, "buffer")}
        self._buffer = BufferServiceStub(self._channels["buffer"])
        self._registry = RegistryServiceStub(self._channels["buffer"])
        self._trainer = None
        if trainer:
            self._channels["trainer"] = open_channel(trainer, "trainer")
            self._trainer = TrainerServiceStub(self._channels["trainer"])

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    # -- runs

    async def create_run(self, run_id: str, spec_json: str) -> buffer_pb.CreateRunResponse:
        """Creates a run or opens it again."""
        async with translate_errors():
            return await self._buffer.CreateRun(buffer_pb.CreateRunRequest(run_id=run_id, spec_json=spec_json))

    async def find_run(self, run_id: str) -> run_pb2.Run | None:
        """A run, or None when the buffer has none of that name."""
        try:
            async with translate_errors():
                return (await self._buffer.GetRun(buffer_pb.GetRunRequest(run_id=run_id))).run
        except ServiceError as error:
            if error.code is Code.NOT_FOUND:
                return None
            raise

    async def runs(self, count: int = 20) -> list[run_pb2.Run]:
        """Newest first."""
        async with translate_errors():
            return list((await self._buffer.ListRuns(buffer_pb.ListRunsRequest(page_size=count))).runs)

    async def stats(self, run_id: str) -> run_pb2.RunStats:
        """Counts of a run."""
        async with translate_errors():
            return (await self._buffer.GetStats(buffer_pb.GetStatsRequest(run_id=run_id))).stats

    async def finish_run(self, run_id: str, reason: str) -> run_pb2.Run:
        """Ends a run that no trainer holds as STOPPED."""
        request = buffer_pb.FinishRunRequest(run_id=run_id, state=run_pb2.RUN_STATE_STOPPED, reason=reason)
        async with translate_errors():
            return (await self._buffer.FinishRun(request)).run

    async def delete_run(self, run_id: str, force: bool) -> int:
        """Deletes a run from the store; keys deleted. Raises RUN_ACTIVE unless forced."""
        async with translate_errors():
            return (await self._buffer.DeleteRun(buffer_pb.DeleteRunRequest(run_id=run_id, force=force))).key_count

    async def watch_stats(self, run_id: str, interval: float) -> AsyncIterator[buffer_pb.WatchStatsResponse]:
        """Counts when they change, at most one every `interval` seconds, until the run ends."""
        request = buffer_pb.WatchStatsRequest(run_id=run_id, min_interval=_duration(interval))
        async with translate_errors():
            async for message in self._buffer.WatchStats(request):
                yield message

    # -- groups

    async def groups(self, run_id: str, query: GroupQuery, limit: int) -> list[run_pb2.GroupInfo]:
        """Groups in order of ordinal, at most `limit`, all pages."""
        found: list[run_pb2.GroupInfo] = []
        token = ""
        while len(found) < limit:
            request = buffer_pb.ListGroupsRequest(
                run_id=run_id,
                page_size=min(500, limit - len(found)),
                page_token=token,
                states=query.states,
                step=query.step,
                evict_reasons=query.reasons,
                dataset=query.dataset,
                min_ordinal=query.min_ordinal,
            )
            async with translate_errors():
                answer = await self._buffer.ListGroups(request)
            found.extend(answer.groups)
            token = answer.next_page_token
            if not token:
                break
        return found

    async def group(self, run_id: str, group_id: str) -> buffer_pb.GetGroupResponse:
        """A group with its prompt and, while stored, its samples."""
        async with translate_errors():
            return await self._buffer.GetGroup(buffer_pb.GetGroupRequest(run_id=run_id, group_id=group_id))

    # -- nodes

    async def members(self, tier: str = "rollout") -> list[registry_pb.Member]:
        """Live processes of a tier."""
        async with translate_errors():
            return list((await self._registry.ListMembers(registry_pb.ListMembersRequest(tier=tier))).members)

    def _node(self, address: str) -> RolloutServiceStub:
        if address not in self._channels:
            self._channels[address] = open_channel(address, "rollout")
        return RolloutServiceStub(self._channels[address])

    async def nodes(self, timeout: float = 3.0) -> list[engine_pb2.Node]:
        """Rollout nodes that answer."""
        found = []
        for member in await self.members():
            try:
                async with translate_errors():
                    answer = await self._node(member.address).GetNode(rollout_pb.GetNodeRequest(), timeout=timeout)
            except ServiceError:
                continue  # it is in the registry until its lease ends
            found.append(answer.node)
        return found

    async def evaluate(
        self, address: str, request: rollout_pb.EvaluateRequest
    ) -> AsyncIterator[rollout_pb.EvaluateResponse]:
        """Progress messages, then the result."""
        async with translate_errors():
            async for message in self._node(address).Evaluate(request):
                yield message

    # -- trainer

    @property
    def trainer(self) -> TrainerServiceStub:
        """Stub of the trainer."""
        assert self._trainer, "no trainer address was given"
        return self._trainer

    async def start_run(self, run_id: str) -> trainer_pb.Progress:
        """Starts or resumes a run."""
        async with translate_errors():
            return (await self.trainer.StartRun(trainer_pb.StartRunRequest(run_id=run_id))).progress

    async def stop_run(self, run_id: str, max_wait: float) -> trainer_pb.Progress:
        """Asks a run to stop after its step."""
        request = trainer_pb.StopRunRequest(run_id=run_id, max_wait=_duration(max_wait))
        async with translate_errors():
            return (await self.trainer.StopRun(request)).progress

    async def progress(self, run_id: str = "") -> trainer_pb.Progress | None:
        """Progress of a run (the active one when empty); None when the trainer knows none."""
        try:
            async with translate_errors():
                return (await self.trainer.GetProgress(trainer_pb.GetProgressRequest(run_id=run_id))).progress
        except ServiceError as error:
            if error.code is Code.NOT_FOUND:
                return None
            raise

    async def watch(self, run_id: str, after_event: int) -> AsyncIterator[trainer_pb.WatchProgressResponse]:
        """Progress from an event on until the run ends."""
        request = trainer_pb.WatchProgressRequest(run_id=run_id, after_event=after_event)
        async with translate_errors():
            async for message in self.trainer.WatchProgress(request):
                yield message

    async def export(self, run_id: str, path: str) -> trainer_pb.ExportModelResponse:
        """Writes a Hugging Face checkpoint on the trainer's host."""
        async with translate_errors():
            return await self.trainer.ExportModel(trainer_pb.ExportModelRequest(run_id=run_id, path=path))
