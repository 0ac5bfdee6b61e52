"""Versions as files, as the controller sees to them: what is written when and upon which base, and what may go.

Rank 0 writes (`commands.WriteFiles`); a store looks after what is there. Knows nothing of engines. Invariants:
- A version is written from the bytes staged for it: `settled` is awaited before others are staged.
- A delta's base is the version written before it in this session; chains begin with full files and stay short.
- The newest published version and what it is made of are never removed.
- Why files cannot be written is said once, and again when they can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from services.common.errors import ServiceError
from services.common.telemetry import get_logger
from services.common.weight_files.errors import files_not_written
from services.common.weight_files.manifest import Expected, rules_key
from services.trainer.core.file_commands import FilesState, FilesWritten, WriteFiles, WriteResult
from services.trainer.core.ports import Journal, RanksFailed
from services.trainer.core.update_groups import Ask

log = get_logger(__name__)

_MOST_DELTAS = 16
"""After so many, a version is written in full again: a node without a copy reads the whole chain."""
_LAST_SECONDS = 5.0
_FIRST_LOOK, _LONGEST_LOOK = 0.005, 0.25


@dataclass(frozen=True)
class FilesSettings:
    """`carries`: engines get their weights in files rather than over a collective. `timeout`: seconds for one version
    while engines wait for it."""

    directory: str
    run_id: str
    carries: bool
    delta: bool
    encoding: str
    keep: bool
    timeout: float


class WeightStore(Protocol):
    """The directory of a run's versions."""

    def path(self, version: int) -> str:
        """A version's directory, as engines see it."""
        ...

    def expect(self, expected: Expected) -> None:
        """Writes what engines must hold of a version beside its files. Raises OSError."""
        ...

    def keep(self, versions: set[int]) -> None:
        """Removes the older ones that are not among them; never raises."""
        ...


class VersionFiles:
    """Writes versions, one at a time.

    Args:
        ask: rank 0.
        store: where they are.
        journal: what a user should know is written here.
        settings: what is wanted.
    """

    def __init__(self, ask: Ask, store: WeightStore, journal: Journal, settings: FilesSettings) -> None:
        self._ask = ask
        self._store = store
        self._journal = journal
        self.settings = settings
        self._chain: list[tuple[int, WriteResult]] = []
        """Versions that the last written one is made of, a full one first."""
        self._writing: tuple[int, asyncio.Task[WriteResult]] | None = None
        self._hanging: asyncio.Task[WriteResult] | None = None
        self._held = asyncio.Event()
        self._held.set()
        self._trouble = ""
        self._behind: set[asyncio.Task] = set()

    @property
    def last(self) -> WriteResult | None:
        """How the newest version was written."""
        return self._chain[-1][1] if self._chain else None

    async def write(self, version: int, step: int = -1) -> str:
        """Writes the staged weights as `version`, once; → its directory. Raises FILES_NOT_WRITTEN: at once while a
        write hangs that was given up."""
        if self._hanging is not None and not self._hanging.done():
            raise files_not_written(self.settings.directory, "an earlier version is still being written")
        try:
            async with asyncio.timeout(self.settings.timeout):
                if self._writing is not None and self._writing[0] != version:
                    await asyncio.wait([self._writing[1]])  # in the background
                await asyncio.shield(self._begin(version))
        except TimeoutError:
            self._hanging = self._writing[1] if self._writing else None
            why = f"version {version} was not written within {self.settings.timeout:g} s (update_timeout)"
            error = files_not_written(self.settings.directory, why)
            self._say(error.message, step)
            raise error from None
        except RanksFailed:
            raise
        except ServiceError as error:
            self._writing = None
            self._say(error.message, step)
            raise
        self._say("", step)
        return self._store.path(version)

    def _begin(self, version: int) -> asyncio.Task[WriteResult]:
        """The task that writes a version, or has written it."""
        if self._writing is None or self._writing[0] != version:
            self._held.clear()
            task = asyncio.create_task(self._write(version), name=f"files of version {version}")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # told to whoever waits for it
            self._writing = version, task
        return self._writing[1]

    async def _write(self, version: int) -> WriteResult:
        deltas = [result for _, result in self._chain[1:]]
        wanted = self.settings.delta and bool(self._chain) and len(deltas) < _MOST_DELTAS
        if wanted and sum(result.file_bytes for result in deltas) > self._chain[0][1].file_bytes:
            wanted = False
        order = WriteFiles(
            directory=self.settings.directory,
            run_id=self.settings.run_id,
            version=version,
            base_version=self._chain[-1][0] if wanted else 0,
            encoding=self.settings.encoding,
            keeps_base=self.settings.delta,
        )
        result = await self._order(order)
        self._chain = [*self._chain, (version, result)] if result.mode == "delta" else [(version, result)]
        log.info("weights written", version=version, mode=result.mode, bytes=result.file_bytes, seconds=result.seconds)
        return result

    async def _order(self, order: WriteFiles) -> WriteResult:
        """Raises FILES_NOT_WRITTEN; a rank that fails as such is an error of the ranks."""
        try:
            state: FilesState = await self._ask(order)
            pause = _FIRST_LOOK
            while state.result is None:
                if state.held:
                    self._held.set()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_LOOK)
                state = await self._ask(FilesWritten())
        finally:
            self._held.set()
        if state.result.error:
            raise files_not_written(self.settings.directory, state.result.error.rstrip("."))
        return state.result

    async def ensure_full(self, version: int) -> None:
        """Every tensor of `version`, which was written last, beside its delta. Raises FILES_NOT_WRITTEN."""
        if self.last is not None and self.last.mode == "full":
            return
        self._held.clear()
        settings = self.settings
        order = WriteFiles(settings.directory, settings.run_id, version, keeps_base=True, beside=True)
        result = await self._order(order)
        self._chain = [(version, result)]

    async def settled(self) -> None:
        """Until the staged memory is not needed any more."""
        await self._held.wait()

    def published(self, version: int, step: int, checksums: Mapping[tuple, Mapping[str, str]]) -> None:
        """A version serves: sees to it that its files are there with what engines must hold (by algorithm and rules, in
        one tuple), and that older ones go. In the background; a version that comes while an earlier one is still being
        written has no files."""
        expected = {rules_key(algorithm, rules): values for (algorithm, *rules), values in checksums.items()}
        if self._writing is not None and self._writing[0] != version and not self._writing[1].done():
            log.warning("files of a version are left out: an earlier one is being written", version=version)
            return
        self._begin(version)
        task = asyncio.create_task(self._follow(version, step, expected), name=f"files of published version {version}")
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)

    async def _follow(self, version: int, step: int, expected: dict) -> None:
        try:
            await self._begin(version)
            self._say("", step)
            await asyncio.to_thread(self._store.expect, Expected(version, expected))
            if not self.settings.keep and self._chain[-1][0] == version:
                await asyncio.to_thread(self._store.keep, {number for number, _ in self._chain})
        except RanksFailed:
            return  # whoever uses the ranks next meets it
        except ServiceError as error:
            self._say(error.message, step)
        except OSError as error:
            self._say(files_not_written(self.settings.directory, error.strerror or error).message, step)

    async def close(self) -> None:
        """Ends what goes on in the background; the last version has a moment to be whole."""
        tasks = [*self._behind, *([self._writing[1]] if self._writing else [])]
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _say(self, trouble: str, step: int) -> None:
        if bool(trouble) != bool(self._trouble):
            other = "weights go over the collective" if self.settings.carries else "no engine can start from them"
            text = f"{trouble.rstrip('.')}; {other}" if trouble else "files of weights can be written again"
            self._journal.write("notice", step, {}, text)
        self._trouble = trouble
