"""An indexed JSONL file: rows are found by offset and read when asked for.

Holds two numbers a row (offset and line), never the text. A path may end in "@[a:b]", a slice of its rows.
Blank lines are no rows. Row numbers are zero-based line numbers of the file, so that a row can be found by hand.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.common.errors import Code, ServiceError

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")
MAX_LINE_BYTES = 64 * 1024 * 1024


def malformed(path: str | Path, line: int, why: str) -> ServiceError:
    """The error for a line that cannot be used; `line` counts from 1."""
    return ServiceError(Code.INVALID_ARGUMENT, "DATA_MALFORMED", f"{path}:{line}: {why}.", path=path, line=line)


def not_found(key: str, path: str | Path, why: str) -> ServiceError:
    """The error for a file that cannot be read."""
    return ServiceError(Code.NOT_FOUND, "DATA_NOT_FOUND", f"{key}: cannot read {path}: {why}.", path=path, key=key)


class JsonlFile:
    """Rows of a JSONL file.

    Args:
        source: path, with an optional row slice.
        key: setting that names it, for messages.
    """

    def __init__(self, source: str, key: str) -> None:
        match = _SLICE.fullmatch(source)
        self.path = Path(match["path"] if match else source).expanduser()
        if self.path.suffix == ".parquet":
            raise not_found(key, self.path, "parquet files are not supported; convert it to JSONL, one object a line")
        bounds = (
            slice(*(int(text) if text else None for text in match.group("start", "stop"))) if match else slice(None)
        )
        offsets, lines = self._scan(key)
        self.offsets = offsets[bounds]
        self.lines = lines[bounds]
        if not len(self.lines):
            what = f"no rows in the slice of {len(lines)} rows" if len(lines) else "it has no rows"
            raise malformed(source, 1, what)

    def _scan(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(offset, line) of every line that is not blank."""
        offsets, lines, offset = array("q"), array("i"), 0
        try:
            with self.path.open("rb", buffering=1 << 20) as file:
                for line, raw in enumerate(file):
                    if not raw.isspace():
                        offsets.append(offset)
                        lines.append(line)
                    offset += len(raw)
        except OSError as error:
            raise not_found(key, self.path, error.strerror or str(error)) from error
        return np.array(offsets, np.int64), np.array(lines, np.int32)

    def __len__(self) -> int:
        return len(self.lines)

    def keep(self, mask: np.ndarray) -> None:
        """Leaves out rows whose mask is false."""
        self.offsets, self.lines = self.offsets[mask], self.lines[mask]

    def read(self, positions: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
        """(row number, object) at positions among the rows that are kept."""
        try:
            with self.path.open("rb") as file:
                found = []
                for position in positions:
                    file.seek(int(self.offsets[position]))
                    line = int(self.lines[position])
                    found.append((line, self._parse(file.readline(MAX_LINE_BYTES), line)))
                return found
        except OSError as error:
            raise not_found("prompt_data", self.path, error.strerror or str(error)) from error

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """All kept rows in file order."""
        with self.path.open("rb", buffering=1 << 20) as file:
            kept = iter(self.lines.tolist())
            wanted = next(kept, None)
            for line, raw in enumerate(file):
                if line == wanted:
                    yield line, self._parse(raw, line)
                    wanted = next(kept, None)

    def _parse(self, raw: bytes, line: int) -> dict[str, Any]:
        try:
            row = json.loads(raw.rstrip())
        except UnicodeDecodeError as error:
            raise malformed(self.path, line + 1, "not valid UTF-8") from error
        except json.JSONDecodeError as error:
            raise malformed(self.path, line + 1, f"not valid JSON ({error.msg} at column {error.colno})") from error
        if not isinstance(row, dict):
            raise malformed(self.path, line + 1, f"expected a JSON object, found {type(row).__name__}")
        return row
