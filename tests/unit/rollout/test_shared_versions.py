"""A node reads versions: shared by its engines, changed only while nobody reads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.common.errors import ServiceError
from services.common.weight_files.manifest import Expected, write_expected
from services.common.weight_files.write import write_delta, write_full
from services.rollout.adapters.weight_files import SharedVersions
from services.rollout.core.engine_port import TensorSpec
from services.rollout.core.weight_files import HeldVersion
from tests.support.weight_versions import base, buckets, content, place, trained


def versions(root: Path, *, copies_full: bool = False) -> SharedVersions:
    return SharedVersions(root / "run", root / "local" / "run", copies_full=copies_full)


def written(root: Path) -> list:
    """Version 1 in full, version 2 as a delta."""
    made = [buckets(0)]
    made.append(trained(made[0], 1, 0.1))
    write_full(place(root, 1), made[0])
    write_delta(place(root, 2), made[1], base(1, made[0]), "overwrite")
    for version in (1, 2):
        write_expected(place(root, version).directory, Expected(version))
    return made


def path(root: Path, version: int) -> str:
    return str(place(root, version).directory)


def held(version: HeldVersion) -> dict[str, bytes]:
    found = {}
    for piece in version.pieces:
        at = piece.offset
        for tensor in piece.tensors:
            found[tensor.name] = piece.path.read_bytes()[at : at + tensor.size_bytes]
            at += tensor.size_bytes
    return found


@pytest.mark.parametrize("copies_full", [False, True])
async def test_full_files_are_read_in_place_unless_a_copy_is_wanted(tmp_path, copies_full):
    made = written(tmp_path)
    async with versions(tmp_path, copies_full=copies_full).open(path(tmp_path, 1)) as version:
        assert held(version) == content(made[0])
        assert (tmp_path / "local" in version.directory.parents) == copies_full
        version.check(1, version.buckets)


async def test_a_delta_leads_to_a_copy_that_engines_share_and_nobody_changes_meanwhile(tmp_path):
    made = written(tmp_path)
    files = versions(tmp_path, copies_full=True)
    async with files.open(path(tmp_path, 1)) as first, files.open(path(tmp_path, 1)) as again:
        assert again is first
        waiting = asyncio.create_task(files.open(path(tmp_path, 2)).__aenter__())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert held(first) == content(made[0])
    second = await asyncio.wait_for(waiting, 5)
    assert held(second) == content(made[1])


async def test_a_caller_that_gives_up_leaves_the_copy_whole(tmp_path):
    made = written(tmp_path)
    files = versions(tmp_path)
    giving_up = asyncio.create_task(files.open(path(tmp_path, 2)).__aenter__())
    await asyncio.sleep(0)
    giving_up.cancel()
    await asyncio.gather(giving_up, return_exceptions=True)
    async with files.open(path(tmp_path, 2)) as version:
        assert held(version) == content(made[1])


async def test_what_did_not_verify_is_read_again(tmp_path):
    made = written(tmp_path)
    files = versions(tmp_path)
    async with files.open(path(tmp_path, 2)) as version:
        damaged = version.pieces[0].path
    damaged.write_bytes(bytes(damaged.stat().st_size))
    files.forget()
    async with files.open(path(tmp_path, 2)) as version:
        assert held(version) == content(made[1])


async def test_the_newest_usable_version_has_what_engines_must_hold(tmp_path):
    written(tmp_path)
    files = versions(tmp_path)
    assert await files.newest(2, 2) == path(tmp_path, 2)
    assert await files.newest(9, 1) == path(tmp_path, 2)
    assert await files.newest(1, 0) == path(tmp_path, 1)
    assert await files.newest(5, 3) == ""
    (place(tmp_path, 2).directory / "expected.json").unlink()
    assert await files.newest(2, 1) == path(tmp_path, 1)
    manifest, expected = await files.plan(path(tmp_path, 1))
    assert (manifest.version, expected.version) == (1, 1)


async def test_other_tensors_than_the_update_names_are_refused(tmp_path):
    written(tmp_path)
    async with versions(tmp_path).open(path(tmp_path, 1)) as version:
        plan = version.buckets
        with pytest.raises(ServiceError, match="they are version 1, not 2"):
            version.check(2, plan)
        wrong = ((TensorSpec("embed.weight", "float32", (50, 16)), *plan[0][1:]), *plan[1:])
        with pytest.raises(ServiceError, match=r"others than those of the update: embed\.weight"):
            version.check(1, wrong)
