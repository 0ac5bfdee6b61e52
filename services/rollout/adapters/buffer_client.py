"""The buffer over gRPC: prompts in, groups out, and the registry of live members."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

import grpc
from google.protobuf import duration_pb2
from tetrarch.buffer.v1 import (
    buffer_service_pb2,
    buffer_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
    run_pb2,
)
from tetrarch.common.v1 import sample_pb2

from services.common.channel import translate_errors
from services.common.convert import group_to_proto, prompt_from_proto, sample_from_proto
from services.common.errors import ServiceError
from services.common.fault_points import reach_async
from services.common.records import Group, Prompt
from services.rollout.adapters.side_payloads import put_side_payloads
from services.rollout.core.ports import ActiveRun, Lease, PutResult

_CALL_SLACK = 5.0
"""Seconds between the longest wait a call asks for and its deadline."""
_PAGE_SIZE = 256
_NONE = ("", "")


def _duration(seconds: float) -> duration_pb2.Duration:
    message = duration_pb2.Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def _group_from_proto(message: sample_pb2.Group) -> Group:
    return Group(message.group_id, message.ordinal, tuple(sample_from_proto(sample) for sample in message.samples))


class GrpcBuffer:
    """`PromptBuffer` over a channel.

    Args:
        channel: to the buffer service.
        node_id: the caller named on leases.
        member_ttl: seconds until this node counts as gone unless renewed.
    """

    def __init__(self, channel: grpc.aio.Channel, node_id: str, member_ttl: float) -> None:
        self._buffer = buffer_service_pb2_grpc.BufferServiceStub(channel)
        self._registry = registry_service_pb2_grpc.RegistryServiceStub(channel)
        self._node_id = node_id
        self._member_ttl = member_ttl
        self._unanswered = _NONE
        """Run and id of a lease request whose answer did not come."""

    async def newest_active_run(self) -> ActiveRun | None:
        """See `PromptBuffer`."""
        request = buffer_service_pb2.ListRunsRequest(page_size=1, states=[run_pb2.RUN_STATE_ACTIVE])
        async with translate_errors():
            runs = (await self._buffer.ListRuns(request)).runs
        if not runs:
            return None
        run = runs[0]
        return ActiveRun(run.run_id, run.spec_json, run.create_time.ToJsonString(), run.policy_version)

    async def lease_prompts(self, run_id: str, max_count: int, max_wait: float, ttl: float) -> list[Lease]:
        """See `PromptBuffer`. A request whose answer was lost is made again: prompts that it was given would else be
        nobody's until their lease expires."""
        (asked_run, request_id), self._unanswered = self._unanswered, _NONE
        if asked_run != run_id:
            request_id = str(uuid.uuid4())
        request = buffer_service_pb2.LeasePromptsRequest(
            run_id=run_id,
            request_id=request_id,
            caller=self._node_id,
            max_prompt_count=max_count,
            max_wait=_duration(max_wait),
            ttl=_duration(ttl),
        )
        try:
            async with translate_errors():
                response = await self._buffer.LeasePrompts(request, timeout=max_wait + _CALL_SLACK)
        except ServiceError:
            self._unanswered = (run_id, request_id)
            raise
        if response.leases:
            await reach_async("node.holding_leases")
        return [
            Lease(
                item.lease_id,
                prompt_from_proto(item.prompt),
                item.attempt,
                _group_from_proto(item.partial) if item.HasField("partial") else None,
            )
            for item in response.leases
        ]

    async def extend_leases(self, run_id: str, lease_ids: Sequence[str], ttl: float) -> set[str]:
        """See `PromptBuffer`."""
        request = buffer_service_pb2.ExtendLeasesRequest(run_id=run_id, lease_ids=lease_ids, ttl=_duration(ttl))
        async with translate_errors():
            return set((await self._buffer.ExtendLeases(request)).lost_lease_ids)

    async def release_leases(
        self, run_id: str, lease_ids: Sequence[str], evict_reason: str = "", *, unharmed: bool = False,
        partials: Mapping[str, Group] | None = None,
    ) -> None:  # fmt: skip
        """See `PromptBuffer`."""
        request = buffer_service_pb2.ReleaseLeasesRequest(
            run_id=run_id, lease_ids=lease_ids, evict_reason=evict_reason, drained=unharmed,
            partial_groups=[
                buffer_service_pb2.LeasedGroup(lease_id=lease_id, group=group_to_proto(group))
                for lease_id, group in (partials or {}).items()
            ],
        )  # fmt: skip
        async with translate_errors():
            await self._buffer.ReleaseLeases(request)

    async def put_groups(self, run_id: str, groups: Sequence[tuple[str, Group]]) -> list[PutResult]:
        """See `PromptBuffer`."""
        lost = [
            group.group_id
            for lease_id, group in groups
            if not await put_side_payloads(self._buffer, run_id, lease_id, group)
        ]
        request = buffer_service_pb2.PutGroupsRequest(
            run_id=run_id,
            groups=[
                buffer_service_pb2.LeasedGroup(lease_id=lease_id, group=group_to_proto(group))
                for lease_id, group in groups
            ],
        )
        async with translate_errors():
            response = await self._buffer.PutGroups(request)
        await reach_async("node.mid_put")
        name = buffer_service_pb2.PutOutcome.Name
        results = [
            PutResult(item.group_id, name(item.outcome).removeprefix("PUT_OUTCOME_"), item.message)
            for item in response.results
        ]
        # A lease that ended takes no side payload either: its group lacks them, unless an earlier put had stored it.
        return [
            replace(result, outcome="LEASE_LOST") if result.group_id in lost and result.outcome == "INVALID" else result
            for result in results
        ]

    async def eval_prompts(self, run_id: str, dataset: str) -> AsyncIterator[list[Prompt]]:
        """See `PromptBuffer`."""
        token = ""
        while True:
            request = buffer_service_pb2.ListEvalPromptsRequest(
                run_id=run_id, dataset=dataset, page_size=_PAGE_SIZE, page_token=token
            )
            async with translate_errors():
                response = await self._buffer.ListEvalPrompts(request)
            yield [prompt_from_proto(prompt) for prompt in response.prompts]
            token = response.next_page_token
            if not token:
                return

    async def register(self, member_id: str, address: str, incarnation: str, attributes: Mapping[str, str]) -> None:
        """See `PromptBuffer`."""
        member = registry_service_pb2.Member(
            member_id=member_id, tier="rollout", address=address, incarnation=incarnation, attributes=dict(attributes)
        )
        request = registry_service_pb2.RegisterMemberRequest(member=member, ttl=_duration(self._member_ttl))
        async with translate_errors():
            await self._registry.RegisterMember(request)

    async def unregister(self, member_id: str) -> None:
        """See `PromptBuffer`."""
        async with translate_errors():
            await self._registry.RemoveMember(registry_service_pb2.RemoveMemberRequest(member_id=member_id))
