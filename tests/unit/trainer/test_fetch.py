"""A rank's samples, from a buffer that may go away while it answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.buffer.v1 import buffer_service_pb2_grpc

from services.common.convert import sample_to_proto
from services.common.errors import ServiceError
from services.common.records import Sample, SampleStatus
from services.common.tensors import to_proto
from services.trainer.ranks.fetch import SampleSource


class TwoSamples(buffer_service_pb2_grpc.BufferServiceServicer):
    """Answers in two parts; the first `cuts` answers end with a status after the first part."""

    def __init__(self, cuts: int, status: grpc.StatusCode) -> None:
        self.cuts, self.status, self.calls = cuts, status, 0

    def FetchSamples(self, request, context):
        self.calls += 1
        for name in request.sample_ids:
            sample = Sample(
                sample_id=name, group_id="r-0", index=0, status=SampleStatus.COMPLETED, prompt_length=1,
                tokens=np.arange(3, dtype=np.int32), loss_mask=np.ones(2, np.uint8),
                log_probs=np.zeros(2, np.float32), response="", reward=1.0,
            )  # fmt: skip
            yield pb.FetchSamplesResponse(samples=[sample_to_proto(sample)])
            if self.calls <= self.cuts:
                context.abort(self.status, "cut")

    def FetchSidePayloads(self, request, context):
        for name in request.sample_ids:
            for start in (0, 2):
                rows = to_proto(np.arange(start, start + 2, dtype=np.int32) + len(request.name))
                yield pb.FetchSidePayloadsResponse(sample_id=name, row_start=start, rows=rows)


@pytest.mark.parametrize(
    ("cuts", "status", "calls"),
    [(0, grpc.StatusCode.OK, 1), (2, grpc.StatusCode.UNAVAILABLE, 3), (1, grpc.StatusCode.NOT_FOUND, 1)],
)
def test_only_a_buffer_that_went_away_is_asked_again(cuts, status, calls):
    buffer = TwoSamples(cuts, status)
    server = grpc.server(ThreadPoolExecutor(2))
    buffer_service_pb2_grpc.add_BufferServiceServicer_to_server(buffer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    source = SampleSource()
    try:
        if status is grpc.StatusCode.NOT_FOUND:
            with pytest.raises(ServiceError, match="cut"):
                source.fetch(f"127.0.0.1:{port}", "r", ["r-0-0", "r-0-1"])
        else:
            assert list(source.fetch(f"127.0.0.1:{port}", "r", ["r-0-0", "r-0-1"])) == ["r-0-0", "r-0-1"]
    finally:
        source.close()
        server.stop(None)
    assert buffer.calls == calls


def test_large_tensors_come_with_their_samples_when_wanted():
    server = grpc.server(ThreadPoolExecutor(2))
    buffer_service_pb2_grpc.add_BufferServiceServicer_to_server(TwoSamples(0, grpc.StatusCode.OK), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    source = SampleSource(("a", "bb"))
    try:
        samples = source.fetch(f"127.0.0.1:{port}", "r", ["r-0-0", "r-0-1"])
    finally:
        source.close()
        server.stop(None)
    for sample in samples.values():
        assert {name: rows.tolist() for name, rows in sample.side.items()} == {"a": [1, 2, 3, 4], "bb": [2, 3, 4, 5]}
