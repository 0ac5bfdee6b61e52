"""Run settings and messages ⇄ the rollout node's own values."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError
from tetrarch.rollout.v1 import engine_pb2, rollout_service_pb2, weight_service_pb2

from services.common.convert import sample_to_proto, sampling_from_proto
from services.common.errors import Code, ServiceError, invalid_field
from services.common.records import SamplingParams
from services.common.run_spec import GROUPS, RunSpec
from services.common.tensors import dtype_name
from services.rollout.core.compatibility import TrainerSide
from services.rollout.core.completion import Recording
from services.rollout.core.engine_port import Buckets, ChecksumRule, GroupSpec, LaunchSpec, TensorSpec
from services.rollout.core.evaluation import EvaluationProgress, EvaluationRequest, EvaluationResult
from services.rollout.core.fleet import EngineSlot
from services.rollout.core.node import Node
from services.rollout.core.ports import ActiveRun
from services.rollout.core.run_settings import FilesSettings, FleetSettings, RunSettings, ScoreSettings, TeacherSettings
from services.rollout.core.update_state import UpdateRequest


def run_settings(run: ActiveRun) -> RunSettings:
    """Settings of a run as the buffer stores it. Raises INVALID_ARGUMENT/INVALID_FIELD."""
    try:
        spec = RunSpec.model_validate_json(run.spec_json)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise invalid_field(path or "spec_json", first.get("input"), first["msg"]) from error
    rollout, reward = spec.rollout, spec.reward
    keys = {name: value for group in GROUPS for name, value in getattr(spec, group).model_dump().items()}
    return RunSettings(
        run_id=run.run_id,
        checkpoint=rollout.hf_checkpoint,
        sft=spec.engineless,
        sampling=_sampling(spec),
        eval_sampling=_eval_sampling(spec),
        score=ScoreSettings(
            grader=reward.rm_type,
            custom_path=reward.custom_rm_path or "",
            options_json=json.dumps(reward.rm_options),
            timeout=reward.rm_timeout,
            grouped=reward.group_rm,
        ),
        fleet=_fleet(spec),
        samples_per_prompt=rollout.n_samples_per_prompt,
        greedy_first=spec.trainer.needs_greedy_sample,
        samples_per_eval_prompt=rollout.n_samples_per_eval_prompt,
        max_turns=rollout.max_turns,
        max_inflight=rollout.max_inflight,
        max_context_length=rollout.rollout_max_context_len,
        max_prompt_attempts=spec.data.max_prompt_attempts,
        lease_ttl=rollout.lease_ttl,
        generate_timeout=rollout.generate_timeout,
        update_timeout=spec.trainer.update_timeout,
        pause_mode=rollout.pause_mode,
        max_staleness=spec.trainer.max_staleness,
        files=_files(spec),
        record=_recording(spec),
        teacher=_teacher(spec),
        generate_path=rollout.custom_generate_function_path,
        filter_path=rollout.dynamic_sampling_filter_path,
        keys=keys | {"run_id": run.run_id},
    )


def _files(spec: RunSpec) -> FilesSettings | None:
    trainer = spec.trainer
    local = trainer.update_weight_local_checkpoint_dir or ""
    directory = trainer.update_weight_disk_dir
    return FilesSettings(directory, local, copies_full=bool(local)) if directory else None


def _teacher(spec: RunSpec) -> TeacherSettings | None:
    trainer = spec.trainer
    if not trainer.use_opd or trainer.opd_teacher_url is None:
        return None
    return TeacherSettings(trainer.opd_teacher_url, trainer.opd_top_k or 0, trainer.opd_teacher_timeout)


def _recording(spec: RunSpec) -> Recording:
    return Recording(experts=spec.trainer.use_rollout_routing_replay, kept=spec.trainer.use_top_p_replay)


def _sampling(spec: RunSpec) -> SamplingParams:
    rollout = spec.rollout
    return SamplingParams(
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_new_tokens=rollout.rollout_max_response_len,
        stop=tuple(rollout.rollout_stop),
        stop_token_ids=tuple(rollout.rollout_stop_token_ids),
    )


def _eval_sampling(spec: RunSpec) -> SamplingParams:
    rollout, train = spec.rollout, _sampling(spec)
    return SamplingParams(
        temperature=train.temperature if rollout.eval_temperature is None else rollout.eval_temperature,
        top_p=train.top_p if rollout.eval_top_p is None else rollout.eval_top_p,
        top_k=train.top_k,
        max_new_tokens=rollout.eval_max_response_len or train.max_new_tokens,
        stop=train.stop,
        stop_token_ids=train.stop_token_ids,
    )


def _fleet(spec: RunSpec) -> FleetSettings:
    rollout = spec.rollout
    return FleetSettings(
        engine=rollout.engine,
        launch=LaunchSpec(
            model_path=Path(rollout.hf_checkpoint),
            device=rollout.device,
            rank_count=rollout.rollout_num_gpus_per_engine,
            seed=spec.data.rollout_seed,
            group_timeout=spec.trainer.update_timeout,
            staging=rollout.weight_staging == "auto",
            context_length=rollout.rollout_max_context_len,
            record=_recording(spec),
            sglang=dict(rollout.sglang),
            simulated=dict(rollout.simulated),
        ),
        engine_count=rollout.engine_count,
        router_strategy=rollout.sglang_router_strategy,
        router_options=dict(rollout.sglang_router),
        restart=rollout.use_fault_tolerance,
        health_interval=rollout.rollout_health_check_interval,
        health_timeout=rollout.rollout_health_check_timeout,
    )


def engine_to_proto(slot: EngineSlot, kind: str) -> engine_pb2.Engine:
    """Message of an engine; facts that only a running engine knows are empty before it was up."""
    message = engine_pb2.Engine(
        engine_id=slot.engine_id,
        kind=kind,
        state=int(slot.state),
        url=slot.engine.url if slot.engine else "",
        weight_version=slot.version,
        incarnation=slot.incarnation,
        pid=slot.process.pid if slot.process else 0,
        restart_count=max(0, slot.restart_count),
    )
    if slot.info is not None:
        message.engine_version = slot.info.engine_version
        message.rank_count = slot.info.rank_count
        message.backends.extend(slot.info.backends)
        message.torch_version = slot.info.torch_version
        message.nccl_version = slot.info.nccl_version
        message.collective_env.update(slot.info.collective_env)
    return message


def node_to_proto(node: Node) -> engine_pb2.Node:
    """Message of the node with its engines and counters."""
    counters = node.counters
    kind = node.session.run.fleet.engine if node.session else ""
    return engine_pb2.Node(
        node_id=node.node_id,
        run_id=node.run_id,
        router_url=node.router_url,
        engines=[engine_to_proto(slot, kind) for slot in node.slots],
        running_group_count=node.session.running_group_count if node.session else 0,
        finished_group_count=counters.finished_group_count,
        generated_token_count=counters.generated_token_count,
        idle_seconds=counters.idle_seconds,
        generate_seconds=counters.generate_seconds,
        score_seconds=counters.score_seconds,
        problem=node.problem,
    )


def tensor_specs(messages: Iterable) -> tuple[TensorSpec, ...]:
    """Specs of `tetrarch.common.v1.TensorSpec` messages."""
    return tuple(TensorSpec(item.name, dtype_name(item.data_type), tuple(item.shape)) for item in messages)


def update_request(message: weight_service_pb2.PrepareUpdateRequest) -> UpdateRequest:
    """What Prepare asks for. Raises INVALID_FIELD."""
    if message.version < 1:
        raise invalid_field("version", message.version, "versions begin at 1")
    if not message.tensors:
        raise invalid_field("tensors", "[]", "an update needs the specs of all its tensors")
    return UpdateRequest(
        engine_id=message.engine_id,
        incarnation=message.incarnation,
        epoch=message.update_epoch,
        version=message.version,
        group=None
        if message.weights_path
        else GroupSpec(
            name=message.group_name,
            backend=message.backend,
            master_address=message.master_address,
            master_port=message.master_port,
            world_size=message.world_size,
            rank_offset=message.rank_offset,
        ),
        trainer=TrainerSide(
            backend=message.backend,
            torch_version=message.torch_version,
            nccl_version=message.nccl_version,
            collective_env=dict(message.collective_env),
        ),
        buckets=_buckets(message),
        weights_path=message.weights_path,
    )


def _buckets(message: weight_service_pb2.PrepareUpdateRequest) -> Buckets:
    """The tensors of each bucket of the plan."""
    specs, counts = tensor_specs(message.tensors), list(message.bucket_tensor_counts)
    if min(counts, default=0) < 1 or sum(counts) != len(specs):
        raise invalid_field(
            "bucket_tensor_counts", counts[:10], f"every bucket holds a tensor and all together {len(specs)}"
        )
    if len({spec.name for spec in specs}) < len(specs):
        raise invalid_field("tensors", len(specs), "every tensor has a name of its own")
    if message.plan_digest not in ("", digest := _plan_digest(specs)):
        raise ServiceError(
            Code.FAILED_PRECONDITION,
            "PLAN_MISMATCH",
            f"The tensors of update {message.update_epoch} for engine {message.engine_id} have the digest {digest}, but"
            f" the trainer means {message.plan_digest}: run one release of Tetrarch on both sides.",
            engine_id=message.engine_id,
            update_epoch=message.update_epoch,
        )
    ends = list(itertools.accumulate(counts))
    return tuple(specs[end - count : end] for count, end in zip(counts, ends, strict=True))


def _plan_digest(specs: Iterable[TensorSpec]) -> str:
    """16 hex digits over names, dtypes and shapes in order, as the trainer makes them."""
    lines = "".join(f"{spec.name} {spec.dtype} {'x'.join(map(str, spec.shape))}\n" for spec in specs)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def rules_to_proto(rules: Iterable[ChecksumRule]) -> list[weight_service_pb2.ChecksumRule]:
    """Messages of checksum rules."""
    return [
        weight_service_pb2.ChecksumRule(
            engine_name=rule.engine_name, source_names=rule.source_names, padding_bytes=rule.padding_bytes
        )
        for rule in rules
    ]


def evaluation_request(message: rollout_service_pb2.EvaluateRequest) -> EvaluationRequest:
    """What Evaluate asks for. Raises INVALID_FIELD."""
    if not message.dataset:
        raise invalid_field("dataset", "", "name an evaluation set of the run")
    if message.sample_count < 0:
        raise invalid_field("sample_count", message.sample_count, "it cannot be negative")
    return EvaluationRequest(
        dataset=message.dataset,
        sample_count=message.sample_count,
        sampling=sampling_from_proto(message.sampling),
        max_prompt_count=message.max_prompt_count,
        min_version=message.min_version,
    )


def progress_to_proto(progress: EvaluationProgress) -> rollout_service_pb2.EvaluateResponse:
    """Message of evaluation progress."""
    message = rollout_service_pb2.EvaluateResponse(
        done_prompt_count=progress.done_count, total_prompt_count=progress.total_count
    )
    if progress.result is not None:
        message.result.CopyFrom(_result_to_proto(progress.result))
    return message


def _result_to_proto(result: EvaluationResult) -> rollout_service_pb2.EvaluateResult:
    return rollout_service_pb2.EvaluateResult(
        dataset=result.dataset,
        mean_reward=result.mean_reward,
        scored_count=result.scored_count,
        unscored_count=result.unscored_count,
        mean_response_length=result.mean_response_length,
        truncated_fraction=result.truncated_fraction,
        min_version=result.min_version,
        max_version=result.max_version,
        seconds=result.seconds,
        examples=[sample_to_proto(sample, with_tensors=False) for sample in result.examples],
    )
