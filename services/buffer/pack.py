"""Finished groups as stored bytes.

The only module that packs payload: a sample is kept as two serialized messages, one without and one with only
its tensors. Serialized messages merge by concatenation, so the texts can be looked at, and outlive, the tensors.
It reads messages directly instead of building arrays: this is the hottest path of the buffer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.common.v1 import sample_pb2, tensor_pb2

from services.buffer import wire
from services.buffer.core import groups
from services.buffer.core.groups import SampleShape
from services.buffer.core.records import PackedGroup, PutOutcome, PutResult, SideShape
from services.common.errors import ServiceError, invalid_field

_SIDE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TYPE_BYTES = {
    tensor_pb2.DATA_TYPE_BOOL: 1,
    tensor_pb2.DATA_TYPE_UINT8: 1,
    tensor_pb2.DATA_TYPE_INT32: 4,
    tensor_pb2.DATA_TYPE_INT64: 8,
    tensor_pb2.DATA_TYPE_FLOAT16: 2,
    tensor_pb2.DATA_TYPE_BFLOAT16: 2,
    tensor_pb2.DATA_TYPE_FLOAT32: 4,
    tensor_pb2.DATA_TYPE_FLOAT64: 8,
}
_ITEM_BYTES = {
    "tokens": (tensor_pb2.DATA_TYPE_INT32, 4),
    "loss_mask": (tensor_pb2.DATA_TYPE_UINT8, 1),
    "log_probs": (tensor_pb2.DATA_TYPE_FLOAT32, 4),
}
_TEACHER_ITEMS = {
    "teacher_log_probs": (tensor_pb2.DATA_TYPE_FLOAT32, 4),
    "teacher_top_ids": (tensor_pb2.DATA_TYPE_INT32, 4),
    "teacher_top_log_probs": (tensor_pb2.DATA_TYPE_FLOAT32, 4),
}
"""Present in runs with a teacher only."""


class _Opened(NamedTuple):
    """A sample with the bytes of its tensors, read once: every reading of a bytes field copies it."""

    message: sample_pb2.Sample
    data: dict[str, bytes]

    @classmethod
    def of(cls, message: sample_pb2.Sample) -> _Opened:
        data = {name: getattr(message, name).data for name in _ITEM_BYTES}
        if message.HasField("teacher_log_probs"):
            data |= {name: getattr(message, name).data for name in _TEACHER_ITEMS if message.HasField(name)}
        return cls(message, data)


def pack_groups(leased: Iterable[pb.LeasedGroup], run_id: str, sample_count: int) -> list[PackedGroup | PutResult]:
    """Groups ready to be stored; those that contradict themselves or the run come as their INVALID result.

    Takes the messages apart: the request is of no use afterwards.
    """
    return [_pack_or_refuse(item, run_id, sample_count) for item in leased]


def pack_partial_groups(leased: Iterable[pb.LeasedGroup], run_id: str, sample_count: int) -> list[PackedGroup]:
    """Unfinished groups ready to be stored: any of their samples, each unfinished one ABORTED. Raises INVALID_FIELD."""
    packed = []
    for item in leased:
        samples = [_Opened.of(message) for message in item.group.samples]
        problem = next((text for sample in samples if (text := _message_problem(sample))), "")
        shapes = [_shape(sample) for sample in samples]
        problem = problem or groups.partial_problem(
            run_id, item.group.group_id, item.group.ordinal, shapes, sample_count
        )
        if problem:
            raise invalid_field("partial_groups", item.group.group_id, problem)
        packed.append(_pack(item, samples, shapes))
    return packed


def side_shape(payload: sample_pb2.SidePayload, index: int) -> SideShape:
    """Shape of a side payload of sample `index`. Raises INVALID_FIELD."""
    size = _TYPE_BYTES.get(payload.data_type)
    if not _SIDE_NAME.fullmatch(payload.name):
        raise invalid_field("payload.name", payload.name, "use up to 64 letters, digits, '.', '_' and '-'")
    if size is None:
        raise invalid_field("payload.data_type", payload.data_type, "set it to a known type")
    if not payload.shape or min(payload.shape) < 1:
        raise invalid_field("payload.shape", list(payload.shape), "use at least one dimension, all of them 1 or more")
    return SideShape(index, payload.name, payload.shape[0], math.prod(payload.shape[1:]) * size)


def _pack_or_refuse(item: pb.LeasedGroup, run_id: str, sample_count: int) -> PackedGroup | PutResult:
    group = item.group
    samples = [_Opened.of(message) for message in group.samples]
    problem = next((text for sample in samples if (text := _message_problem(sample))), "")
    if not problem:
        shapes = [_shape(sample) for sample in samples]
        problem = groups.group_problem(run_id, group.group_id, group.ordinal, shapes, sample_count)
    if not problem:
        problem = _side_problem(group.samples)
    if problem:
        return PutResult(group.group_id, PutOutcome.INVALID, problem)
    return _pack(item, samples, shapes)


def _side_problem(messages: Iterable[sample_pb2.Sample]) -> str:
    for message in messages:
        names = [payload.name for payload in message.side_payloads]
        if len(set(names)) != len(names):
            return f"sample {message.sample_id} names a side payload twice."
        for payload in message.side_payloads:
            try:
                side_shape(payload, message.index)
            except ServiceError as error:
                return f"sample {message.sample_id}: {error.message}"
    return ""


def _message_problem(sample: _Opened) -> str:
    """What is wrong with the message itself, or an empty string."""
    message = sample.message
    if message.status == sample_pb2.SAMPLE_STATUS_UNSPECIFIED:
        return f"sample {message.sample_id} does not say how it ended; set status."
    if message.HasField("reward") and not math.isfinite(message.reward):
        return f"sample {message.sample_id} has reward {message.reward}; leave it out when there is none."
    for name, (data_type, size) in _ITEM_BYTES.items():
        tensor, length = getattr(message, name), len(sample.data[name])
        shape = tensor.shape
        # An absent tensor is one without entries.
        if length and (tensor.data_type != data_type or len(shape) != 1 or shape[0] * size != length):
            wanted = tensor_pb2.DataType.Name(data_type).removeprefix("DATA_TYPE_").lower()
            return (
                f"sample {message.sample_id}: {name} has {length} bytes in shape {list(shape)}; it must be {wanted} of"
                " one dimension."
            )
    return _teacher_problem(sample) if len(sample.data) > len(_ITEM_BYTES) else ""


def _teacher_problem(sample: _Opened) -> str:
    """What is wrong with a teacher's log-probs, or an empty string."""
    message, data = sample
    length = len(data["log_probs"]) // 4
    top = list(message.teacher_top_ids.shape)
    for name, (data_type, size) in _TEACHER_ITEMS.items():
        if name not in data and not top:
            continue
        tensor = getattr(message, name)
        shape = [length] if name == "teacher_log_probs" else [length, *(top[1:2] or [1])]
        found = len(data.get(name, b""))
        if tensor.data_type != data_type or list(tensor.shape) != shape or found != math.prod(shape) * size:
            wanted = tensor_pb2.DataType.Name(data_type).removeprefix("DATA_TYPE_").lower()
            return (
                f"sample {message.sample_id}: {name} has {found} bytes in shape {list(tensor.shape)}; it must be"
                f" {wanted} of {length} response tokens, in shape {shape}."
            )
    return ""


def _shape(sample: _Opened) -> SampleShape:
    message, data = sample
    return SampleShape(
        message.sample_id,
        message.group_id,
        message.index,
        message.prompt_length,
        len(data["tokens"]) // 4,
        len(data["loss_mask"]),
        len(data["log_probs"]) // 4,
        tuple((span.version, span.start, span.end) for span in message.versions),
        message.rollout_index if message.HasField("rollout_index") else message.index,
    )


def _pack(item: pb.LeasedGroup, samples: list[_Opened], shapes: list[SampleShape]) -> PackedGroup:
    oldest = groups.oldest_version(shapes)
    headers = pb.TakeBatchResponse()
    heads, tensors, rewards = [], [], []
    for (message, data), shape in zip(samples, shapes, strict=True):
        mask = data["loss_mask"]
        versions = [version for version, _, _ in shape.spans]
        reward = message.reward if message.HasField("reward") else None
        headers.samples.add(
            sample_id=shape.sample_id,
            group_id=shape.group_id,
            index=shape.index,
            prompt_length=shape.prompt_length,
            response_length=shape.response_length,
            trained_token_count=len(mask) - mask.count(0),
            reward=reward,
            # A sample without tokens of its own is as old as its group.
            min_version=min(versions, default=oldest or 0),
            max_version=max(versions, default=oldest or 0),
            status=message.status,
            rollout_index=message.rollout_index if message.HasField("rollout_index") else None,
        )
        rewards.append(reward)
        parts: list[bytes] = []
        for name in data:
            parts += wire.tensor_field(name, getattr(message, name), data[name])
            message.ClearField(name)
        tensors.append(b"".join(parts))
        message.response_length = shape.response_length
        heads.append(message.SerializeToString())
    item.group.ClearField("samples")
    return PackedGroup(
        lease_id=item.lease_id,
        group_id=item.group.group_id,
        ordinal=item.group.ordinal,
        headers=headers.SerializeToString(),
        summary=item.group.SerializeToString(),
        heads=tuple(heads),
        tensors=tuple(tensors),
        min_version=oldest,
        rewards=tuple(rewards),
        mean_response_length=groups.mean_response_length(shapes),
        side_payloads=tuple(
            side_shape(payload, message.index) for message, _ in samples for payload in message.side_payloads
        ),
    )
