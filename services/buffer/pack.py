"""Finished groups as stored bytes.

The only module that packs payload: a sample is kept as two serialized messages, one without and one with only
its tensors. Serialized messages merge by concatenation, so the texts can be looked at, and outlive, the tensors.
It reads messages directly instead of building arrays: this is the hottest path of the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.common.v1 import sample_pb2, tensor_pb2

from services.buffer.core import groups
from services.buffer.core.groups import SampleShape
from services.buffer.core.records import PackedGroup, PutOutcome, PutResult

_ITEM_BYTES = {
    "tokens": (tensor_pb2.DATA_TYPE_INT32, 4),
    "loss_mask": (tensor_pb2.DATA_TYPE_UINT8, 1),
    "log_probs": (tensor_pb2.DATA_TYPE_FLOAT32, 4),
}


def pack_groups(leased: Iterable[pb.LeasedGroup], run_id: str, sample_count: int) -> list[PackedGroup | PutResult]:
    """Groups ready to be stored; those that contradict themselves or the run come as their INVALID result.

    Takes the messages apart: the request is of no use afterwards.
    """
    return [_pack_or_refuse(item, run_id, sample_count) for item in leased]


def _pack_or_refuse(item: pb.LeasedGroup, run_id: str, sample_count: int) -> PackedGroup | PutResult:
    group = item.group
    messages = list(group.samples)
    problem = next((text for message in messages if (text := _message_problem(message))), "")
    if not problem:
        shapes = [_shape(message) for message in messages]
        problem = groups.group_problem(run_id, group.group_id, group.ordinal, shapes, sample_count)
    if problem:
        return PutResult(group.group_id, PutOutcome.INVALID, problem)
    return _pack(item, messages, shapes)


def _message_problem(message: sample_pb2.Sample) -> str:
    """What is wrong with the message itself, or an empty string."""
    if message.status == sample_pb2.SAMPLE_STATUS_UNSPECIFIED:
        return f"sample {message.sample_id} does not say how it ended; set status."
    if message.HasField("reward") and not math.isfinite(message.reward):
        return f"sample {message.sample_id} has reward {message.reward}; leave it out when there is none."
    for name, (data_type, size) in _ITEM_BYTES.items():
        tensor = getattr(message, name)
        shape = tensor.shape
        # An absent tensor is one without entries.
        if tensor.data and (tensor.data_type != data_type or len(shape) != 1 or shape[0] * size != len(tensor.data)):
            wanted = tensor_pb2.DataType.Name(data_type).removeprefix("DATA_TYPE_").lower()
            return (
                f"sample {message.sample_id}: {name} has {len(tensor.data)} bytes in shape {list(shape)}; it must be"
                f" {wanted} of one dimension."
            )
    return ""


def _shape(message: sample_pb2.Sample) -> SampleShape:
    return SampleShape(
        message.sample_id,
        message.group_id,
        message.index,
        message.prompt_length,
        len(message.tokens.data) // 4,
        len(message.loss_mask.data),
        len(message.log_probs.data) // 4,
        tuple((span.version, span.start, span.end) for span in message.versions),
    )


def _pack(item: pb.LeasedGroup, messages: list[sample_pb2.Sample], shapes: list[SampleShape]) -> PackedGroup:
    oldest = groups.oldest_version(shapes)
    headers = pb.TakeBatchResponse()
    heads, tensors, rewards = [], [], []
    for message, shape in zip(messages, shapes, strict=True):
        mask = message.loss_mask.data
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
        )
        rewards.append(reward)
        only_tensors = sample_pb2.Sample(
            tokens=message.tokens, loss_mask=message.loss_mask, log_probs=message.log_probs
        )
        tensors.append(only_tensors.SerializeToString())
        for name in _ITEM_BYTES:
            message.ClearField(name)
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
    )
