"""Rows of a data file by position: what JSONL and parquet files have in common.

A path may end in "@[a:b]", a slice of its rows. Positions count the rows that are kept; row numbers are zero-based
places in the file, so that a row can be found by hand. Invariant: rows are only read from the file that was
indexed; one that changed since is indexed again, and refused when its number of rows is another.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.common.errors import Code, ServiceError

_READ_ATTEMPTS = 3
_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")


def malformed(path: str | Path, line: int, why: str) -> ServiceError:
    """The error for a row that cannot be used; `line` counts from 1."""
    return ServiceError(Code.INVALID_ARGUMENT, "DATA_MALFORMED", f"{path}:{line}: {why}.", path=path, line=line)


def not_found(key: str, path: str | Path, why: str) -> ServiceError:
    """The error for a file that cannot be read."""
    return ServiceError(Code.NOT_FOUND, "DATA_NOT_FOUND", f"{key}: cannot read {path}: {why}.", path=path, key=key)


def split_slice(source: str) -> tuple[Path, slice]:
    """(path, rows) of a source."""
    match = _SLICE.fullmatch(source)
    if not match:
        return Path(source).expanduser(), slice(None)
    bounds = slice(*(int(text) if text else None for text in match.group("start", "stop")))
    return Path(match["path"]).expanduser(), bounds


class RowFile(ABC):
    """An indexed file of rows.

    Args:
        source: path, with an optional row slice.
        key: setting that names it, for messages.

    Raises DATA_NOT_FOUND, DATA_MALFORMED.
    """

    def __init__(self, source: str, key: str) -> None:
        self.path, bounds = split_slice(source)
        self.key = key
        self._lock = threading.Lock()
        self._stamp = self.stamp()
        self._total = self.index()
        self._places: range | np.ndarray = range(self._total)[bounds]
        if not len(self._places):
            what = f"no rows in the slice of {self._total} rows" if self._total else "it has no rows"
            raise malformed(source, 1, what)

    def __len__(self) -> int:
        return len(self._places)

    def keep(self, mask: np.ndarray) -> None:
        """Leaves out rows whose mask is false."""
        if not mask.all():
            self._places = self._array()[mask]

    def rows(self) -> np.ndarray:
        """Row numbers of the kept rows."""
        return self.row_numbers(self._array())

    def _array(self) -> np.ndarray:
        if isinstance(self._places, range):
            return np.arange(self._places.start, self._places.stop, dtype=np.int32)
        return self._places

    def read(self, positions: Sequence[int]) -> list[tuple[int, Any]]:
        """(row number, row as stored) at positions; `parse` makes an object of it. Raises DATA_NOT_FOUND, and
        DATA_MALFORMED when the file is not the one that was indexed."""
        with self._lock:
            for _ in range(_READ_ATTEMPTS):
                self._check_unchanged()
                found = self.fetch([int(self._places[position]) for position in positions])
                # A file that was written meanwhile may have been read at the offsets of the one before.
                if self.stamp() == self._stamp:
                    return found
        raise not_found(self.key, self.path, "it is being written; try again when it is complete")

    def _check_unchanged(self) -> None:
        stamp = self.stamp()
        if stamp == self._stamp:
            return
        total = self.index()
        if total != self._total:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "DATA_MALFORMED",
                f"{self.path} has {total} rows, but {self._total} when it was opened; put the file back, or start a run"
                " with another run_id.",
                path=self.path,
            )
        self._stamp = stamp

    def stamp(self) -> tuple[int, int]:
        """What tells that the file was changed: size and time of change."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise not_found(self.key, self.path, error.strerror or str(error)) from error
        return status.st_size, status.st_mtime_ns

    @abstractmethod
    def index(self) -> int:
        """Indexes the file; its number of rows."""

    @abstractmethod
    def row_numbers(self, places: np.ndarray) -> np.ndarray:
        """Row numbers of places among all rows."""

    @abstractmethod
    def fetch(self, places: Sequence[int]) -> list[tuple[int, Any]]:
        """(row number, row as stored) of places among all rows."""

    @abstractmethod
    def parse(self, row: int, stored: Any) -> dict[str, Any]:
        """Object of a row. Raises DATA_MALFORMED naming file and line."""
