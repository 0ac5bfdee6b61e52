"""Files as a way for bytes to engines: who gets them, in which groups, and what failures change.

Joins what is written (`weight_files`) with who is to read it (`transports`), for the updater. Invariant: an engine that
goes by files is a group of its own, as nothing joins it to others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from services.common.errors import ServiceError
from services.common.telemetry import get_logger
from services.trainer.core.ports import Journal, RanksFailed
from services.trainer.core.records import EngineView
from services.trainer.core.transports import Transports
from services.trainer.core.update_groups import Group
from services.trainer.core.update_report import UpdateReport
from services.trainer.core.weight_files import VersionFiles

log = get_logger(__name__)


class FileCarrier:
    """Bytes in files that engines read by themselves. A `Carrier`."""

    spec = None

    def __init__(self, weights_path: str) -> None:
        self.weights_path = weights_path

    async def begin(self, timeout: float) -> None:
        """The files are there already."""

    async def send(self, timeout: float) -> None:
        """Engines read them when they are asked to."""

    async def error(self) -> str | None:
        """Nothing of ours can fail any more."""
        return None

    async def end(self) -> None:
        """The files stay for others."""


class FileTransport:
    """The files of a run as an updater uses them.

    Args:
        versions: writes them; None when the run has no directory for files.
        journal: changes of an engine's way are written here; None where there are none.
    """

    def __init__(self, versions: VersionFiles | None, journal: Journal | None) -> None:
        self._versions = versions
        self._journal = journal
        prefer = versions is not None and versions.settings.carries
        self._transports = Transports(prefer_files=prefer, have_files=versions is not None)

    async def settled(self) -> None:
        """Until other weights may be staged."""
        if self._versions is not None:
            await self._versions.settled()

    def published(self, version: int, step: int, expected: Mapping[tuple, Mapping[str, str]]) -> None:
        """See `VersionFiles.published`."""
        if self._versions is not None:
            self._versions.published(version, step, expected)

    async def close(self) -> None:
        """Ends what goes on in the background."""
        if self._versions is not None:
            await self._versions.close()

    async def deal(
        self, name: str, engines: Sequence[EngineView], report: UpdateReport
    ) -> tuple[list[Group], list[EngineView]]:
        """→ groups of engines that get the report's version in files, which are there then, and the other engines. All
        are others when the files cannot be written. Raises RanksFailed."""
        began, version = time.monotonic(), report.version
        chosen = [engine for engine in engines if self._transports.by_files(engine)]
        if not chosen or self._versions is None:
            return [], list(engines)
        try:
            path = await self._versions.write(version)
            if any(map(self._transports.wants_full, chosen)):
                await self._versions.ensure_full(version)
        except RanksFailed:
            raise
        except ServiceError as error:
            log.warning("weights go over the collective", version=version, why=error.message)
            return [], list(engines)
        report.seconds["files"] = time.monotonic() - began
        if (written := self._versions.last) is not None:
            report.file_bytes, report.changed_share = written.file_bytes, written.changed_share
        groups = [Group(f"{name}-files-{index}", FileCarrier(path), (engine,)) for index, engine in enumerate(chosen)]
        return groups, [engine for engine in engines if engine not in chosen]

    def learn(self, engines: Sequence[EngineView], report: UpdateReport) -> None:
        """Draws conclusions from an update of `engines`."""
        for engine in engines:
            if engine.engine_id in report.committed:
                self._transports.succeeded(engine)
            elif engine.engine_id in report.failed:
                reason, why = report.reasons.get(engine.engine_id, ""), report.failed[engine.engine_id]
                if (said := self._transports.failed(engine, reason, why)) and self._journal:
                    self._journal.write("notice", -1, {}, said)

    def keep(self, engines: Sequence[EngineView]) -> None:
        """All engines that live."""
        self._transports.keep(list(engines))
