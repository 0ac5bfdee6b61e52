"""Writes the files of a version: everything, or what changed against the version before.

Buckets are uint8 arrays in host memory with their tensors' names, dtypes and shapes. Invariants: a version's directory
appears when it is whole; what failed leaves no directory and no temporary one; the same bytes give the same files.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from services.common.errors import ServiceError
from services.common.files import sync_directory, write_whole
from services.common.weight_files import delta
from services.common.weight_files.errors import files_not_written
from services.common.weight_files.manifest import (
    FULL,
    Manifest,
    Tensor,
    VersionFile,
    checksum,
    version_directory,
    write_manifest,
)
from services.common.weight_files.shards import INDEX, index_of, shard_name, shard_of

_THREADS = min(8, os.cpu_count() or 1)
_SAMPLE = 64
"""Places at which a bucket is looked at before anything is encoded."""
_SAMPLE_BYTES = 4096
_DENSE = 0.5
"""Share of changed elements above which a delta of their new bytes cannot be much smaller than the tensors. XOR may
be: in float32 a step changes all elements, but mostly in their low bytes."""
_WORTHWHILE = 0.6
"""Share of the tensors' bytes above which a delta is not written."""


MadeT = TypeVar("MadeT", bound="Manifest | None")
_LEFT_BEHIND = re.compile(r"\.version-(\d+)\.(?:writing|removing)")


@dataclass(frozen=True)
class Bucket:
    """Tensors of a bucket (names, dtypes, shapes; the rest unset) and their bytes, uint8 [n], one after the other."""

    tensors: tuple[Tensor, ...]
    data: np.ndarray

    def parts(self) -> list[tuple[Tensor, np.ndarray]]:
        """Every tensor with its bytes."""
        found, at = [], 0
        for tensor in self.tensors:
            found.append((tensor, self.data[at : at + tensor.size_bytes]))
            at += tensor.size_bytes
        return found


@dataclass(frozen=True)
class Base:
    """Bytes of the version that a delta builds upon."""

    version: int
    buckets: Sequence[np.ndarray]


@dataclass(frozen=True)
class Place:
    """Where a version goes, and what it is."""

    root: Path
    run_id: str
    version: int
    plan_digest: str

    @property
    def directory(self) -> Path:
        """The version's directory."""
        return version_directory(self.root, self.run_id, self.version)


def write_full(place: Place, buckets: Sequence[Bucket]) -> Manifest:
    """Writes every tensor. Raises FILES_NOT_WRITTEN, and leaves nothing then."""

    def content(scratch: Path) -> Manifest:
        files = _write_shards(scratch, buckets)
        return Manifest(place.run_id, place.version, "full", place.plan_digest, files)

    return _publish(place, content)


def add_full(place: Place, buckets: Sequence[Bucket]) -> Manifest:
    """Every tensor, beside the delta that is there already: for readers that cannot use it. Raises
    FILES_NOT_WRITTEN."""
    try:
        files = _write_shards(place.directory, buckets)
        manifest = Manifest(place.run_id, place.version, "full", place.plan_digest, files)
        write_manifest(place.directory, manifest, FULL)
    except OSError as error:
        raise _not_written(place, error) from error
    return manifest


def write_delta(place: Place, buckets: Sequence[Bucket], base: Base, encoding: str) -> Manifest | None:
    """Writes what changed since `base`; None, and nothing, when that is hardly less than all. Raises
    FILES_NOT_WRITTEN."""
    if encoding == "overwrite" and _density(buckets, base) > _DENSE:
        return None
    count = len(buckets)

    def one(scratch: Path, index: int) -> VersionFile:
        name = f"delta-{index + 1:05d}-of-{count:05d}.bin"
        return _write_delta_file(scratch / name, buckets[index], base.buckets[index], encoding)

    def content(scratch: Path) -> Manifest | None:
        with ThreadPoolExecutor(_THREADS) as pool:
            files = tuple(pool.map(lambda index: one(scratch, index), range(count)))
        made = Manifest(place.run_id, place.version, "delta", place.plan_digest, files, base.version, encoding)
        return made if made.file_bytes <= _WORTHWHILE * made.total_bytes else None

    return _publish(place, content)


def _density(buckets: Sequence[Bucket], base: Base) -> float:
    """Share of changed elements in a sample."""
    changed = looked = 0
    for bucket, before in zip(buckets, base.buckets, strict=True):
        item = bucket.tensors[0].item_bytes if bucket.tensors else 1
        stride = max(len(bucket.data) // _SAMPLE // item * item, _SAMPLE_BYTES)
        for start in range(0, len(bucket.data), stride):
            now, was = bucket.data[start : start + _SAMPLE_BYTES], before[start : start + _SAMPLE_BYTES]
            differs = (now != was).reshape(-1, item).any(1)
            changed, looked = changed + int(differs.sum()), looked + len(differs)
    return changed / looked if looked else 0.0


def _write_shards(directory: Path, buckets: Sequence[Bucket]) -> tuple[VersionFile, ...]:
    count = len(buckets)

    def one(index: int) -> VersionFile:
        tensors = [_with(tensor, checksum=checksum(data)) for tensor, data in buckets[index].parts()]
        header, shard = shard_of(shard_name(index, count), tensors)
        _write_file(directory / shard.name, [header, buckets[index].data.data])
        return shard

    with ThreadPoolExecutor(_THREADS) as pool:
        files = tuple(pool.map(one, range(count)))
    write_whole(directory / INDEX, index_of(files))
    return files


def _write_delta_file(path: Path, bucket: Bucket, before: np.ndarray, encoding: str) -> VersionFile:
    placed, parts, offset, at = [], [], 0, 0
    for tensor, data in bucket.parts():
        was = before[at : at + tensor.size_bytes]
        changes, changed = delta.encode(was, data, tensor.item_bytes, encoding)
        value = checksum(data)
        placed.append(_with(tensor, checksum=value, offset=offset, length=len(changes), changed=changed))
        parts.append(changes)
        offset, at = offset + len(changes), at + tensor.size_bytes
    _write_file(path, parts)
    return VersionFile(path.name, offset, tuple(placed))


def _with(tensor: Tensor, checksum: str, offset: int = 0, length: int = 0, changed: int = 0) -> Tensor:
    return Tensor(tensor.name, tensor.dtype, tensor.shape, checksum, offset, length, changed)


def _write_file(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    with open(path, "wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _publish(place: Place, content: Callable[[Path], MadeT]) -> MadeT:
    """Fills a temporary directory and gives it its name, unless there is no manifest."""
    target = place.directory
    scratch = target.with_name(f".{target.name}.writing")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        manifest = content(scratch)
        if manifest is None:
            return manifest
        write_manifest(scratch, manifest)
        shutil.rmtree(target, ignore_errors=True)  # of a version that was written before and never served
        os.rename(scratch, target)
        sync_directory(target.parent)
    except OSError as error:
        raise _not_written(place, error) from error
    else:
        return manifest
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _not_written(place: Place, error: OSError) -> ServiceError:
    return files_not_written(place.directory, error.strerror or error)


def remove_versions(run_directory: Path, keep: set[int]) -> list[int]:
    """Removes the versions that are not in `keep` and older than its newest, and what interrupted calls left of
    such; → what was removed. Never raises: what cannot be removed stays."""
    removed = []
    try:
        entries = sorted(os.scandir(run_directory), key=lambda entry: entry.name)
    except OSError:
        return removed
    for entry in entries:
        number = entry.name.removeprefix("version-")
        if number.isdigit() and int(number) not in keep and int(number) < max(keep, default=0):
            # Under another name first: a directory with a version's name is whole.
            gone = Path(entry.path).with_name(f".{entry.name}.removing")
            try:
                os.rename(entry.path, gone)
            except OSError:
                continue
            shutil.rmtree(gone, ignore_errors=True)
            removed.append(int(number))
        elif (left := _LEFT_BEHIND.fullmatch(entry.name)) and int(left[1]) < max(keep, default=0):
            shutil.rmtree(entry.path, ignore_errors=True)
    return removed
