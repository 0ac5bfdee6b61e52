"""Messages of `tetrarch.buffer.v1` ⇄ the buffer's values; `pack` does the same for finished groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

from google.protobuf import duration_pb2, timestamp_pb2
from pydantic import ValidationError
from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.buffer.v1 import registry_service_pb2, run_pb2
from tetrarch.common.v1 import sample_pb2

from services.buffer.core.plan import RunPlan, make_plan
from services.buffer.core.records import (
    Batch,
    GroupRecord,
    GroupState,
    Leases,
    Member,
    PutResult,
    RunRecord,
    RunState,
    Stats,
    StoredGroup,
)
from services.common.convert import prompt_to_proto
from services.common.errors import Code, ServiceError, invalid_field
from services.common.run_spec import RunSpec
from services.common.settings import explain


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
        state=run_pb2.RunState.Value(f"RUN_STATE_{run.state.value}"),
        reason=run.reason,
        create_time=timestamp(run.created_ms),
        policy_version=run.policy_version,
        committed_step=run.committed_step,
        checkpoint_step=run.checkpoint_step,
        checkpoint_path=run.checkpoint_path,
        trainer_epoch=run.trainer_epoch,
        reserved_version=run.reserved_version,
        spec_json=run.spec_json,
    )


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


def leases_to_proto(leases: Leases) -> pb.LeasePromptsResponse:
    """Response of LeasePrompts."""
    return pb.LeasePromptsResponse(
        leases=[
            pb.PromptLease(
                lease_id=lease.grant.lease_id, prompt=prompt_to_proto(lease.prompt), attempt=lease.grant.attempt
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
