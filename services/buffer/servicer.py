"""BufferService and RegistryService: convert, call the core, convert. No logic.

Invariant: a call that may wait ends before the caller's own deadline.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc
from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.buffer.v1 import buffer_service_pb2_grpc, registry_service_pb2, registry_service_pb2_grpc

from services.buffer import convert, wire
from services.buffer.core import ids
from services.buffer.core.buffer import Buffer
from services.buffer.core.ports import MemberStore
from services.buffer.core.records import LeaseRequest
from services.buffer.core.waiting import ahead
from services.buffer.pack import pack_groups, pack_partial_groups
from services.common.convert import prompt_to_proto
from services.common.errors import invalid_field
from services.common.fault_points import reach_async

_ANSWER_SECONDS = 0.5
_LONGEST_WAIT = 600.0
_CHUNK_BYTES = 1 << 20
_PAGE_BYTES = 8 << 20


def _wait(asked: float, context: grpc.aio.ServicerContext) -> float:
    """Seconds a call may wait: as asked, but with time left to answer."""
    left = context.time_remaining()
    longest = _LONGEST_WAIT if left is None else left - _ANSWER_SECONDS
    return max(0.0, min(asked, longest))


def _page(size: int, token: str, default: int, most: int) -> tuple[int, int]:
    """(start, count) of a page. Raises INVALID_FIELD."""
    if size < 0:
        raise invalid_field("page_size", size, "use 0 for the default, or more")
    if token and not (token.isascii() and token.isdigit()):
        raise invalid_field("page_token", token, "use the next_page_token of the page before")
    return int(token or 0), min(size or default, most)


class BufferServicer(buffer_service_pb2_grpc.BufferServiceServicer):
    """The buffer's calls."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    async def CreateRun(self, request, context):
        """Creates or reopens a run."""
        plan, spec_json = convert.plan_of(ids.check_run_id(request.run_id), request.spec_json)
        answer = await self._buffer.create_run(request.run_id, spec_json, plan)
        return pb.CreateRunResponse(
            run=convert.run_to_proto(answer.run),
            created=answer.created,
            row_count=answer.run.row_count,
            skipped_row_count=answer.run.skipped_count,
        )

    async def GetRun(self, request, context):
        """Returns a run."""
        return pb.GetRunResponse(run=convert.run_to_proto(await self._buffer.get_run(request.run_id)))

    async def ListRuns(self, request, context):
        """Lists runs."""
        start, count = _page(request.page_size, request.page_token, 100, 1000)
        states = [convert.run_state(state) for state in request.states]
        runs, more = await self._buffer.list_runs(states, start, count)
        return pb.ListRunsResponse(
            runs=[convert.run_to_proto(run) for run in runs], next_page_token=str(start + count) if more else ""
        )

    async def FinishRun(self, request, context):
        """Ends a run."""
        state = convert.run_state(request.state)
        run = await self._buffer.finish_run(request.run_id, state, request.reason, request.trainer_epoch)
        return pb.FinishRunResponse(run=convert.run_to_proto(run))

    async def DeleteRun(self, request, context):
        """Deletes a run."""
        count = await self._buffer.delete_run(request.run_id, force=request.force)
        return pb.DeleteRunResponse(key_count=count)

    async def BeginSession(self, request, context):
        """Opens a trainer session."""
        epoch, run = await self._buffer.begin_session(request.run_id, request.caller)
        return pb.BeginSessionResponse(trainer_epoch=epoch, run=convert.run_to_proto(run))

    async def LeasePrompts(self, request, context):
        """Leases prompts."""
        wish = LeaseRequest(request.request_id, request.caller, request.max_prompt_count, convert.seconds(request.ttl))
        wait = _wait(convert.seconds(request.max_wait), context)
        return convert.leases_to_proto(await self._buffer.lease_prompts(request.run_id, wish, wait))

    async def ExtendLeases(self, request, context):
        """Moves deadlines."""
        ttl = convert.seconds(request.ttl)
        deadline, lost = await self._buffer.extend_leases(request.run_id, request.lease_ids, ttl)
        return pb.ExtendLeasesResponse(expire_time=convert.timestamp(deadline), lost_lease_ids=lost)

    async def ReleaseLeases(self, request, context):
        """Gives leases back."""
        partials = []
        if request.partial_groups:
            count = await self._buffer.samples_per_group(request.run_id)
            partials = pack_partial_groups(request.partial_groups, request.run_id, count)
        count, lost = await self._buffer.release_leases(
            request.run_id, request.lease_ids, request.evict_reason, partials, drained=request.drained
        )
        return pb.ReleaseLeasesResponse(released_count=count, lost_lease_ids=lost)

    async def PutGroups(self, request, context):
        """Stores finished groups."""
        count = await self._buffer.samples_per_group(request.run_id)
        packed = pack_groups(request.groups, request.run_id, count)
        results = await self._buffer.put_groups(request.run_id, packed)
        await reach_async("buffer.after_put")
        return convert.put_results_to_proto(results)

    async def PutSidePayload(self, request, context):
        """Stores rows of a side payload."""
        shape, rows = convert.side_rows_from_proto(request)
        await self._buffer.side.put(
            request.run_id, request.lease_id, request.sample_id, (shape, request.payload.SerializeToString(), rows)
        )
        return pb.PutSidePayloadResponse()

    async def FetchSidePayloads(self, request, context) -> AsyncIterator[pb.FetchSidePayloadsResponse]:
        """Streams rows of side payloads."""
        for sample_id in request.sample_ids:
            meta = await self._buffer.side.meta(request.run_id, sample_id, request.name)
            payload, shape = convert.side_payload_of(meta)
            start, end = convert.row_range(request, shape.row_count)
            async for rows in self._buffer.side.rows(request.run_id, sample_id, shape, start, end):
                yield convert.side_rows_to_proto(sample_id, payload, rows)

    async def TakeBatch(self, request, context):
        """Reserves a batch."""
        wait = _wait(convert.seconds(request.max_wait), context)
        batch = await self._buffer.take_batch(
            request.run_id, request.trainer_epoch, request.step, request.group_count, wait
        )
        return convert.batch_to_proto(batch)

    async def FetchSamples(self, request, context) -> AsyncIterator[bytes]:
        """Streams samples in messages of about one MiB, serialized already: see `add_buffer_service`."""
        async with contextlib.aclosing(self._buffer.fetch_samples(request.run_id, request.sample_ids)) as parts:
            async for part in ahead(parts):
                for message in wire.samples_responses(part, _CHUNK_BYTES):
                    yield message

    async def CommitStep(self, request, context):
        """Marks a step's groups CONSUMED."""
        count = await self._buffer.commit_step(request.run_id, request.trainer_epoch, request.step)
        await reach_async("buffer.after_commit_step")
        return pb.CommitStepResponse(group_count=count)

    async def RecordCheckpoint(self, request, context):
        """Records a checkpoint."""
        frontier = await self._buffer.record_checkpoint(
            request.run_id, request.trainer_epoch, request.step, request.path
        )
        return pb.RecordCheckpointResponse(frontier_ordinal=frontier)

    async def RestoreRun(self, request, context):
        """Rolls a run back."""
        returned, released = await self._buffer.restore_run(request.run_id, request.trainer_epoch, request.step)
        return pb.RestoreRunResponse(returned_group_count=returned, released_lease_count=released)

    async def ReserveVersion(self, request, context):
        """Hands out a version."""
        version = await self._buffer.reserve_version(request.run_id, request.trainer_epoch)
        return pb.ReserveVersionResponse(version=version)

    async def PublishVersion(self, request, context):
        """Makes a version current."""
        await self._buffer.publish_version(request.run_id, request.trainer_epoch, request.version, request.step_count)
        return pb.PublishVersionResponse()

    async def GetStats(self, request, context):
        """Counts a run."""
        return pb.GetStatsResponse(stats=convert.stats_to_proto(await self._buffer.stats(request.run_id)))

    async def WatchStats(self, request, context) -> AsyncIterator[pb.WatchStatsResponse]:
        """Streams counts."""
        interval = convert.seconds(request.min_interval) or 1.0
        if not 0.01 <= interval <= 3600:
            raise invalid_field("min_interval", interval, "use 0.01 to 3600 seconds, or 0 for one second")
        async for stats in self._buffer.watch(request.run_id, interval):
            yield pb.WatchStatsResponse(
                stats=convert.stats_to_proto(stats), state=convert.run_state_to_proto(stats.state)
            )

    async def ListGroups(self, request, context):
        """Lists groups."""
        start, count = _page(request.page_size, request.page_token, 50, 500)
        start = max(start, request.min_ordinal)
        wanted = convert.group_filter(request)
        groups, more = await self._buffer.list_groups(request.run_id, start, count, wanted)
        return pb.ListGroupsResponse(
            groups=[convert.group_info(group) for group in groups],
            next_page_token=str(groups[-1].ordinal + 1) if more else "",
        )

    async def GetGroup(self, request, context):
        """Returns a group."""
        record, prompt, stored = await self._buffer.get_group(request.run_id, request.group_id)
        return pb.GetGroupResponse(
            info=convert.group_info(record),
            prompt=prompt_to_proto(prompt),
            group=convert.stored_group_to_proto(stored) if stored else None,
        )

    async def ListEvalPrompts(self, request, context):
        """Reads prompts of an evaluation set."""
        start, count = _page(request.page_size, request.page_token, 256, 1024)
        prompts, total = await self._buffer.eval_prompts(request.run_id, request.dataset, start, count)
        response, size = pb.ListEvalPromptsResponse(), 0
        for prompt in prompts:
            message = prompt_to_proto(prompt)
            size += message.ByteSize()
            if size > _PAGE_BYTES and response.prompts:
                break
            response.prompts.append(message)
        reached = start + len(response.prompts)
        response.next_page_token = str(reached) if reached < total else ""
        return response


def add_buffer_service(servicer: BufferServicer, server: grpc.aio.Server) -> None:
    """Adds the service as the generated function does, but FetchSamples, which yields serialized messages."""
    fetch = grpc.unary_stream_rpc_method_handler(
        servicer.FetchSamples, request_deserializer=pb.FetchSamplesRequest.FromString, response_serializer=None
    )
    name = pb.DESCRIPTOR.services_by_name["BufferService"].full_name
    # Of two handlers for a method the one added first answers.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"FetchSamples": fetch}),))
    buffer_service_pb2_grpc.add_BufferServiceServicer_to_server(servicer, server)


class RegistryServicer(registry_service_pb2_grpc.RegistryServiceServicer):
    """The registry's calls."""

    def __init__(self, members: MemberStore, buffer: Buffer) -> None:
        self._members = members
        self._buffer = buffer

    async def RegisterMember(self, request, context):
        """Adds or renews a member."""
        ttl = convert.seconds(request.ttl)
        if not 0 < ttl <= 3600:
            raise invalid_field("ttl", ttl, "use more than 0 and at most 3600 seconds")
        member = convert.member_from_proto(request.member)
        expire, again = await self._members.register(member, ttl)
        if again:
            await self._buffer.reclaim(member.member_id)
        return registry_service_pb2.RegisterMemberResponse(expire_time=convert.timestamp(expire))

    async def RemoveMember(self, request, context):
        """Removes a member."""
        await self._members.remove(request.member_id)
        return registry_service_pb2.RemoveMemberResponse()

    async def ListMembers(self, request, context):
        """Lists live members."""
        start, count = _page(request.page_size, request.page_token, 500, 1000)
        members = await self._members.members(request.tier)
        return registry_service_pb2.ListMembersResponse(
            members=[convert.member_to_proto(member) for member in members[start : start + count]],
            next_page_token=str(start + count) if start + count < len(members) else "",
        )
