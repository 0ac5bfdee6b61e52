"""History and checkpoint directories on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from services.common.errors import ServiceError
from services.trainer.adapters.checkpoint_files import SharedCheckpointFiles
from services.trainer.adapters.journal import FILE_NAME, RunJournal
from services.trainer.core.ports import CheckpointMarker
from services.trainer.core.progress import Progress


def test_history_is_on_disk_in_tensorboard_and_in_the_events(tmp_path):
    progress = Progress("r", run_dir=str(tmp_path / "run"))
    journal = RunJournal(progress)
    journal.write("step", 0, {"reward_mean": 0.5, "loss": float("nan")}, "step 1/4")
    journal.write("checkpoint", 0, {"seconds": 0.1}, "checkpoint x")
    journal.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / FILE_NAME).read_text().splitlines()]
    assert [(line["event"], line["kind"], line["step"]) for line in lines] == [(1, "step", 0), (2, "checkpoint", 0)]
    assert lines[0]["reward_mean"] == 0.5
    assert "loss" not in lines[0], "JSON has no NaN"
    assert [event.kind for event in progress.events] == ["step", "checkpoint"]
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    tags = {value.tag: event.step for event in EventFileLoader(str(file)).Load() for value in event.summary.value}
    assert tags == {"step/reward_mean": 1, "checkpoint/seconds": 1}


def test_history_goes_on_after_a_crash_in_the_middle_of_a_line(tmp_path):
    first = Progress("r", run_dir=str(tmp_path))
    journal = RunJournal(first)
    journal.write("step", 0, {"loss": 1.0}, "one")
    journal.close()
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"event": 2, "kind": "st')
    second = Progress("r", run_dir=str(tmp_path))
    journal = RunJournal(second)
    journal.write("restore", -1, {}, "again")
    journal.close()
    assert [(event.number, event.kind) for event in second.events] == [(1, "step"), (2, "restore")]
    assert second.events[0].metrics == {"loss": 1.0}
    assert len((tmp_path / FILE_NAME).read_text().splitlines()) == 2


def write_checkpoint(root: Path, step: int, *, complete: bool = True) -> Path:
    path = root / f"step_{step:06d}"
    path.mkdir(parents=True)
    if complete:
        (path / "metadata.json").write_text("{}")
    return path


def test_latest_checkpoint(tmp_path):
    files = SharedCheckpointFiles()
    assert files.latest(str(tmp_path / "none")) is None
    older, newer = write_checkpoint(tmp_path, 2), write_checkpoint(tmp_path, 4)
    (tmp_path / "latest").write_text("step_000004\n")
    assert files.latest(str(tmp_path)) == str(newer)
    (newer / "metadata.json").unlink()
    assert files.latest(str(tmp_path)) == str(older), "what latest names was being replaced"


def test_marker(tmp_path):
    files, marker = SharedCheckpointFiles(), CheckpointMarker("r", 3)
    assert files.marker(str(tmp_path)) is None
    files.mark(str(tmp_path / "save"), marker)
    assert files.marker(str(tmp_path / "save")) == marker
    (tmp_path / "file").write_text("")
    with pytest.raises(ServiceError, match="cannot be written") as caught:
        files.mark(str(tmp_path / "file"), marker)
    assert caught.value.reason == "SAVE_NOT_WRITABLE"


def test_exports_destroy_nothing_and_are_refused_where_they_cannot_be_written(tmp_path):
    files = SharedCheckpointFiles()
    files.check_export(str(tmp_path / "new" / "export"))
    (tmp_path / "empty").mkdir()
    files.check_export(str(tmp_path / "empty"))
    assert [path.name for path in (tmp_path / "new").iterdir()] == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    for place, why in (("full", "is not an empty directory"), ("full/thesis.tex/export", "File exists")):
        with pytest.raises(ServiceError, match=why) as caught:
            files.check_export(str(tmp_path / place))
        assert caught.value.reason == "EXPORT_REFUSED"
