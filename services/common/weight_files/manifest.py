"""What a version's directory says of itself: `manifest.json` and `expected.json`.

Invariants: what was read was complete and of a known format, else FILES_CORRUPT names the file; names of files in a
manifest stay inside its directory.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash

from services.common.files import write_whole
from services.common.weight_files.errors import files_corrupt, files_missing

FORMAT = 1
MANIFEST, EXPECTED = "manifest.json", "expected.json"
FULL = "full.json"
"""A second manifest, beside that of a delta: the same version with every tensor."""
ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int64": 8, "int32": 4,
                 "int16": 2, "int8": 1, "uint8": 1}  # fmt: skip
"""Bytes of an element by dtype name."""
_DIRECTORY = re.compile(r"version-(\d+)")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Rule = tuple[str, tuple[str, ...], int]
"""Held tensor's name, the sent tensors whose bytes make it up in this order, zero bytes that follow."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a version. `checksum`: XXH3, 128 bits, of its bytes, 32 hex digits. `offset` and `length`: its place
    in its file, from the beginning of the file; a delta's `length` is 0 when nothing changed. `changed`: elements that
    a delta holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: str
    offset: int
    length: int
    changed: int = 0

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class VersionFile:
    """One file and its tensors, in order: one bucket of the update."""

    name: str
    size: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Manifest:
    """A version. `base_version`: of a delta. `encoding`: of a delta, "overwrite" or "xor"."""

    run_id: str
    version: int
    mode: Literal["full", "delta"]
    plan_digest: str
    files: tuple[VersionFile, ...]
    base_version: int = 0
    encoding: str = ""
    format: int = FORMAT

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors in order."""
        return tuple(tensor for file in self.files for tensor in file.tensors)

    @property
    def file_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class Expected:
    """Checksums of what engines hold of a version: by algorithm and rules, value by held tensor's name."""

    version: int
    by_rules: Mapping[tuple[str, tuple[Rule, ...]], Mapping[str, str]] = field(default_factory=dict)

    def of(self, algorithm: str, rules: Iterable[Rule]) -> Mapping[str, str] | None:
        """Values for an engine's rules; None when nobody computed them."""
        return self.by_rules.get((algorithm, tuple(sorted(rules))))


def checksum(data: Any) -> str:
    """Checksum of a tensor's bytes: 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def version_directory(root: str | Path, run_id: str, version: int) -> Path:
    """Where a version's files are."""
    return Path(root) / run_id / directory_name(version)


def directory_name(version: int) -> str:
    """Name of a version's directory."""
    return f"version-{version:06d}"


def versions_in(run_directory: Path) -> list[int]:
    """Complete versions under DIR/<run id>, oldest first; none when it cannot be read."""
    try:
        names = [entry.name for entry in os.scandir(run_directory) if (Path(entry.path) / MANIFEST).exists()]
    except OSError:
        return []
    return sorted(int(match[1]) for name in names if (match := _DIRECTORY.fullmatch(name)))


def write_manifest(directory: Path, manifest: Manifest, name: str = MANIFEST) -> None:
    """Replaces one that is there."""
    write_whole(directory / name, json.dumps(asdict(manifest)).encode())


def read_manifest(directory: Path, name: str = MANIFEST) -> Manifest:
    """Raises FILES_MISSING, FILES_CORRUPT."""
    path = directory / name
    said = _read(path)
    try:
        return _manifest(said)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise files_corrupt(path, f"it cannot be understood ({error})") from error


def _manifest(said: dict[str, Any]) -> Manifest:
    if said["format"] != FORMAT:
        raise ValueError(f"format {said['format']} is not {FORMAT}, the one that this release reads")
    files = tuple(_file(file) for file in said.pop("files"))
    manifest = Manifest(**said, files=files)
    if manifest.mode not in ("full", "delta") or (manifest.mode == "delta" and not manifest.base_version):
        raise ValueError(f"mode {manifest.mode!r} with base version {manifest.base_version}")
    return manifest


def _file(said: Mapping[str, Any]) -> VersionFile:
    if not _FILE.fullmatch(said["name"]):
        raise ValueError(f"{said['name']!r} is no name of a file")
    tensors = tuple(Tensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in said["tensors"])
    unknown = next((tensor for tensor in tensors if tensor.dtype not in ELEMENT_BYTES), None)
    if unknown:
        raise ValueError(f"dtype {unknown.dtype!r} of tensor {unknown.name} is unknown")
    return VersionFile(said["name"], int(said["size"]), tensors)


def write_expected(directory: Path, expected: Expected) -> None:
    """Writes `expected.json`; replaces one that is there."""
    entries = [
        {"algorithm": algorithm, "rules": rules, "checksums": dict(values)}
        for (algorithm, rules), values in expected.by_rules.items()
    ]
    write_whole(directory / EXPECTED, json.dumps({"version": expected.version, "engines": entries}).encode())


def read_expected(directory: Path) -> Expected:
    """Raises FILES_MISSING, FILES_CORRUPT."""
    path = directory / EXPECTED
    said = _read(path)
    try:
        by_rules = {
            (entry["algorithm"], tuple((name, tuple(sources), padding) for name, sources, padding in entry["rules"])): (
                dict(entry["checksums"])
            )
            for entry in said["engines"]
        }
        return Expected(int(said["version"]), by_rules)
    except (ValueError, KeyError, TypeError) as error:
        raise files_corrupt(path, f"it cannot be understood ({error})") from error


def rules_key(algorithm: str, rules: Iterable[Rule]) -> tuple[str, tuple[Rule, ...]]:
    """Key of `Expected.by_rules`."""
    return algorithm, tuple(sorted(rules))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise files_missing(path, error.strerror) from error
    except ValueError as error:
        raise files_corrupt(path, f"it cannot be understood ({error})") from error
