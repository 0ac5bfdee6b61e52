"""Disks that are full, under a whole run: it says which and where, keeps the last good checkpoint, and goes on."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.recovery import disks
from benchmarks.recovery.ledger import Ledger
from benchmarks.recovery.world import Shape, world
from services.common.errors import Code, ServiceError
from services.common.process import ManagedProcess
from services.trainer.adapters.journal import FILE_NAME, RunJournal
from services.trainer.core.progress import Progress
from tests.support.engine import write_checkpoint
from tests.support.small_disk import disk_at

pytestmark = pytest.mark.asyncio(loop_scope="module")
FULL_SECONDS = 2.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made(tmp_path_factory):
    """A run on small disks, some steps old."""
    directory = tmp_path_factory.mktemp("disks")
    try:
        async with world(directory, Shape(where=disks.NAME), write_checkpoint(directory / "model")) as found:
            yield found
    except RuntimeError as error:
        pytest.skip(f"a small disk cannot be mounted here: {error}")


async def latest(made: disks.DisksWorld) -> Path:
    """The checkpoint that `latest` names, which must be complete."""
    root = made.disks["checkpoints"].path
    named = root / (await asyncio.to_thread((root / "latest").read_text)).strip()
    assert await asyncio.to_thread((named / "metadata.json").exists)
    return named


async def goes_on(made: disks.DisksWorld, at: float) -> None:
    """Steps and a checkpoint after a moment."""
    await made.until(lambda: len(made.history.since(at, "step")) >= 2, 40, "steps")
    await made.until(lambda: made.history.since(at, "checkpoint"), 40, "a checkpoint")


async def test_the_disk_of_the_checkpoints(made):
    disk = made.disks["checkpoints"]
    await asyncio.to_thread(disk.fill)
    at = time.time()
    said = await made.until(lambda: made.history.since(at, "notice"), 40, "a sentence")
    assert "goes on without a checkpoint" in said[0]["message"]
    assert str(disk.path) in said[0]["message"]
    assert (await made.run()).checkpoint_step + 1 == int((await latest(made)).name.removeprefix("step_"))
    await made.until(lambda: len(made.history.since(said[0]["time"], "step")) >= 3, 40, "steps with a full disk")
    assert not [path for path in await asyncio.to_thread(lambda: list(disk.path.glob(".step_*"))) if path.is_file()]
    await asyncio.to_thread(disk.make_room)
    await goes_on(made, time.time())
    await latest(made)


async def test_the_disk_of_the_store(made):
    disk = made.disks["store"]
    await asyncio.to_thread(disk.fill)
    at = time.time()
    await made.until(lambda: made.wrote("trainer", at, "takes no writes"), 40, "a sentence")
    node = await made.until(made.node, 10, "the node")
    assert node.problem == "" or str(disk.path) in node.problem
    await asyncio.sleep(FULL_SECONDS)
    assert (await made.run()).reason == "", "the run waits"
    await asyncio.to_thread(disk.make_room)
    await goes_on(made, time.time())


async def test_the_disk_of_the_history(made):
    disk = made.disks["history"]
    await asyncio.to_thread(disk.fill)
    at = time.time()
    await made.until(lambda: made.wrote("trainer", at, "cannot be written (No space left on device)"), 40, "a sentence")
    committed = (await made.run()).committed_step

    async def further() -> bool:
        return (await made.run()).committed_step >= committed + 3

    await made.until(further, 40, "steps that cannot be written down")
    await asyncio.to_thread(disk.make_room)
    await goes_on(made, time.time())
    steps = [entry["step"] for entry in made.history.read() if entry["kind"] == "step"]
    assert steps == list(range(len(steps))), "no line is missing"


async def test_nothing_was_lost_and_nothing_trained_twice(made):
    verdict = await Ledger(made).close()
    assert (verdict.lost, verdict.doubled, verdict.faults) == (0, 0, ())
    assert all(made.supervisor.pid(name) for name in made.lines), "nobody died of it"
    assert not made.notes


async def test_a_log_on_a_full_disk_holds_up_nobody(tmp_path):
    """A child whose output nobody takes stands still once the pipe is full (64 KiB)."""
    with disk_at(tmp_path / "disk", 1 << 20) as disk:
        disk.fill()
        chatty = [
            "sh",
            "-c",
            "i=0; while [ $i -lt 4000 ]; do echo 'a line of this program, forty characters'; i=$((i+1)); done",
        ]
        process = ManagedProcess("chatty", chatty, log_path=disk.path / "logs" / "chatty.log")
        await process.start()
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert len(process.tail(200)) == 200


async def test_history_needs_a_place():
    with pytest.raises(ServiceError, match="run_dir /proc/run on the trainer's host cannot be written: ") as caught:
        RunJournal(Progress("r", run_dir="/proc/run"))
    assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, "RUN_DIR_NOT_WRITABLE")


async def test_history_waits_for_room(tmp_path):
    with disk_at(tmp_path / "disk", 1 << 20) as disk:
        progress = Progress("r", run_dir=str(disk.path / "run"))
        journal = RunJournal(progress)
        journal.write("step", 0, {"loss": 1.0}, "one")
        disk.fill()
        for step in range(1, 200):
            journal.write("step", step, {"loss": 1.0}, "more " * 20)
        notices = [event.message for event in progress.events if event.kind == "notice"]
        assert notices == [
            f"{disk.path / 'run' / FILE_NAME} cannot be written (No space left on device): its lines wait in memory"
            " until there is room"
        ]
        disk.make_room()
        journal.write("step", 200, {"loss": 1.0}, "last")
        journal.close()
        lines = [json.loads(line) for line in (disk.path / "run" / FILE_NAME).read_text().splitlines()]
        assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(201))
        assert [line["event"] for line in lines] == list(range(1, 203))
