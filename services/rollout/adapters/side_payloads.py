"""Sends the large tensors beside samples to the buffer, under the lease of their prompt and before their group."""

from __future__ import annotations

from tetrarch.buffer.v1 import buffer_service_pb2, buffer_service_pb2_grpc

from services.common.channel import translate_errors
from services.common.convert import sample_to_proto
from services.common.errors import ServiceError
from services.common.records import Group
from services.common.tensors import to_proto

_REQUEST_BYTES = 4 << 20


async def put_side_payloads(
    buffer: buffer_service_pb2_grpc.BufferServiceStub, run_id: str, lease_id: str, group: Group
) -> bool:
    """Stores every row of every side payload of a group; False when the lease was lost. Putting again changes nothing.

    Raises the buffer's errors.
    """
    for sample in group.samples:
        payloads = sample_to_proto(sample, with_tensors=False).side_payloads
        for payload, array in zip(payloads, sample.side.values(), strict=True):
            step = max(1, _REQUEST_BYTES // max(1, array[:1].nbytes))
            for first in range(0, len(array), step):
                request = buffer_service_pb2.PutSidePayloadRequest(
                    run_id=run_id,
                    lease_id=lease_id,
                    sample_id=sample.sample_id,
                    payload=payload,
                    row_start=first,
                    rows=to_proto(array[first : first + step]),
                )
                try:
                    async with translate_errors():
                        await buffer.PutSidePayload(request)
                except ServiceError as error:
                    if error.reason == "LEASE_LOST":
                        return False
                    raise
    return True
