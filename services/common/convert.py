"""records ⇄ `tetrarch.common.v1` messages."""

from __future__ import annotations

import numpy as np
from tetrarch.common.v1 import sample_pb2

from services.common.errors import invalid_field
from services.common.records import Group, Prompt, Sample, SampleStatus, SamplingParams, TeacherLogProbs, VersionSpan
from services.common.tensors import dtype_to_proto, to_numpy, to_proto


def prompt_to_proto(prompt: Prompt) -> sample_pb2.Prompt:
    """Message of a prompt."""
    return sample_pb2.Prompt(
        group_id=prompt.group_id,
        ordinal=prompt.ordinal,
        epoch=prompt.epoch,
        row=prompt.row,
        text=prompt.text,
        label=prompt.label,
        metadata_json=prompt.metadata_json,
        messages_json=prompt.messages_json,
        dataset=prompt.dataset,
        sampling=sampling_to_proto(prompt.sampling) if prompt.sampling else None,
        rm_type=prompt.rm_type,
        rm_options_json=prompt.rm_options_json,
        tokens=to_proto(prompt.tokens.astype(np.int32, copy=False)),
    )


def prompt_from_proto(message: sample_pb2.Prompt) -> Prompt:
    """Prompt of a message; without tokens when the message has none."""
    tokens = to_numpy(message.tokens) if message.HasField("tokens") else np.zeros(0, np.int32)
    return Prompt(
        group_id=message.group_id,
        ordinal=message.ordinal,
        epoch=message.epoch,
        row=message.row,
        text=message.text,
        label=message.label,
        tokens=tokens,
        metadata_json=message.metadata_json,
        messages_json=message.messages_json,
        dataset=message.dataset,
        sampling=sampling_from_proto(message.sampling) if message.HasField("sampling") else None,
        rm_type=message.rm_type,
        rm_options_json=message.rm_options_json,
    )


def sample_to_proto(sample: Sample, *, with_tensors: bool = True) -> sample_pb2.Sample:
    """Message of a sample; `with_tensors=False` leaves tokens, mask and log-probs out (for looking). Of what is beside
    it the message has names and shapes only."""
    message = sample_pb2.Sample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        index=sample.index,
        status=sample_pb2.SampleStatus.ValueType(sample.status),
        reward=sample.reward,
        unscored_reason=sample.unscored_reason,
        reward_details=sample.reward_details,
        versions=[sample_pb2.VersionSpan(version=s.version, start=s.start, end=s.end) for s in sample.versions],
        prompt_length=sample.prompt_length,
        response_length=sample.response_length,
        response=sample.response,
        turn_count=sample.turn_count,
        tool_seconds=sample.tool_seconds,
        metadata_json=sample.metadata_json,
        engine_id=sample.engine_id,
        rollout_index=sample.rollout_index,
        side_payloads=[
            sample_pb2.SidePayload(name=name, data_type=dtype_to_proto(array.dtype.name), shape=array.shape)
            for name, array in sample.side.items()
        ],
    )
    if with_tensors:
        message.tokens.CopyFrom(to_proto(sample.tokens.astype(np.int32, copy=False)))
        message.loss_mask.CopyFrom(to_proto(sample.loss_mask.astype(np.uint8, copy=False)))
        message.log_probs.CopyFrom(to_proto(sample.log_probs.astype(np.float32, copy=False)))
        if sample.teacher is not None:
            _put_teacher(message, sample.teacher)
    return message


def sample_from_proto(message: sample_pb2.Sample) -> Sample:
    """Sample of a message that carries its tensors. Raises INVALID_FIELD when it contradicts itself."""
    if message.status == sample_pb2.SAMPLE_STATUS_UNSPECIFIED:
        raise invalid_field("sample.status", "SAMPLE_STATUS_UNSPECIFIED", f"sample {message.sample_id} must set it")
    sample = Sample(
        sample_id=message.sample_id,
        group_id=message.group_id,
        index=message.index,
        status=SampleStatus(message.status),
        prompt_length=message.prompt_length,
        tokens=to_numpy(message.tokens),
        loss_mask=to_numpy(message.loss_mask),
        log_probs=to_numpy(message.log_probs),
        response=message.response,
        reward=message.reward if message.HasField("reward") else None,
        unscored_reason=message.unscored_reason,
        reward_details=dict(message.reward_details),
        versions=tuple(VersionSpan(s.version, s.start, s.end) for s in message.versions),
        turn_count=message.turn_count,
        tool_seconds=message.tool_seconds,
        metadata_json=message.metadata_json,
        engine_id=message.engine_id,
        teacher=_teacher(message) if message.HasField("teacher_log_probs") else None,
        rollout_index=message.rollout_index if message.HasField("rollout_index") else None,
    )
    problem = sample.problem()
    if problem:
        raise invalid_field("sample", message.sample_id, problem)
    return sample


def _put_teacher(message: sample_pb2.Sample, teacher: TeacherLogProbs) -> None:
    message.teacher_log_probs.CopyFrom(to_proto(teacher.sampled.astype(np.float32, copy=False)))
    if teacher.top.size:
        message.teacher_top_ids.CopyFrom(to_proto(teacher.top_ids.astype(np.int32, copy=False)))
        message.teacher_top_log_probs.CopyFrom(to_proto(teacher.top.astype(np.float32, copy=False)))


def _teacher(message: sample_pb2.Sample) -> TeacherLogProbs:
    sampled = to_numpy(message.teacher_log_probs)
    if not message.HasField("teacher_top_ids"):
        none = (len(sampled), 0)
        return TeacherLogProbs(sampled, np.zeros(none, np.int32), np.zeros(none, np.float32))
    return TeacherLogProbs(sampled, to_numpy(message.teacher_top_ids), to_numpy(message.teacher_top_log_probs))


def group_to_proto(group: Group, *, with_tensors: bool = True) -> sample_pb2.Group:
    """Message of a group."""
    return sample_pb2.Group(
        group_id=group.group_id,
        ordinal=group.ordinal,
        samples=[sample_to_proto(sample, with_tensors=with_tensors) for sample in group.samples],
        generate_seconds=group.generate_seconds,
        score_seconds=group.score_seconds,
    )


def sampling_to_proto(params: SamplingParams) -> sample_pb2.SamplingParams:
    """Message of sampling settings."""
    return sample_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_new_tokens=params.max_new_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
    )


def sampling_from_proto(message: sample_pb2.SamplingParams) -> SamplingParams:
    """Sampling settings of a message; absent fields are None."""

    def get(name: str):
        return getattr(message, name) if message.HasField(name) else None  # pyright: ignore[reportArgumentType]

    return SamplingParams(
        temperature=get("temperature"),
        top_p=get("top_p"),
        top_k=get("top_k"),
        max_new_tokens=get("max_new_tokens"),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
    )
