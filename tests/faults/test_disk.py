"""What a tier writes on a full disk: it holds up nobody, and what is lost of it is said. Whole runs: `test_network`."""

from __future__ import annotations

import asyncio
import json

import pytest

from services.common.errors import Code, ServiceError
from services.common.process import ManagedProcess
from services.trainer.adapters.journal import FILE_NAME, RunJournal
from services.trainer.core.progress import Progress
from tests.support.engine import write_checkpoint
from tests.support.small_disk import disk_at


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


async def test_an_export_that_finds_no_room_leaves_nothing_behind(tmp_path):
    import torch

    from services.trainer.core.buckets import TensorSpec, plan_buckets
    from services.trainer.ranks.export import write_export

    model = write_checkpoint(tmp_path / "model")
    weights = {"a": torch.ones(4, 1 << 16), "b": torch.zeros(4)}
    specs = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in weights.items()]
    with disk_at(tmp_path / "disk", 4 << 20) as disk:

        def export() -> None:
            write_export(iter(weights.items()), plan_buckets(specs, 1 << 30), model, disk.path / "hf")

        export()
        disk.fill()
        with pytest.raises(ServiceError, match=r"disk/hf could not be written .*No space left on device") as caught:
            export()
        assert caught.value.reason == "EXPORT_FAILED"
        assert sorted(path.name for path in disk.path.iterdir()) == [".filler", "hf"]
        assert (disk.path / "hf" / "model.safetensors").stat().st_size > 1 << 20
        disk.make_room()
        export()
