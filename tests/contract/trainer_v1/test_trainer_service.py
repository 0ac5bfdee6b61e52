"""TrainerService over a real server: what every call answers, and how it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from tetrarch.trainer.v1 import trainer_service_pb2 as pb
from tetrarch.trainer.v1 import trainer_service_pb2_grpc

from services.common.channel import open_channel, service_error
from services.common.server import GrpcServer
from services.trainer.config import TrainerServiceSettings
from services.trainer.core.controller import Factories, TrainerController
from services.trainer.servicer import TrainerServicer
from tests.support.trainer_world import (
    SETTINGS,
    MemoryBuffer,
    MemoryFiles,
    MemoryJournal,
    MemoryRanks,
    MemoryRollout,
    World,
    make_spec,
)


class Scene:
    """A served controller and a client of it."""

    def __init__(self, world: World, stub: trainer_service_pb2_grpc.TrainerServiceStub) -> None:
        self.world = world
        self.stub = stub

    async def start(self) -> pb.Progress:
        return (await self.stub.StartRun(pb.StartRunRequest(run_id="r"))).progress

    async def watch(self, after_event: int = 0) -> tuple[pb.Progress, list[pb.ProgressEvent]]:
        """Last progress and all events until the run's end."""
        events: list[pb.ProgressEvent] = []
        async for response in self.stub.WatchProgress(pb.WatchProgressRequest(run_id="r", after_event=after_event)):
            events += response.events
            progress = response.progress
        return progress, events


@pytest.fixture
async def scene(tmp_path) -> AsyncIterator[Scene]:
    world = World(make_spec(tmp_path, trainer={"save_interval": 2}, rollout={"eval_interval": 2}))
    factories = Factories(lambda spec, run_dir: MemoryRanks(world), MemoryJournal, lambda setting: "cpu")
    controller = TrainerController(
        MemoryBuffer(world), MemoryRollout(world), MemoryFiles(world), factories, lambda device: SETTINGS
    )
    server = GrpcServer(TrainerServiceSettings(port=0, drain_seconds=0), "trainer")
    name = "tetrarch.trainer.v1.TrainerService"
    server.add(trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server, TrainerServicer(controller), name)
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}", "trainer") as channel:
        yield Scene(world, trainer_service_pb2_grpc.TrainerServiceStub(channel))
        await controller.shutdown(1.0)
    await server.stop()


async def refusal(call) -> tuple[str, str, str]:
    """(code, reason, message) of a call that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = service_error(caught.value)
    return error.code.value, error.reason, error.message


async def test_start_is_idempotent_and_returns_at_once(scene):
    scene.world.supply = 0
    progress = await scene.start()
    assert progress.run_id == "r"
    assert progress.total_step_count == 4
    assert progress.phase == pb.PHASE_LOADING
    assert (await scene.start()).run_id == "r"
    assert scene.world.epoch <= 1


async def test_watch_streams_history_until_the_end(scene):
    await scene.start()
    progress, events = await scene.watch()
    assert progress.phase == pb.PHASE_ENDED
    assert progress.succeeded
    assert progress.step_count == 4
    assert progress.policy_version == scene.world.published
    assert [event.event for event in events] == list(range(1, len(events) + 1))
    kinds = [event.kind for event in events]
    assert kinds.count("step") == 4
    assert kinds.count("eval") == 3
    assert kinds.count("checkpoint") == 2
    assert set(kinds) <= {"step", "eval", "update_weights", "checkpoint", "notice"}
    (first,) = [event for event in events if event.kind == "step" and event.step == 0]
    wanted = {"reward_mean", "reward_std", "response_length_mean", "unscored_count", "staleness_max", "total_seconds"}
    wanted |= {"wait_groups_seconds", "train_seconds", "update_weights_seconds", "tokens_per_second", "loss"}
    assert wanted <= first.metrics.keys()
    _, later = await scene.watch(after_event=events[2].event)
    assert [event.event for event in later] == [event.event for event in events[3:]]


async def test_parts_of_a_step_add_up(scene):
    await scene.start()
    _, events = await scene.watch()
    parts = ("wait_groups", "plan", "train", "commit", "update_weights", "save", "eval", "other")
    for event in events:
        if event.kind == "step":
            total = sum(event.metrics.get(f"{part}_seconds", 0.0) for part in parts)
            assert total == pytest.approx(event.metrics["total_seconds"], rel=1e-6)


async def test_get_progress(scene):
    idle = (await scene.stub.GetProgress(pb.GetProgressRequest())).progress
    assert (idle.run_id, idle.phase) == ("", pb.PHASE_IDLE)
    await scene.start()
    assert (await scene.stub.GetProgress(pb.GetProgressRequest())).progress.run_id == "r"
    assert (await scene.stub.GetProgress(pb.GetProgressRequest(run_id="r"))).progress.run_dir.endswith("/r")
    code, reason, message = await refusal(scene.stub.GetProgress(pb.GetProgressRequest(run_id="other")))
    assert (code, reason) == ("NOT_FOUND", "RUN_NOT_FOUND")
    assert "other" in message


async def test_stop_waits_for_the_checkpoint(scene):
    scene.world.supply = 4
    await scene.start()
    while scene.world.committed < 1:
        await asyncio.sleep(0.01)
    response = await scene.stub.StopRun(pb.StopRunRequest(run_id="r", max_wait=Duration(seconds=10)))
    assert response.progress.phase == pb.PHASE_ENDED
    assert not response.progress.succeeded
    assert response.progress.reason
    assert scene.world.state == "STOPPED"
    again = await scene.stub.StopRun(pb.StopRunRequest(run_id="r", max_wait=Duration(seconds=10)))
    assert again.progress.phase == pb.PHASE_ENDED


async def test_export(scene):
    await scene.start()
    await scene.watch()
    response = await scene.stub.ExportModel(pb.ExportModelRequest(run_id="r", path="/tmp/out"))
    assert (response.path, response.step_count) == ("/tmp/out", 4)
    code, reason, message = await refusal(scene.stub.ExportModel(pb.ExportModelRequest(run_id="r", path="out")))
    assert (code, reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert "absolute" in message


async def test_refusals(scene):
    unknown = await refusal(scene.stub.StartRun(pb.StartRunRequest(run_id="other")))
    assert unknown[:2] == ("NOT_FOUND", "RUN_NOT_FOUND")
    empty = await refusal(scene.stub.StartRun(pb.StartRunRequest()))
    assert empty[:2] == ("INVALID_ARGUMENT", "INVALID_FIELD")
    scene.world.supply = 0
    await scene.start()
    busy = await refusal(scene.stub.StartRun(pb.StartRunRequest(run_id="other")))
    assert busy[:2] == ("FAILED_PRECONDITION", "BUSY")
    assert "run r" in busy[2]
    await scene.stub.StopRun(pb.StopRunRequest(run_id="r"))
    ended = await refusal(scene.stub.StartRun(pb.StartRunRequest(run_id="r")))
    assert ended[:2] == ("FAILED_PRECONDITION", "RUN_FINISHED")
    negative = await refusal(_first(scene.stub.WatchProgress(pb.WatchProgressRequest(run_id="r", after_event=-1))))
    assert negative[:2] == ("INVALID_ARGUMENT", "INVALID_FIELD")


async def _first(stream):
    async for response in stream:
        return response
    return None
