"""An updater with files: who gets them, what falls back to what, and what the history says of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.common.errors import Code, ServiceError
from services.common.weight_files.manifest import Expected
from services.trainer.core.file_carrier import FileTransport
from services.trainer.core.file_commands import FilesState, FilesWritten, WriteFiles, WriteResult
from services.trainer.core.weight_files import FilesSettings, VersionFiles
from services.trainer.core.weights import WeightUpdater
from tests.unit.trainer.test_weights_update import Scene


class Store:
    """A directory in memory."""

    def __init__(self) -> None:
        self.expected: dict[int, Expected] = {}
        self.kept: set[int] = set()

    def path(self, version: int) -> str:
        return f"/shared/{version}"

    def expect(self, expected: Expected) -> None:
        self.expected[expected.version] = expected

    def keep(self, versions: set[int]) -> None:
        self.kept = versions


class FileScene(Scene):
    """Rank 0 writes what it is told, unless it is told why it cannot."""

    def __init__(self, tmp_path: Path, engines: int, *, carries: bool, delta: bool = False) -> None:
        super().__init__(tmp_path, engines)
        self.store, self.orders, self.error = Store(), [], ""
        settings = FilesSettings("/shared", "r", carries, delta, "overwrite", keep=False, timeout=2.0)
        self.files = VersionFiles(self._ask, self.store, self.journal, settings)
        old = self.updater
        transport = FileTransport(self.files, self.journal)
        self.updater = WeightUpdater(self.ranks, self.rollout, old._setup, old._settings, transport)
        self.fleet._updater = self.updater

    async def _ask(self, command: WriteFiles | FilesWritten) -> FilesState:
        if isinstance(command, WriteFiles):
            self.orders.append(command)
        mode = "delta" if self.orders[-1].base_version else "full"
        size = 5 if mode == "delta" else 56
        return FilesState(True, self.orders[-1].version, WriteResult(mode, size, 56, 1, 14, 0.1, self.error))

    def refuse(self, call: str, engine: str, reason: str) -> None:
        error = ServiceError(Code.FAILED_PRECONDITION, reason, f"{engine} says {reason}.")
        self.world.faults[(call, engine)] = error

    @property
    def told(self) -> list[str]:
        return [event.message for event in self.journal.progress.events if event.kind == "notice"]

    def ways(self) -> list[str]:
        """How the engines of the last pushes were told to get their bytes; forgotten then."""
        ways = ["files" if name.startswith("/shared/") else "collective" for name in self.rollout.groups]
        self.rollout.groups.clear()
        return ways

    async def push_one(self, version: int):
        """One attempt, whatever comes of it."""
        await self.updater.stage()
        return await self.updater.push(version, await self.fleet.engines())


async def settle(scene: FileScene) -> None:
    await asyncio.gather(*scene.files._behind)


async def test_engines_get_files_and_verify_as_ever(tmp_path):
    scene = FileScene(tmp_path, 2, carries=True, delta=True)
    for version in (1, 2, 3):
        report = await scene.push(version)
        assert sorted(report.committed) == ["n-0", "n-1"]
        assert report.verified_tensor_count == 2
    assert report.file_bytes == 5
    assert report.changed_share == 1 / 14
    assert scene.ways() == ["files"] * 6
    assert not scene.ranks.joined
    await settle(scene)
    assert scene.store.kept == {1, 2, 3}
    assert [order.base_version for order in scene.orders] == [0, 1, 2]
    ((algorithm, rules), values) = next(iter(scene.store.expected[3].by_rules.items()))
    assert (algorithm, rules, set(values)) == ("sha256-64", (("ab", ("a", "b"), 0),), {"ab"})


async def test_the_collective_is_used_when_nothing_can_be_written_and_that_is_told_once(tmp_path):
    scene = FileScene(tmp_path, 1, carries=True)
    scene.error = "No space left on device"
    for version in (1, 2):
        assert (await scene.push(version)).committed == ["n-0"]
        await settle(scene)
    assert scene.ways() == ["collective", "collective"]
    assert len(scene.told) == 1
    assert "No space left on device; weights go over the collective" in scene.told[0]
    scene.error = ""
    await scene.push(3)
    assert scene.ways() == ["files"]
    assert scene.told[1:] == ["files of weights can be written again"]


async def test_an_engine_at_another_base_gets_full_files_of_the_same_version(tmp_path):
    scene = FileScene(tmp_path, 1, carries=True, delta=True)
    await scene.push(1)
    scene.refuse("transfer", "n-0", "BASE_MISMATCH")
    assert not (await scene.push_one(2)).committed
    scene.world.faults.clear()
    report = await scene.updater.push(2, await scene.fleet.engines())
    assert report.committed == ["n-0"]
    assert [order.beside for order in scene.orders] == [False, False, True]
    assert scene.told == ["engine n-0 gets full files: n-0 says BASE_MISMATCH."]
    await scene.push(3)
    assert scene.orders[-1].base_version == 2


async def test_a_node_that_does_not_see_the_directory_goes_over_the_collective_alone(tmp_path):
    scene = FileScene(tmp_path, 2, carries=True)
    scene.refuse("transfer", "n-1", "FILES_MISSING")
    assert (await scene.push_one(1)).committed == ["n-0"]
    scene.world.faults.clear()
    scene.ways()
    assert sorted((await scene.push_one(2)).committed) == ["n-0", "n-1"]
    assert sorted(scene.ways()) == ["collective", "files"]
    assert scene.told == ["engine n-1 gets its weights over a collective from now on: n-1 says FILES_MISSING."]


@pytest.mark.parametrize(("reason", "attempts"), [("TRANSFER_FAILED", 2), ("INCOMPATIBLE", 1)])
async def test_an_engine_that_no_collective_reaches_gets_files(tmp_path, reason, attempts):
    scene = FileScene(tmp_path, 1, carries=False)
    scene.refuse("transfer", "n-0", reason)
    for _ in range(attempts):
        assert not (await scene.push_one(1)).committed
    scene.world.faults.clear()
    assert scene.ways() == ["collective"] * attempts
    assert (await scene.push_one(1)).committed == ["n-0"]
    assert scene.ways() == ["files"]
    assert scene.told == [f"engine n-0 gets its weights in files from now on: n-0 says {reason}."]


async def test_published_versions_are_left_behind_whatever_the_way(tmp_path):
    scene = FileScene(tmp_path, 1, carries=False)
    for version in (1, 2):
        await scene.push(version)
        await settle(scene)
    assert scene.ways() == ["collective", "collective"]
    assert [order.version for order in scene.orders] == [1, 2]
    assert scene.store.kept == {2}
    assert set(scene.store.expected) == {1, 2}
