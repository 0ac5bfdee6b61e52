"""Which engine gets its bytes over a collective and which in files, by what was wanted and what failed. Pure.

Invariant: an engine changes from one way to the other at most once a life of its process, so that no two ways are tried
in turn for ever; the change is told once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.trainer.core.records import EngineView

_PATIENCE = 2
"""Failures in a row after which the other way is taken."""
_HOPELESS = frozenset({"INCOMPATIBLE", "FILES_MISSING", "FILES_NOT_WRITTEN"})
"""Reasons that trying again the same way cannot mend."""
_HEALED_BY_FULL_FILES = frozenset({"BASE_MISMATCH", "FILES_CORRUPT"})
_NOT_THE_WAY = frozenset({"FENCED", "ENGINE_UNAVAILABLE", "ENGINE_NOT_FOUND", "EPOCH_NOT_PREPARED", "RUN_NOT_SERVED"})
"""Reasons that say nothing about how bytes travel."""

Process = tuple[str, str]
"""Engine id and incarnation."""


@dataclass
class _Record:
    failures: int = 0
    changed: bool = False
    wants_full: bool = False


@dataclass
class Transports:
    """`prefer_files`: what the run asks for. `have_files`: whether there is a directory at all."""

    prefer_files: bool
    have_files: bool
    _records: dict[Process, _Record] = field(default_factory=dict)

    def by_files(self, engine: EngineView) -> bool:
        """Whether an engine gets its bytes in files."""
        return self.have_files and self.prefer_files != self._of(engine).changed

    def wants_full(self, engine: EngineView) -> bool:
        """Whether an engine could not use what was written, so that every tensor must be written."""
        return self._of(engine).wants_full

    def succeeded(self, engine: EngineView) -> None:
        """An engine has the version."""
        record = self._of(engine)
        record.failures, record.wants_full = 0, False

    def failed(self, engine: EngineView, reason: str, why: str) -> str:
        """An engine did not take the version; → what changes, in a sentence, or empty."""
        record, by_files = self._of(engine), self.by_files(engine)
        if not self.have_files or not reason or reason in _NOT_THE_WAY:
            return ""
        if by_files and reason in _HEALED_BY_FULL_FILES and not record.wants_full:
            record.wants_full = True
            return f"engine {engine.engine_id} gets full files: {why}"
        record.failures += 1
        if record.changed or (record.failures < _PATIENCE and reason not in _HOPELESS):
            return ""
        record.changed, record.failures = True, 0
        way = "over a collective from now on" if by_files else "in files from now on"
        return f"engine {engine.engine_id} gets its weights {way}: {why}"

    def keep(self, engines: list[EngineView]) -> None:
        """Forgets processes that are gone."""
        live = {(engine.engine_id, engine.incarnation) for engine in engines}
        self._records = {process: record for process, record in self._records.items() if process in live}

    def _of(self, engine: EngineView) -> _Record:
        return self._records.setdefault((engine.engine_id, engine.incarnation), _Record())
