"""A node's own full copy of a run's weights, kept at the version that was asked for last.

One directory, one process. Invariants: `manifest.json` is there only while the shards are that version; a copy left by
an earlier process is checked before it is used; a delta that does not lead to the named checksums is not served but
replaced by full files, if there are any.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ServiceError
from services.common.files import write_whole
from services.common.weight_files.errors import base_mismatch, files_not_written
from services.common.weight_files.manifest import (
    FULL,
    MANIFEST,
    Manifest,
    directory_name,
    read_manifest,
    write_manifest,
)
from services.common.weight_files.read import Piece, apply_delta, copy_full, pieces_of, verify
from services.common.weight_files.shards import INDEX, index_of


@dataclass(frozen=True)
class Files:
    """A full, checked version on this host. `manifest` is a full one; `directory` can be loaded as a checkpoint."""

    directory: Path
    manifest: Manifest

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Its buckets, in order."""
        return pieces_of(self.directory, self.manifest)


@dataclass(frozen=True)
class _Way:
    """How to come to a version: from full files (None: from the copy), then by deltas, oldest first."""

    full: tuple[Path, Manifest] | None
    deltas: tuple[tuple[Path, Manifest], ...]


class LocalCopy:
    """The copy.

    Args:
        directory: its own; made when first needed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._checked = False

    def bring(self, shared: Path) -> Files:
        """Brings the copy to the version in the shared directory `shared`; blocks.

        Raises:
            ServiceError: BASE_MISMATCH when only deltas are there that build upon something else, FILES_CORRUPT,
                FILES_MISSING, FILES_NOT_WRITTEN (this host's disk).
        """
        target = read_manifest(shared)
        held = self._held()
        if held is not None and _same(held, target):
            return Files(self._directory, held)
        problem: ServiceError | None = None
        for way in _ways(shared, target, held):
            try:
                return Files(self._directory, self._go(way, held))
            except ServiceError as error:
                problem = problem or error
                self.forget()
            except OSError as error:
                self.forget()
                remedy = "free space there, or name another place with update_weight_local_checkpoint_dir"
                raise files_not_written(self._directory, f"{error.strerror or error}; {remedy}") from error
        raise problem or base_mismatch(
            target.version,
            f"it builds upon version {target.base_version}, which is neither here nor complete in {shared.parent}",
            base_version=target.base_version,
        )

    def forget(self) -> None:
        """What is here is no version any more."""
        with contextlib.suppress(OSError):
            (self._directory / MANIFEST).unlink(missing_ok=True)

    def _held(self) -> Manifest | None:
        """What is here, checked once."""
        try:
            held = read_manifest(self._directory)
            if not self._checked:
                verify(self._directory, held)
                self._checked = True
        except ServiceError:
            return None
        return held

    def _go(self, way: _Way, held: Manifest | None) -> Manifest:
        if way.full is not None:
            held = self._take(*way.full)
        assert held is not None
        for directory, changes in way.deltas:
            self.forget()
            held = apply_delta(self._directory, held, directory, changes)
        if way.deltas:
            write_manifest(self._directory, held)
        self._checked = True
        return held

    def _take(self, directory: Path, manifest: Manifest) -> Manifest:
        """A full version in place of whatever is here."""
        beside = self._directory.with_name(f".{self._directory.name}.taking")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            copy_full(directory, manifest, beside)
            write_whole(beside / INDEX, index_of(manifest.files))
            write_manifest(beside, manifest)
            self.forget()
            shutil.rmtree(self._directory, ignore_errors=True)
            os.rename(beside, self._directory)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return manifest


def _same(held: Manifest, target: Manifest) -> bool:
    """The copy is this very version: number, run and bytes."""
    if (held.run_id, held.version, held.plan_digest) != (target.run_id, target.version, target.plan_digest):
        return False
    return [t.checksum for t in held.tensors] == [t.checksum for t in target.tensors]


def _ways(shared: Path, target: Manifest, held: Manifest | None) -> Iterator[_Way]:
    """Cheapest first: deltas upon the copy, full files of this version, full files of an earlier one and deltas."""
    if target.mode == "full":
        yield _Way((shared, target), ())
        return
    deltas: list[tuple[Path, Manifest]] = []
    fulls: list[_Way] = []
    directory, at = shared, target
    while at.mode == "delta":
        with contextlib.suppress(ServiceError):
            fulls.append(_Way((directory, read_manifest(directory, FULL)), tuple(deltas)))
        deltas.insert(0, (directory, at))
        if held is not None and (held.run_id, held.version) == (at.run_id, at.base_version):
            yield _Way(None, tuple(deltas))
        directory = shared.with_name(directory_name(at.base_version))
        try:
            before = read_manifest(directory)
        except ServiceError:
            break
        if before.version != at.base_version or before.version >= at.version:
            break
        at = before
    else:
        fulls.append(_Way((directory, at), tuple(deltas)))
    yield from fulls
