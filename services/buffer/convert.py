"""Messages of `tetrarch.buffer.v1` ⇄ the buffer's values; `pack` does the same for finished groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

from google.protobuf import duration_pb2, timestamp_pb2
from pydantic import ValidationError
from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.buffer.v1 import registry_service_pb2, run_pb2
from tetrarch.common.v1 import sample_pb2, tensor_pb2

from services.buffer.core.plan import RunPlan, make_plan
from services.buffer.core.records import (
    Batch,
    GroupFilter,
    GroupRecord,
    GroupState,
    Leases,
    Member,
    PutResult,
    RunRecord,
    RunState,
    SideRows,
    SideShape,
    Stats,
    StoredGroup,
)
from services.buffer.pack import side_shape
from services.common.convert import prompt_to_proto
from services.common.errors import Code, ServiceError, invalid_field
from services.common.run_spec import RunSpec
from services.common.settings import explain

_SIDE_PIECE_BYTES = 1 << 20


def seconds(message: duration_pb2.Duration) -> float:
    """Seconds of a Duration."""
    return message.seconds + message.nanos / 1e9


def timestamp(milliseconds: int) -> timestamp_pb2.Timestamp:
    """Timestamp of Unix milliseconds."""
    return timestamp_pb2.Timestamp(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)


def plan_of(run_id: str, spec_json: str) -> tuple[RunPlan, str]:
    """(plan, resolved settings as JSON under this run id). Raises INVALID_FIELD with one sentence."""
    try:
        spec = RunSpec.model_validate_json(spec_json)
    except ValidationError as error:
        raise ServiceError(
            Code.INVALID_ARGUMENT, "INVALID_FIELD", explain(error, RunSpec), field="spec_json"
        ) from error
    spec = spec.model_copy(update={"run_id": run_id})
    return make_plan(spec), spec.model_dump_json()


def run_to_proto(run: RunRecord) -> run_pb2.Run:
    """Message of a run."""
    return run_pb2.Run(
        run_id=run.run_id,
        state=run_state_to_proto(run.state),
        reason=run.reason,
        create_time=timestamp(run.created_ms),
        policy_version=run.policy_version,
        committed_step=run.committed_step,
        checkpoint_step=run.checkpoint_step,
        checkpoint_path=run.checkpoint_path,
        trainer_epoch=run.trainer_epoch,
        reserved_version=run.reserved_version,
        spec_json=run.spec_json,
        checkpoints=[
            run_pb2.Checkpoint(step=one.step, path=one.path, frontier_ordinal=one.frontier) for one in run.checkpoints
        ],
    )


def run_state_to_proto(state: RunState) -> run_pb2.RunState:
    """Enum value of a state."""
    return run_pb2.RunState.Value(f"RUN_STATE_{state.value}")


def run_state(value: int) -> RunState:
    """State of an enum value. Raises INVALID_FIELD."""
    if value not in run_pb2.RunState.values() or value == run_pb2.RUN_STATE_UNSPECIFIED:
        raise invalid_field("state", value, "use ACTIVE, FINISHED, FAILED or STOPPED")
    return RunState(run_pb2.RunState.Name(value).removeprefix("RUN_STATE_"))


def group_state(value: int) -> GroupState:
    """State of an enum value. Raises INVALID_FIELD."""
    if value not in run_pb2.GroupState.values() or value == run_pb2.GROUP_STATE_UNSPECIFIED:
        known = ", ".join(state.value for state in GroupState)
        raise invalid_field("states", value, f"use some of {known}")
    return GroupState(run_pb2.GroupState.Name(value).removeprefix("GROUP_STATE_"))


def group_filter(request: pb.ListGroupsRequest) -> GroupFilter:
    """Which groups are asked for. Raises INVALID_FIELD."""
    return GroupFilter(
        states=tuple(group_state(state) for state in request.states),
        step=request.step if request.HasField("step") else None,
        evict_reasons=tuple(request.evict_reasons),
        dataset=request.dataset,
    )


def leases_to_proto(leases: Leases) -> pb.LeasePromptsResponse:
    """Response of LeasePrompts."""
    return pb.LeasePromptsResponse(
        leases=[
            pb.PromptLease(
                lease_id=lease.grant.lease_id,
                prompt=prompt_to_proto(lease.prompt),
                attempt=lease.grant.attempt,
                partial=stored_group_to_proto(lease.partial) if lease.partial else None,
            )
            for lease in leases.leases
        ],
        expire_time=timestamp(leases.expire_ms),
        policy_version=leases.policy_version,
    )


def put_results_to_proto(results: Sequence[PutResult]) -> pb.PutGroupsResponse:
    """Response of PutGroups."""
    return pb.PutGroupsResponse(
        results=[
            pb.PutResult(
                group_id=result.group_id,
                outcome=pb.PutOutcome.Value(f"PUT_OUTCOME_{result.outcome.value}"),
                message=result.message,
            )
            for result in results
        ]
    )


def batch_to_proto(batch: Batch) -> pb.TakeBatchResponse:
    """Response of TakeBatch."""
    response = pb.TakeBatchResponse.FromString(batch.headers)
    response.ready_group_count = batch.ready_count
    response.stale_group_count = batch.stale_count
    response.policy_version = batch.policy_version
    return response


def samples_to_proto(samples: Sequence[bytes]) -> list[sample_pb2.Sample]:
    """Messages of packed samples."""
    return [sample_pb2.Sample.FromString(sample) for sample in samples]


def stats_to_proto(stats: Stats) -> run_pb2.RunStats:
    """Message of the counts."""
    return run_pb2.RunStats(
        drawn_count=stats.drawn,
        pending_count=stats.pending,
        leased_count=stats.leased,
        ready_count=stats.ready,
        reserved_count=stats.reserved,
        consumed_count=stats.consumed,
        evicted_count=stats.evicted,
        evicted_by_reason=stats.evicted_by_reason,
        lease_expired_count=stats.lease_expired,
        stale_count=stats.stale,
        staleness_histogram=stats.staleness,
        capacity=stats.capacity,
        payload_bytes=stats.payload_bytes,
        policy_version=stats.policy_version,
        row_count=stats.row_count,
        oldest_age_seconds=stats.oldest_age_seconds,
        drawn_by_dataset=stats.drawn_by_dataset,
        store_used_bytes=stats.store_used_bytes,
        store_limit_bytes=stats.store_limit_bytes,
    )


def group_info(group: GroupRecord) -> run_pb2.GroupInfo:
    """Message of a group's state."""
    return run_pb2.GroupInfo(
        group_id=group.group_id,
        ordinal=group.ordinal,
        epoch=group.epoch,
        state=run_pb2.GroupState.Value(f"GROUP_STATE_{group.state.value}"),
        step=group.step,
        caller=group.caller,
        expire_time=timestamp(group.expire_ms) if group.expire_ms is not None else None,
        evict_reason=group.evict_reason,
        lease_count=group.lease_count,
        min_version=group.min_version,
        rewards=[math.nan if reward is None else reward for reward in group.rewards],
        mean_response_length=group.mean_response_length,
        dataset=group.dataset,
    )


def stored_group_to_proto(stored: StoredGroup) -> sample_pb2.Group:
    """Message of a stored group."""
    group = sample_pb2.Group.FromString(stored.summary)
    group.samples.extend(samples_to_proto(stored.samples))
    return group


def member_from_proto(message: registry_service_pb2.Member) -> Member:
    """Member of a message. Raises INVALID_FIELD."""
    for name in ("member_id", "tier", "address"):
        if not getattr(message, name):
            raise invalid_field(f"member.{name}", "", "it must be set")
    return Member(message.member_id, message.tier, message.address, message.incarnation, dict(message.attributes))


def member_to_proto(member: Member) -> registry_service_pb2.Member:
    """Message of a member."""
    return registry_service_pb2.Member(
        member_id=member.member_id,
        tier=member.tier,
        address=member.address,
        incarnation=member.incarnation,
        attributes=member.attributes,
        expire_time=timestamp(member.expire_ms),
    )


def side_rows_from_proto(request: pb.PutSidePayloadRequest) -> tuple[SideShape, list[SideRows]]:
    """(what the payload is, its rows in pieces of about a MiB). The sample's index is left 0. Raises INVALID_FIELD."""
    payload, shape = side_payload_of(request.payload.SerializeToString())
    rows = request.rows
    count = rows.shape[0] if rows.shape else 0
    if rows.data_type != payload.data_type or list(rows.shape[1:]) != list(payload.shape[1:]):
        raise invalid_field("rows", list(rows.shape), f"rows of {payload.name!r} have shape {list(payload.shape[1:])}")
    if len(rows.data) != count * shape.row_bytes or count < 1:
        raise invalid_field("rows", len(rows.data), f"{count} rows of {shape.row_bytes} bytes were announced")
    if not 0 <= request.row_start <= shape.row_count - count:
        raise invalid_field("row_start", request.row_start, f"the payload has {shape.row_count} rows")
    step = max(1, _SIDE_PIECE_BYTES // shape.row_bytes)
    return shape, [
        SideRows(
            request.row_start + at,
            min(step, count - at),
            rows.data[at * shape.row_bytes : min(at + step, count) * shape.row_bytes],
        )
        for at in range(0, count, step)
    ]


def side_payload_of(meta: bytes) -> tuple[sample_pb2.SidePayload, SideShape]:
    """(message, shape) of a side payload's description. Raises INVALID_FIELD."""
    payload = sample_pb2.SidePayload.FromString(meta)
    return payload, side_shape(payload, 0)


def row_range(request: pb.FetchSidePayloadsRequest, row_count: int) -> tuple[int, int]:
    """(first row, one past the last). Raises INVALID_FIELD."""
    end = request.row_end or row_count
    if not 0 <= request.row_start < end <= row_count:
        raise invalid_field("row_end", request.row_end, f"{request.name!r} has rows 0 to {row_count}")
    return request.row_start, end


def side_rows_to_proto(sample_id: str, payload: sample_pb2.SidePayload, rows: SideRows) -> pb.FetchSidePayloadsResponse:
    """Response of FetchSidePayloads."""
    tensor = tensor_pb2.Tensor(data_type=payload.data_type, shape=[rows.count, *payload.shape[1:]], data=rows.data)
    return pb.FetchSidePayloadsResponse(sample_id=sample_id, row_start=rows.start, rows=tensor)
