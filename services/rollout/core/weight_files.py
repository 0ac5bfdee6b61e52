"""Versions as files, as a node reads them: what an update needs to know, and the port to whoever reads.

Invariant: what a `HeldVersion` names stays as it is until its context ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.common.weight_files.errors import files_corrupt
from services.common.weight_files.manifest import Expected, Manifest
from services.common.weight_files.read import Piece
from services.rollout.core.engine_port import Buckets, ChecksumRule, TensorSpec

REASONS = frozenset({"BASE_MISMATCH", "FILES_CORRUPT", "FILES_MISSING", "FILES_NOT_WRITTEN"})
"""Failures of files; the engine was not touched."""


@dataclass(frozen=True)
class HeldVersion:
    """A full version on this host, checked. `directory` can be loaded as a checkpoint."""

    version: int
    directory: Path
    pieces: tuple[Piece, ...]

    @property
    def buckets(self) -> Buckets:
        """The plan that was written."""
        return tuple(
            tuple(TensorSpec(tensor.name, tensor.dtype, tensor.shape) for tensor in piece.tensors)
            for piece in self.pieces
        )

    def check(self, version: int, buckets: Buckets) -> None:
        """Raises FILES_CORRUPT unless this is the version and the plan that an update names."""
        if self.version != version:
            raise files_corrupt(self.directory, f"they are version {self.version}, not {version}")
        if self.buckets != buckets:
            mine = {spec for bucket in self.buckets for spec in bucket}
            asked = {spec for bucket in buckets for spec in bucket}
            odd = sorted(spec.name for spec in mine ^ asked) or ["their order"]
            raise files_corrupt(self.directory, f"their tensors are others than those of the update: {odd[0]}")


class VersionFiles(Protocol):
    """Reads versions. Raises `services.common.weight_files.errors`."""

    def open(self, path: str) -> AbstractAsyncContextManager[HeldVersion]:
        """The version in the directory `path`, brought here and checked."""
        ...

    async def newest(self, published: int, oldest: int) -> str:
        """Directory of the newest complete version from `oldest` to `published`, empty without one."""
        ...

    async def plan(self, path: str) -> tuple[Manifest, Expected]:
        """What a version's directory says of itself and of what engines must hold."""
        ...

    def forget(self) -> None:
        """What was brought here did not verify in an engine: it is not used again."""
        ...

    async def close(self) -> None:
        """The run is left: a copy that nobody asked for goes."""
        ...


def expected_of(expected: Expected, algorithm: str, rules: Iterable[ChecksumRule]) -> dict[str, str] | None:
    """What an engine with these rules must hold; None when the trainer did not compute it."""
    found = expected.of(algorithm, ((rule.engine_name, rule.source_names, rule.padding_bytes) for rule in rules))
    return None if found is None else dict(found)
