"""TrainerService over the controller: convert, call, convert."""

# Method names are the contract's.

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from google.protobuf.duration_pb2 import Duration
from tetrarch.trainer.v1 import trainer_service_pb2, trainer_service_pb2_grpc

from services.common.errors import Code, ServiceError, invalid_field
from services.trainer.convert import event_to_proto, progress_to_proto
from services.trainer.core.controller import TrainerController
from services.trainer.core.progress import Progress

_STOP_SECONDS = 300.0
_BEAT_SECONDS = 3.0
_EVENTS_PER_MESSAGE = 200


class TrainerServicer(trainer_service_pb2_grpc.TrainerServiceServicer):
    """Serves one controller."""

    def __init__(self, controller: TrainerController) -> None:
        self._controller = controller

    async def StartRun(self, request: trainer_service_pb2.StartRunRequest, context: grpc.aio.ServicerContext):
        """See the contract."""
        progress = await self._controller.start_run(_run_id(request.run_id))
        return trainer_service_pb2.StartRunResponse(progress=progress_to_proto(progress))

    async def StopRun(self, request: trainer_service_pb2.StopRunRequest, context: grpc.aio.ServicerContext):
        """See the contract."""
        wait = _seconds(request.max_wait) if request.HasField("max_wait") else _STOP_SECONDS
        progress = await self._controller.stop_run(_run_id(request.run_id), wait)
        return trainer_service_pb2.StopRunResponse(progress=progress_to_proto(progress))

    async def GetProgress(self, request: trainer_service_pb2.GetProgressRequest, context: grpc.aio.ServicerContext):
        """See the contract."""
        return trainer_service_pb2.GetProgressResponse(
            progress=progress_to_proto(self._controller.progress(request.run_id))
        )

    async def WatchProgress(
        self, request: trainer_service_pb2.WatchProgressRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[trainer_service_pb2.WatchProgressResponse]:
        """See the contract."""
        if request.after_event < 0:
            raise invalid_field("after_event", request.after_event, "use 0, or the number of the last event you have")
        seen = request.after_event
        progress = self._controller.progress(_run_id(request.run_id))
        while True:
            # A run started again after its end has a new history of the same numbering.
            progress = self._controller.progress(progress.run_id)
            change = progress.next_change  # before what is sent is read: sending takes time
            events = progress.events[seen : seen + _EVENTS_PER_MESSAGE]
            more = len(progress.events) > seen + len(events)
            ended = progress.ended and not more
            yield _watch_response(progress, events)
            seen += len(events)
            if ended:
                return
            if not more:
                await progress.wait_change(_BEAT_SECONDS, change)

    async def ExportModel(self, request: trainer_service_pb2.ExportModelRequest, context: grpc.aio.ServicerContext):
        """See the contract."""
        if not request.path.startswith("/"):
            raise invalid_field("path", request.path, "give an absolute directory on the trainer's host")
        path, step_count = await self._controller.export(_run_id(request.run_id), request.path)
        return trainer_service_pb2.ExportModelResponse(path=path, step_count=step_count)


def _watch_response(progress: Progress, events: list) -> trainer_service_pb2.WatchProgressResponse:
    return trainer_service_pb2.WatchProgressResponse(
        progress=progress_to_proto(progress), events=[event_to_proto(event) for event in events]
    )


def _run_id(run_id: str) -> str:
    if not run_id:
        raise ServiceError(Code.INVALID_ARGUMENT, "INVALID_FIELD", "run_id is empty: name the run.", field="run_id")
    return run_id


def _seconds(duration: Duration) -> float:
    return max(duration.ToMilliseconds() / 1000, 0.0)
