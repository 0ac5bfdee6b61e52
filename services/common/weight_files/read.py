"""Reads the files of a version: checks them, copies them, or applies a delta to a copy.

Invariants: no byte is used that does not match its tensor's checksum in the manifest; files are read, not mapped, so
that a shared path that breaks is an error and not the end of the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from services.common.weight_files import delta
from services.common.weight_files.errors import base_mismatch, files_corrupt, files_missing
from services.common.weight_files.manifest import Manifest, Tensor, VersionFile, checksum

_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Piece:
    """One bucket in a file: `size` bytes from `offset`, its tensors one after the other."""

    path: Path
    offset: int
    size: int
    tensors: tuple[Tensor, ...]


def pieces_of(directory: Path, manifest: Manifest) -> tuple[Piece, ...]:
    """The buckets of a full version, in order."""
    return tuple(
        Piece(directory / file.name, file.tensors[0].offset, file.size - file.tensors[0].offset, file.tensors)
        for file in manifest.files
    )


def verify(directory: Path, manifest: Manifest) -> None:
    """Compares every tensor of a full version with its checksum. Raises FILES_MISSING, FILES_CORRUPT."""

    def one(file: VersionFile) -> list[str]:
        with _open(directory / file.name, file.size) as handle:
            return [tensor.name for tensor in file.tensors if checksum(_read(handle, tensor)) != tensor.checksum]

    _refuse(directory, [name for names in _on_threads(one, manifest.files) for name in names])


def copy_full(directory: Path, manifest: Manifest, target: Path) -> None:
    """Copies the shards of a full version into the directory `target`, checking them on the way. Raises
    FILES_MISSING, FILES_CORRUPT; OSError when `target` cannot be written."""

    def one(file: VersionFile) -> list[str]:
        wrong = []
        with _open(directory / file.name, file.size) as handle, open(target / file.name, "wb", buffering=0) as copy:
            _write_at(copy.fileno(), _read_bytes(handle, 0, file.tensors[0].offset), 0)
            for tensor in file.tensors:
                data = _read(handle, tensor)
                if checksum(data) != tensor.checksum:
                    wrong.append(tensor.name)
                _write_at(copy.fileno(), data, tensor.offset)
        return wrong

    _refuse(directory, [name for names in _on_threads(one, manifest.files) for name in names])


def apply_delta(copy: Path, held: Manifest, directory: Path, changes: Manifest) -> Manifest:
    """Brings the full copy `held` in the directory `copy` to the version of `changes`; → what it holds then.

    Raises:
        ServiceError: BASE_MISMATCH when the copy is not what the delta builds upon, before or while anything is
            written (the copy is no version then), FILES_CORRUPT when the delta is damaged, FILES_MISSING.
    """
    _check_lineage(held, changes)

    def one(pair: tuple[VersionFile, VersionFile]) -> VersionFile:
        mine, theirs = pair
        tensors = []
        with (
            open(copy / mine.name, "r+b", buffering=0) as target,
            _open(directory / theirs.name, theirs.size) as source,
        ):
            for tensor, change in zip(mine.tensors, theirs.tensors, strict=True):
                _apply_one(target, tensor, source, change, changes)
                tensors.append(replace(tensor, checksum=change.checksum))
        return replace(mine, tensors=tuple(tensors))

    files = tuple(_on_threads(one, list(zip(held.files, changes.files, strict=True))))
    return replace(held, version=changes.version, files=files)


def _apply_one(target, tensor: Tensor, source, change: Tensor, changes: Manifest) -> None:
    if not change.length:
        if change.checksum != tensor.checksum:
            why = f"tensor {tensor.name} did not change since version {changes.base_version}, but other bytes are here"
            raise base_mismatch(changes.version, why, tensor=tensor.name)
        return
    data = _read(target, tensor)
    try:
        delta.apply(np.frombuffer(data, np.uint8), _read(source, change), tensor.item_bytes, changes.encoding)
    except ValueError as error:
        raise files_corrupt(source.name, f"the changes of tensor {tensor.name} make no sense ({error})") from error
    if checksum(data) != change.checksum:
        why = f"tensor {tensor.name} with its changes has another checksum than the manifest names"
        raise base_mismatch(changes.version, why, tensor=tensor.name)
    _write_at(target.fileno(), data, tensor.offset)


def _check_lineage(held: Manifest, changes: Manifest) -> None:
    """The copy is the delta's base: run, version, plan."""
    wanted = (changes.run_id, changes.base_version, changes.plan_digest)
    if (held.run_id, held.version, held.plan_digest) != wanted:
        raise base_mismatch(
            changes.version,
            f"it builds upon version {changes.base_version} of run {changes.run_id} (plan {changes.plan_digest}), and"
            f" here is version {held.version} of run {held.run_id} (plan {held.plan_digest})",
            base_version=changes.base_version,
            held_version=held.version,
        )
    mine = [(tensor.name, tensor.dtype, tensor.shape) for tensor in held.tensors]
    theirs = [(tensor.name, tensor.dtype, tensor.shape) for tensor in changes.tensors]
    if mine != theirs or len(held.files) != len(changes.files):
        odd = sorted({name for name, *_ in set(mine) ^ set(theirs)}) or ["their order"]
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        raise base_mismatch(changes.version, f"its tensors are others than those here: {odd[0]}{more}")


def _open(path: Path, size: int):
    """A file of the size that the manifest names."""
    try:
        handle = open(path, "rb", buffering=0)  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise files_missing(path, error.strerror) from error
    found = os.fstat(handle.fileno()).st_size
    if found != size:
        handle.close()
        raise files_corrupt(path, f"it has {found} bytes, the manifest names {size}")
    return handle


def _read(handle, tensor: Tensor) -> bytearray:
    return _read_bytes(handle, tensor.offset, tensor.length)


def _read_bytes(handle, offset: int, length: int) -> bytearray:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        try:
            count = os.preadv(handle.fileno(), [view[done:]], offset + done)
        except OSError as error:
            raise files_missing(handle.name, error.strerror) from error
        if not count:
            raise files_corrupt(handle.name, f"it ends at byte {offset + done}, within a tensor")
        done += count
    return data


def _write_at(handle: int, data: bytearray, offset: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)


def _on_threads(call: Callable, items: Sequence) -> list:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(call, items))


def _refuse(directory: Path, wrong: list[str]) -> None:
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        why = f"{len(wrong)} tensors have other checksums than the manifest names ({shown})"
        raise files_corrupt(directory, why, tensors=",".join(wrong[:100]))
