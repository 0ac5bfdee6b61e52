"""Commands to rank 0 about files of weights, and what it answers. Part of `commands`, where the rules are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WriteFiles:
    """Rank 0, aside, after StageWeights. Begins to write the staged weights as files of `version` under
    `directory`/`run_id`. → FilesState, at once.

    `base_version`: write what changed since that version, if it was written last and that is worth it; 0: everything.
    `keeps_base`: remember the bytes for the next delta. `beside`: every tensor beside the delta that is there already.
    """

    directory: str
    run_id: str
    version: int
    base_version: int = 0
    encoding: str = "overwrite"
    keeps_base: bool = False
    beside: bool = False


@dataclass(frozen=True)
class FilesWritten:
    """Rank 0, aside, after WriteFiles. How far it is. → FilesState."""


@dataclass(frozen=True)
class WriteResult:
    """A version as it was written, or the `error` that hindered it. `changed` of its `elements` are in a delta."""

    mode: str = ""
    file_bytes: int = 0
    total_bytes: int = 0
    changed: int = 0
    elements: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def changed_share(self) -> float:
        """Share of the elements that were written."""
        return self.changed / self.elements if self.mode == "delta" and self.elements else 1.0


@dataclass(frozen=True)
class FilesState:
    """`held`: the staged bytes are copied, others may be staged. `result`: at the end."""

    held: bool = False
    version: int = 0
    result: WriteResult | None = None
