"""Messages ⇄ the controller's records."""

from __future__ import annotations

from tetrarch.buffer.v1 import buffer_service_pb2, run_pb2
from tetrarch.common.v1 import tensor_pb2
from tetrarch.rollout.v1 import engine_pb2, rollout_service_pb2, weight_service_pb2
from tetrarch.trainer.v1 import trainer_service_pb2

from services.common.records import SampleStatus
from services.common.tensors import dtype_to_proto
from services.trainer.core.buckets import plan_digest
from services.trainer.core.commands import ChecksumRule
from services.trainer.core.ports import Prepared, PrepareRequest
from services.trainer.core.progress import Event, Progress
from services.trainer.core.records import (
    Batch,
    EngineState,
    EngineView,
    EvalResult,
    GroupCounts,
    NodeView,
    Run,
    SampleHeader,
)

_EVENT_KINDS = ("step", "eval", "update_weights", "checkpoint", "notice")


def run_from_proto(message: run_pb2.Run) -> Run:
    """Run of a message."""
    return Run(
        run_id=message.run_id,
        active=message.state == run_pb2.RUN_STATE_ACTIVE,
        state=run_pb2.RunState.Name(message.state).removeprefix("RUN_STATE_"),
        reason=message.reason,
        committed_step=message.committed_step,
        checkpoint_step=message.checkpoint_step,
        checkpoint_path=message.checkpoint_path,
        policy_version=message.policy_version,
        spec_json=message.spec_json,
    )


def batch_from_proto(message: buffer_service_pb2.TakeBatchResponse) -> Batch:
    """Manifest of a message."""
    return Batch(
        samples=tuple(_header(sample) for sample in message.samples),
        ready_group_count=message.ready_group_count,
        stale_group_count=message.stale_group_count,
        policy_version=message.policy_version,
    )


def _header(message: buffer_service_pb2.SampleHeader) -> SampleHeader:
    return SampleHeader(
        sample_id=message.sample_id,
        group_id=message.group_id,
        prompt_length=message.prompt_length,
        response_length=message.response_length,
        trained_token_count=message.trained_token_count,
        reward=message.reward if message.HasField("reward") else None,
        min_version=message.min_version,
        max_version=message.max_version,
        status=SampleStatus(message.status or SampleStatus.COMPLETED),
        index=message.index,
        rollout_index=message.rollout_index if message.HasField("rollout_index") else None,
    )


def counts_from_proto(message: run_pb2.RunStats) -> GroupCounts:
    """Counts of a message."""
    return GroupCounts(
        pending=message.pending_count,
        leased=message.leased_count,
        ready=message.ready_count,
        reserved=message.reserved_count,
        consumed=message.consumed_count,
        evicted=dict(message.evicted_by_reason),
    )


def node_from_proto(message: engine_pb2.Node, address: str) -> NodeView:
    """Node of a message; `address` is where it was asked."""
    return NodeView(
        node_id=message.node_id,
        address=address,
        run_id=message.run_id,
        engines=tuple(_engine(engine, address) for engine in message.engines),
        running_group_count=message.running_group_count,
        finished_group_count=message.finished_group_count,
        generated_token_count=message.generated_token_count,
        idle_seconds=message.idle_seconds,
        generate_seconds=message.generate_seconds,
        score_seconds=message.score_seconds,
        problem=message.problem,
    )


def _engine(message: engine_pb2.Engine, address: str) -> EngineView:
    return EngineView(
        engine_id=message.engine_id,
        address=address,
        incarnation=message.incarnation,
        state=EngineState(message.state or EngineState.STARTING),
        rank_count=message.rank_count or 1,
        weight_version=message.weight_version,
        backends=tuple(message.backends),
    )


def prepare_to_proto(engine: EngineView, request: PrepareRequest) -> weight_service_pb2.PrepareUpdateRequest:
    """Message of a request to prepare."""
    tensors = [spec for bucket in request.plan.buckets for spec in bucket]
    message = weight_service_pb2.PrepareUpdateRequest(
        run_id=request.run_id,
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        update_epoch=request.epoch,
        version=request.version,
        rank_offset=request.rank_offset,
        plan_digest=plan_digest(tensors),
        torch_version=request.torch_version,
        nccl_version=request.nccl_version,
        collective_env=dict(request.collective_env),
        tensors=[
            tensor_pb2.TensorSpec(name=spec.name, data_type=dtype_to_proto(spec.dtype), shape=spec.shape)
            for spec in tensors
        ],
        bucket_tensor_counts=[len(bucket) for bucket in request.plan.buckets],
        weights_path=request.weights_path,
    )
    if request.group:
        message.group_name, message.backend = request.group.name, request.group.backend
        message.master_address, message.master_port = request.group.master_address, request.group.master_port
        message.world_size = request.group.world_size
    return message


def prepared_from_proto(message: weight_service_pb2.PrepareUpdateResponse) -> Prepared:
    """What an engine answered."""
    rules = {
        rule.engine_name: ChecksumRule(tuple(rule.source_names), rule.padding_bytes) for rule in message.checksum_rules
    }
    return Prepared(message.staged, message.checksum_algorithm, rules)


def eval_from_proto(message: rollout_service_pb2.EvaluateResult) -> EvalResult:
    """Result of a message."""
    return EvalResult(
        dataset=message.dataset,
        mean_reward=message.mean_reward,
        scored_count=message.scored_count,
        unscored_count=message.unscored_count,
        mean_response_length=message.mean_response_length,
        truncated_fraction=message.truncated_fraction,
        min_version=message.min_version,
        max_version=message.max_version,
        seconds=message.seconds,
    )


def progress_to_proto(progress: Progress) -> trainer_service_pb2.Progress:
    """Message of a run's progress."""
    return trainer_service_pb2.Progress(
        run_id=progress.run_id,
        phase=int(progress.phase),
        step_count=progress.step_count,
        total_step_count=progress.total_step_count,
        policy_version=progress.policy_version,
        reason=progress.reason,
        succeeded=progress.succeeded,
        run_dir=progress.run_dir,
    )


def event_to_proto(event: Event) -> trainer_service_pb2.ProgressEvent:
    """Message of an event; a kind the contract does not list is a notice."""
    return trainer_service_pb2.ProgressEvent(
        event=event.number,
        kind=event.kind if event.kind in _EVENT_KINDS else "notice",
        step=event.step,
        metrics=dict(event.metrics),
        message=event.message,
    )
