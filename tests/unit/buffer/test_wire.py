"""Messages put together from bytes are what the generated classes would have written."""

from __future__ import annotations

import asyncio

import pytest
from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.common.v1 import sample_pb2, tensor_pb2

from services.buffer import wire
from services.buffer.core.waiting import ahead


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 16_383, 16_384, 3_000_000])
def test_tensors_and_responses_equal_serialized_messages(size):
    tensor = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_UINT8, shape=[size], data=bytes(size))
    whole = sample_pb2.Sample(tokens=tensor, loss_mask=tensor, log_probs=tensor)
    parts: list[bytes] = []
    for name in ("tokens", "loss_mask", "log_probs"):
        parts += wire.tensor_field(name, getattr(whole, name), bytes(size))
    packed = b"".join(parts)
    assert sample_pb2.Sample.FromString(packed) == sample_pb2.Sample(tokens=tensor, loss_mask=tensor, log_probs=tensor)
    (response,) = wire.samples_responses([packed, packed], 1 << 30)
    assert len(pb.FetchSamplesResponse.FromString(response).samples) == 2


def test_responses_are_cut_between_samples():
    samples = [sample_pb2.Sample(sample_id="x" * 400).SerializeToString() for _ in range(5)]
    responses = [pb.FetchSamplesResponse.FromString(part) for part in wire.samples_responses(samples, 1000)]
    assert [len(response.samples) for response in responses] == [2, 2, 1]
    assert not list(wire.samples_responses([], 1000))


async def test_the_next_item_is_fetched_while_this_one_is_used():
    begun = []

    async def items():
        for number in range(3):
            begun.append(number)
            yield number
        raise ValueError("the end")

    used = []
    with pytest.raises(ValueError, match="the end"):  # noqa: PT012 - what came before the error counts
        async for item in ahead(items()):
            await asyncio.sleep(0.01)
            used.append((item, max(begun)))
    assert used == [(0, 1), (1, 2), (2, 2)]
