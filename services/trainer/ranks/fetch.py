"""Fetches a rank's own samples from the buffer.

A buffer that goes away in the middle is asked again: a failed fetch would cost the run all steps since its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import grpc
from tetrarch.buffer.v1 import buffer_service_pb2, buffer_service_pb2_grpc

from services.common.channel import open_sync_channel, service_error
from services.common.convert import sample_from_proto
from services.common.errors import Code, ServiceError
from services.common.records import Sample

_TIMEOUT_SECONDS = 120.0
_PAUSE_SECONDS = (0.2, 3.0)
"""First and longest pause between tries."""


class SampleSource:
    """Samples of reserved groups, over one channel per buffer address."""

    def __init__(self) -> None:
        self._address = ""
        self._channel: grpc.Channel | None = None

    def fetch(self, address: str, run_id: str, sample_ids: Sequence[str]) -> dict[str, Sample]:
        """Samples by id; a buffer that does not answer is asked for two minutes.

        Raises:
            ServiceError: as the buffer says, or SAMPLE_NOT_FOUND when its answer lacks one.
        """
        if not sample_ids:
            return {}
        stub = buffer_service_pb2_grpc.BufferServiceStub(self._open(address))
        request = buffer_service_pb2.FetchSamplesRequest(run_id=run_id, sample_ids=sample_ids)
        samples = self._ask(stub, request)
        missing = [sample_id for sample_id in sample_ids if sample_id not in samples]
        if missing:
            raise ServiceError(
                Code.NOT_FOUND,
                "SAMPLE_NOT_FOUND",
                f"The buffer at {address} did not return sample {missing[0]} ({len(missing)} missing) of run {run_id}.",
                sample_id=missing[0],
                run_id=run_id,
            )
        return samples

    @staticmethod
    def _ask(
        stub: buffer_service_pb2_grpc.BufferServiceStub, request: buffer_service_pb2.FetchSamplesRequest
    ) -> dict[str, Sample]:
        """Samples of the stream; a part is converted while the buffer prepares the next ones."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        pause, longest = _PAUSE_SECONDS
        while True:
            try:
                parts = stub.FetchSamples(request, timeout=deadline - time.monotonic(), wait_for_ready=True)
                return {message.sample_id: sample_from_proto(message) for part in parts for message in part.samples}
            except grpc.RpcError as error:
                failure = service_error(error)
                if failure.code is not Code.UNAVAILABLE or time.monotonic() + pause >= deadline:
                    raise failure from error
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _open(self, address: str) -> grpc.Channel:
        if self._channel is None or address != self._address:
            self.close()
            self._channel, self._address = open_sync_channel(address, "buffer"), address
        return self._channel

    def close(self) -> None:
        """Closes the channel."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
