"""What reaches a receiver late or out of order may undo nothing that came after it. In this process, without groups."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from services.common.errors import ServiceError
from services.rollout.adapters.receiver_client import ReceiverSocket
from services.rollout.receiver import groups as receiver_groups
from services.rollout.receiver import server
from services.rollout.receiver.groups import Groups, Meeting
from services.trainer.ranks import groups as rank_groups

SIZE = 4096


class Model:
    """Holds one tensor."""

    def __init__(self) -> None:
        self.held = torch.zeros(SIZE, dtype=torch.uint8)
        self.loading = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def parameters(self):
        return iter([self.held])

    def load_weights(self, tensors) -> None:
        self.loading.set()
        self.go_on.wait(10.0)
        for _, tensor in tensors:
            self.held.copy_(tensor)


class Engine:
    """A receiver on a model, and the node's socket to it."""

    def __init__(self, directory: Path, monkeypatch) -> None:
        environment = {server.DIRECTORY: str(directory), server.TOKEN: "t"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(server, "_receiver", None)
        self.directory, self.model = directory, Model()
        self.load()
        self._socket = ReceiverSocket(environment, 0, "Engine n-0")

    def load(self) -> None:
        """What the scheduler calls."""
        server.load(self.model, [])

    async def ask(self, command: str, **fields):
        return await self._socket.ask(command, 15.0, **fields)

    async def arm(self, epoch: int) -> None:
        await self.ask("arm", epoch=epoch, repeat=False, names=["a"], algorithm="sha256-64")

    async def stage(self, epoch: int) -> None:
        """From a file whose bytes all are `epoch`."""
        await self.ask("reserve", buckets=[[("a", "uint8", [SIZE])]])
        path = self.directory / f"{epoch}.bin"
        path.write_bytes(bytes([epoch]) * SIZE)
        await self.ask("fill", epoch=epoch, pieces=[(str(path), 0, SIZE)], seconds=10.0)


@pytest.fixture
def engine(tmp_path, monkeypatch) -> Engine:
    """One engine."""
    return Engine(tmp_path, monkeypatch)


@pytest.mark.parametrize("then", ["reserve", "leave", "drop", "next"])
async def test_an_activation_that_comes_after_its_update_was_given_up_does_nothing(engine, then):
    """The scheduler was busy as the update was aborted, and calls now, while the engine serves."""
    await engine.stage(1)
    await engine.arm(1)
    if then == "next":
        await engine.stage(2)
    else:
        await engine.ask(
            then, **{"reserve": {"buckets": [[("a", "uint8", [SIZE])]]}, "leave": {"group": "g"}}.get(then, {})
        )
    engine.load()
    assert not engine.model.held.any()
    await engine.stage(3)
    await engine.arm(3)
    engine.load()
    assert (engine.model.held == 3).all()
    assert (await engine.ask("result"))["how"] == "loaded"


async def test_leaving_waits_for_an_activation_that_has_begun(engine):
    """Else the next transfer would write into what is being read."""
    await engine.stage(1)
    await engine.arm(1)
    engine.model.go_on.clear()
    loading = asyncio.create_task(asyncio.to_thread(engine.load))
    await asyncio.to_thread(engine.model.loading.wait, 10.0)
    leaving = asyncio.create_task(engine.ask("leave", group="g"))
    reserving = asyncio.create_task(engine.stage(2))
    await asyncio.sleep(0.2)
    assert not leaving.done()
    assert not reserving.done()
    engine.model.go_on.set()
    await asyncio.gather(loading, leaving, reserving)
    assert (engine.model.held == 1).all()


async def test_a_group_that_was_left_before_it_was_joined_is_not_joined(engine):
    await engine.stage(1)  # a first command that needs torch
    await engine.ask("leave", group="g")
    meeting = {"name": "g", "backend": "gloo", "master_address": "127.0.0.1", "master_port": 1, "world_size": 2}
    with pytest.raises(ServiceError, match="group g has been left"):
        await engine.ask("join", group=meeting | {"rank": 1}, seconds=10.0)


async def test_a_stranger_is_refused(engine):
    engine._socket._token = "another"
    with pytest.raises(ServiceError, match="token"):
        await engine.ask("status")


def test_a_group_left_by_two_at_once_ends_once_and_no_other_group_with_it(monkeypatch):
    """torch takes None for the world: the engine's own tensor-parallel group would go."""
    destroyed: list[object] = []
    groups = Groups(torch.device("cpu"))
    monkeypatch.setattr(receiver_groups, "_meet", lambda *_: "a group")
    monkeypatch.setattr(receiver_groups.dist, "destroy_process_group", destroyed.append)
    groups.join(Meeting("g", "gloo", "127.0.0.1", 1, 2, 1), 1.0)
    member = groups._members["g"]
    leaving = [threading.Thread(target=groups._end, args=(member,)) for _ in range(8)]
    for thread in leaving:
        thread.start()
    groups.leave("g")
    for thread in leaving:
        thread.join(5.0)
    assert member.ended.wait(5.0)
    assert destroyed in ([], ["a group"])
    assert None not in destroyed


class LateWork:
    """A transfer that ends right after a wait for it has timed out."""

    def __init__(self, error: str = "") -> None:
        self._error, self._waits = error, 0

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout=None) -> None:
        self._waits += 1
        if self._waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)


@pytest.mark.parametrize("over", [receiver_groups._arrived, rank_groups._over])
def test_a_transfer_that_ends_as_a_wait_for_it_times_out_has_succeeded(over):
    assert over(LateWork())
    with pytest.raises(RuntimeError, match="closed by peer"):
        over(LateWork("Connection closed by peer"))
