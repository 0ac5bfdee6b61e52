"""Fetches a rank's own samples from the buffer.

A buffer that goes away in the middle is asked again: a failed fetch would cost the run all steps since its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import grpc
import numpy as np
from tetrarch.buffer.v1 import buffer_service_pb2, buffer_service_pb2_grpc

from services.common.channel import open_sync_channel, service_error
from services.common.convert import sample_from_proto
from services.common.errors import Code, ServiceError
from services.common.records import Sample
from services.common.tensors import to_numpy

AnswerT = TypeVar("AnswerT")

_TIMEOUT_SECONDS = 120.0
_PAUSE_SECONDS = (0.2, 3.0)
"""First and longest pause between tries."""


class SampleSource:
    """Samples of reserved groups, over one channel per buffer address.

    Args:
        side: names of the side payloads that come with every sample that has a response.
    """

    def __init__(self, side: Sequence[str] = ()) -> None:
        self._side = tuple(side)
        self._address = ""
        self._channel: grpc.Channel | None = None

    def fetch(self, address: str, run_id: str, sample_ids: Sequence[str]) -> dict[str, Sample]:
        """Samples by id; a buffer that does not answer is asked for two minutes.

        Raises:
            ServiceError: as the buffer says (PAYLOAD_NOT_FOUND for a sample without a side payload), or
                SAMPLE_NOT_FOUND when its answer lacks one.
        """
        if not sample_ids:
            return {}
        stub = buffer_service_pb2_grpc.BufferServiceStub(self._open(address))
        request = buffer_service_pb2.FetchSamplesRequest(run_id=run_id, sample_ids=sample_ids)
        samples = self._ask(
            lambda timeout: {
                message.sample_id: sample_from_proto(message)
                for part in stub.FetchSamples(request, timeout=timeout, wait_for_ready=True)
                for message in part.samples
            }
        )
        missing = [sample_id for sample_id in sample_ids if sample_id not in samples]
        if missing:
            raise ServiceError(
                Code.NOT_FOUND,
                "SAMPLE_NOT_FOUND",
                f"The buffer at {address} did not return sample {missing[0]} ({len(missing)} missing) of run {run_id}.",
                sample_id=missing[0],
                run_id=run_id,
            )
        return self._with_side(stub, run_id, samples) if self._side else samples

    def _with_side(
        self, stub: buffer_service_pb2_grpc.BufferServiceStub, run_id: str, samples: dict[str, Sample]
    ) -> dict[str, Sample]:
        wanted = [sample_id for sample_id, sample in samples.items() if sample.response_length]
        sides: dict[str, dict[str, np.ndarray]] = {sample_id: {} for sample_id in wanted}
        for name in self._side if wanted else ():
            request = buffer_service_pb2.FetchSidePayloadsRequest(run_id=run_id, sample_ids=wanted, name=name)

            def rows(timeout: float, request=request) -> dict[str, list[np.ndarray]]:
                found: dict[str, list[np.ndarray]] = {}
                for part in stub.FetchSidePayloads(request, timeout=timeout, wait_for_ready=True):
                    found.setdefault(part.sample_id, []).append(to_numpy(part.rows))
                return found

            for sample_id, parts in self._ask(rows).items():
                sides[sample_id][name] = np.concatenate(parts)
        return samples | {sample_id: replace(samples[sample_id], side=side) for sample_id, side in sides.items()}

    @staticmethod
    def _ask(stream: Callable[[float], AnswerT]) -> AnswerT:
        """What `stream` makes of a stream, given the seconds it may take; its parts are converted while the buffer
        prepares the next ones."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        pause, longest = _PAUSE_SECONDS
        while True:
            try:
                return stream(deadline - time.monotonic())
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
