"""Reads a run's weight versions from the shared directory, by a copy on this host where that helps. Implements
`core.weight_files.VersionFiles`.

Full files are checked and read where they are, unless the run names a directory for a copy; deltas always lead to a
copy. Invariants: the copy changes only while nobody reads it; a caller that gives up does not stop a change halfway.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from services.common.weight_files.copy import LocalCopy
from services.common.weight_files.manifest import (
    EXPECTED,
    Expected,
    Manifest,
    directory_name,
    read_expected,
    read_manifest,
    versions_in,
)
from services.common.weight_files.read import pieces_of, verify
from services.rollout.core.weight_files import HeldVersion


class SharedVersions:
    """Versions of one run.

    Args:
        run_directory: the run's own in the shared directory.
        copy_directory: where a copy goes.
        copies_full: whether full files are copied too, as the run asked for a copy.
    """

    def __init__(self, run_directory: Path, copy_directory: Path, *, copies_full: bool) -> None:
        self._run_directory = run_directory
        self._copy_directory = copy_directory
        self._copy = LocalCopy(copy_directory)
        self._copies_full = copies_full
        self._lock = asyncio.Lock()
        self._bringing: asyncio.Future[HeldVersion] | None = None
        self._held: tuple[str, HeldVersion] | None = None
        self._readers = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.asynccontextmanager
    async def open(self, path: str) -> AsyncIterator[HeldVersion]:
        """See the port. Others that open the same version share it; another version waits for them."""
        async with self._lock:
            held = await self._get(path)
            self._readers += 1
            self._idle.clear()
        try:
            yield held
        finally:
            self._readers -= 1
            if not self._readers:
                self._idle.set()

    async def _get(self, path: str) -> HeldVersion:
        if self._bringing is not None:  # of a caller that gave up
            await asyncio.wait([self._bringing])
        if self._held is not None and self._held[0] == path:
            return self._held[1]
        await self._idle.wait()
        self._held = None
        self._bringing = asyncio.ensure_future(asyncio.to_thread(self._bring, Path(path)))
        self._bringing.add_done_callback(lambda done: done.cancelled() or done.exception())
        held = await asyncio.shield(self._bringing)
        self._bringing = None
        self._held = path, held
        return held

    def _bring(self, path: Path) -> HeldVersion:
        manifest = read_manifest(path)
        if manifest.mode == "full" and not self._copies_full:
            verify(path, manifest)
            return HeldVersion(manifest.version, path, pieces_of(path, manifest))
        files = self._copy.bring(path)
        return HeldVersion(files.manifest.version, files.directory, files.pieces)

    async def newest(self, published: int, oldest: int) -> str:
        """See the port."""
        found = await asyncio.to_thread(versions_in, self._run_directory)
        usable = [version for version in found if oldest <= version <= published and self._is_known(version)]
        return str(self._run_directory / directory_name(usable[-1])) if usable else ""

    def _is_known(self, version: int) -> bool:
        return (self._run_directory / directory_name(version) / EXPECTED).exists()

    async def plan(self, path: str) -> tuple[Manifest, Expected]:
        """See the port."""
        directory = Path(path)
        return await asyncio.to_thread(lambda: (read_manifest(directory), read_expected(directory)))

    def forget(self) -> None:
        """See the port."""
        self._held = None
        self._copy.forget()

    async def close(self) -> None:
        """See the port. A copy whose place the run names stays for the next node."""
        self._held = None
        if not self._copies_full:
            await asyncio.to_thread(shutil.rmtree, self._copy_directory, ignore_errors=True)
