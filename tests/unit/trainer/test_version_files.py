"""Versions as files, the controller's side: rank 0's real writer, a real directory, no ranks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.errors import ServiceError
from services.common.weight_files.copy import LocalCopy
from services.common.weight_files.manifest import read_expected, read_manifest, versions_in
from services.trainer.adapters.weight_store import SharedWeightStore
from services.trainer.core.buckets import TensorSpec, plan_buckets
from services.trainer.core.file_commands import FilesState, FilesWritten, WriteFiles
from services.trainer.core.progress import Progress
from services.trainer.core.weight_files import FilesSettings, VersionFiles
from services.trainer.ranks import weight_files as rank_files
from services.trainer.ranks.weights import StagedWeights
from tests.support.trainer_journal import MemoryJournal

SPECS = [TensorSpec("a", "bfloat16", (40, 16)), TensorSpec("b", "bfloat16", (16,)), TensorSpec("c", "float32", (8, 8))]


class Scene:
    """A rank's writer, asked as the controller asks it, over staged weights that "train"."""

    def __init__(self, tmp_path: Path, **settings: object) -> None:
        self.root = tmp_path / "shared"
        self.rank = rank_files.VersionFiles()
        self.progress = Progress("r", run_dir=str(tmp_path))
        self.delay = 0.0
        values = {"carries": True, "delta": True, "encoding": "xor", "keep": False, "timeout": 5.0} | settings
        self.files = VersionFiles(
            self._ask,
            SharedWeightStore(str(self.root), "r"),
            MemoryJournal(self.progress),
            FilesSettings(directory=str(self.root), run_id="r", **values),
        )
        self.plan = plan_buckets(SPECS, 1500)
        self.weights = [np.zeros(sum(s.size_bytes for s in bucket), np.uint8) for bucket in self.plan.buckets]
        self.stage(0.0)

    async def _ask(self, command: WriteFiles | FilesWritten) -> FilesState:
        await asyncio.sleep(self.delay)
        return self.rank.state if isinstance(command, FilesWritten) else self.rank.begin(self.staged, command)

    def stage(self, share: float, seed: int = 0) -> None:
        """Changes some elements, and stages the result in memory that is used again."""
        random = np.random.default_rng(seed)
        for data in self.weights:
            chosen = random.random(len(data)) < share
            data[chosen] ^= random.integers(1, 256, int(chosen.sum()), dtype=np.uint8)
        self.staged = StagedWeights(self.plan, [torch.from_numpy(data.copy()) for data in self.weights])
        for index in range(len(self.weights)):
            self.staged.filled(index)

    @property
    def said(self) -> list[str]:
        return [event.message for event in self.progress.events]

    @property
    def versions(self) -> list[int]:
        return versions_in(self.root / "r")

    async def published(self, version: int) -> None:
        self.files.published(version, 0, {})
        await asyncio.gather(*self.files._behind)

    def read(self, version: int, copy: LocalCopy) -> bytes:
        pieces = copy.bring(Path(SharedWeightStore(str(self.root), "r").path(version))).pieces
        return b"".join(piece.path.read_bytes()[piece.offset :] for piece in pieces)

    def content(self) -> bytes:
        return b"".join(data.tobytes() for data in self.weights)


async def test_deltas_follow_a_full_version_and_old_chains_go(tmp_path):
    scene, copy = Scene(tmp_path), LocalCopy(tmp_path / "local")
    modes = []
    for version in range(1, 5):
        scene.stage(0.02, version)
        assert await scene.files.write(version) == str(scene.root / "r" / f"version-{version:06d}")
        modes.append(read_manifest(scene.root / "r" / f"version-{version:06d}").mode)
        assert scene.read(version, copy) == scene.content()
        await scene.published(version)
    assert modes == ["full", "delta", "delta", "delta"]
    assert scene.versions == [1, 2, 3, 4]
    scene.stage(1.0)
    await scene.files.write(5)
    assert scene.files.last.mode == "full"  # everything changed
    assert scene.versions == [1, 2, 3, 4, 5]  # the published one is never gone
    await scene.published(5)
    assert scene.versions == [5]
    assert scene.said == []


async def test_chains_stay_short(tmp_path, monkeypatch):
    monkeypatch.setattr("services.trainer.core.weight_files._MOST_DELTAS", 2)
    scene, modes = Scene(tmp_path), []
    for version in range(1, 6):
        scene.stage(0.01, version)
        await scene.files.write(version)
        modes.append(scene.files.last.mode)
    assert modes == ["full", "delta", "delta", "full", "delta"]


async def test_full_files_beside_a_delta_are_the_same_version(tmp_path):
    scene = Scene(tmp_path)
    await scene.files.write(1)
    scene.stage(0.02)
    await scene.files.write(2)
    await scene.published(2)
    for file in (scene.root / "r" / "version-000001").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ServiceError, match="cannot be read"):
        scene.read(2, LocalCopy(tmp_path / "local"))
    await scene.files.ensure_full(2)
    assert scene.read(2, LocalCopy(tmp_path / "local")) == scene.content()
    scene.stage(0.02, 3)
    await scene.files.write(3)
    assert scene.files.last.mode == "delta"
    assert scene.read(3, LocalCopy(tmp_path / "local")) == scene.content()


async def test_the_collective_leaves_the_published_version_behind_and_what_engines_must_hold(tmp_path):
    scene = Scene(tmp_path, carries=False, delta=False)
    rules = (("qkv", ("a", "b"), 0),)
    for version in (1, 2, 3):
        scene.stage(0.3, version)
        scene.files.published(version, 0, {("sha256-64", *rules): {"qkv": f"{version:016x}"}})
        await scene.files.settled()
        scene.stage(0.9)  # trains on at once
        await asyncio.gather(*scene.files._behind)
        assert scene.versions == [version]
    directory = scene.root / "r" / "version-000003"
    assert read_expected(directory).of("sha256-64", rules) == {"qkv": "0" * 15 + "3"}


async def test_what_is_staged_may_change_as_soon_as_it_is_held(tmp_path):
    scene = Scene(tmp_path, carries=False, delta=False)
    scene.delay = 0.05
    scene.stage(0.5, 1)
    wanted = scene.content()
    scene.files.published(1, 0, {})
    await scene.files.settled()
    for bucket in scene.staged.buckets:
        bucket.zero_()
    await asyncio.gather(*scene.files._behind)
    assert scene.read(1, LocalCopy(tmp_path / "local")) == wanted


async def test_a_directory_that_cannot_be_written_is_said_once_and_so_is_its_return(tmp_path):
    scene = Scene(tmp_path)
    scene.root.write_text("a file where a directory should be")
    for version in (1, 2):
        with pytest.raises(ServiceError) as caught:
            await scene.files.write(version, 7)
        assert caught.value.reason == "FILES_NOT_WRITTEN"
    scene.root.unlink()
    await scene.files.write(3)
    assert [line.rsplit(";")[-1] for line in scene.said] == [
        " weights go over the collective",
        "files of weights can be written again",
    ]
    assert "File exists" in scene.said[0] or "Not a directory" in scene.said[0]
    assert scene.versions == [3]


async def test_a_write_that_hangs_holds_nobody_for_longer_than_the_timeout(tmp_path, monkeypatch):
    scene = Scene(tmp_path, timeout=0.2)
    end = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(*_: object) -> None:
        asyncio.run_coroutine_threadsafe(end.wait(), loop).result()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("services.common.weight_files.write._write_file", hang)
    with pytest.raises(ServiceError, match=r"not written within 0\.2 s \(update_timeout\)"):
        await scene.files.write(1)
    with pytest.raises(ServiceError, match="an earlier version is still being written"):
        await scene.files.write(2)
    end.set()
    monkeypatch.undo()
    await asyncio.sleep(1.0)
    await scene.files.write(3)
    assert scene.versions == [3]
