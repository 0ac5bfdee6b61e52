"""The wire form of messages put together from bytes that are serialized already, without a message in between.

A message with a few megabytes of tensors is copied once instead of once per level of nesting. Only what is hot and
large is done so: tensors of a sample on their way in, samples on their way out. The formats are those of the proto
files; a test compares them with what the generated classes write and read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.common.v1 import sample_pb2, tensor_pb2


def varint(value: int) -> bytes:
    """A number from 0 on, seven bits a byte, lowest first."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _tag(number: int) -> bytes:
    """Of a field with a length: bytes, or a message."""
    return varint(number << 3 | 2)


_SAMPLES = _tag(pb.FetchSamplesResponse.SAMPLES_FIELD_NUMBER)
_DATA = _tag(tensor_pb2.Tensor.DATA_FIELD_NUMBER)
_TENSORS = {
    name: _tag(sample_pb2.Sample.DESCRIPTOR.fields_by_name[name].number)
    for name in (
        "tokens",
        "loss_mask",
        "log_probs",
        "teacher_log_probs",
        "teacher_top_ids",
        "teacher_top_log_probs",
    )
}


def tensor_field(name: str, tensor: tensor_pb2.Tensor, data: bytes) -> list[bytes]:
    """A tensor of a sample as a field, in parts to be joined. Takes the data out of the message.

    Args:
        name: "tokens", "loss_mask" or another tensor of a sample.
        data: the tensor's own data, which reading copies every time.
    """
    tensor.ClearField("data")
    head = tensor.SerializeToString()
    length = varint(len(data))
    return [_TENSORS[name], varint(len(head) + len(_DATA) + len(length) + len(data)), head, _DATA, length, data]


def samples_responses(samples: Iterable[bytes], most: int) -> Iterator[bytes]:
    """FetchSamplesResponse messages of packed samples, of about `most` bytes each."""
    parts: list[bytes] = []
    size = 0
    for sample in samples:
        if parts and size + len(sample) > most:
            yield b"".join(parts)
            parts, size = [], 0
        parts += (_SAMPLES, varint(len(sample)), sample)
        size += len(sample)
    if parts:
        yield b"".join(parts)
