"""An indexed parquet file: rows are found by row group, and a few row groups are kept decoded.

Only the columns that the run names are read. Random access costs one row group when it is not among those kept: a
file whose row groups are small (10,000 rows or fewer) is read fast in any order. pyarrow is imported when a run has
such a file, and not before.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from services.buffer.adapters.rows import RowFile, malformed, not_found
from services.common.errors import invalid_field
from services.common.settings import suggest

_KEPT_BYTES = 16 << 20
"""Decoded row groups that are kept, in bytes (the newest one always)."""


class ParquetFile(RowFile):
    """Rows of a parquet file.

    Args:
        source: path, with an optional row slice.
        key: setting that names it, for messages.
        columns: fields that are read, by the setting that names them; None reads all.

    Raises DATA_NOT_FOUND, DATA_MALFORMED; INVALID_FIELD when pyarrow is not installed.
    """

    def __init__(self, source: str, key: str, columns: dict[str, str | None]) -> None:
        self._wanted = columns
        self._kept: OrderedDict[int, Any] = OrderedDict()
        super().__init__(source, key)

    def index(self) -> int:
        """Reads the footer."""
        try:
            from pyarrow import ArrowException, parquet
        except ModuleNotFoundError as error:
            why = "parquet files need pyarrow; install tetrarch[parquet] where the buffer runs, or give a JSONL file"
            raise invalid_field(self.key, str(self.path), why) from error
        self._failures = (ArrowException, OSError, ValueError)
        try:
            # Metadata only; the file is opened anew for every row group, so that it may be moved back in place.
            metadata = parquet.read_metadata(self.path)
        except FileNotFoundError as error:
            raise not_found(self.key, self.path, "No such file or directory") from error
        except self._failures as error:
            raise malformed(self.path, 1, f"not a parquet file that can be read ({_line(error)})") from error
        names = metadata.schema.to_arrow_schema().names
        self._columns = [name for setting, name in self._wanted.items() if name and self._check(setting, name, names)]
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._kept.clear()
        return metadata.num_rows

    def _check(self, setting: str, name: str, names: list[str]) -> bool:
        if name not in names:
            hint = suggest(name, names).strip(" .")
            why = f"no column {name!r} ({setting}); the file has {', '.join(sorted(names))}"
            raise malformed(self.path, 1, f"{why}{'; ' + hint.lower() if hint else ''}")
        return True

    def row_numbers(self, places: np.ndarray) -> np.ndarray:
        """Rows are numbered as they are placed."""
        return places

    def fetch(self, places: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
        """(row number, its values) of rows; row groups are read in order, each once."""
        wanted = np.asarray(places, np.int64)
        groups = np.searchsorted(self._ends, wanted, side="right")
        found: list[dict[str, Any]] = [{}] * len(places)
        for group in np.unique(groups).tolist():
            at = np.flatnonzero(groups == group)
            start = self._ends[group - 1] if group else 0
            for index, values in zip(at, self._group(group).take(wanted[at] - start).to_pylist(), strict=True):
                found[index] = values
        return list(zip(places, found, strict=True))

    def _group(self, group: int) -> Any:
        """Decoded columns of a row group."""
        from pyarrow import default_memory_pool, parquet

        if group in self._kept:
            self._kept.move_to_end(group)
            return self._kept[group]
        try:
            with parquet.ParquetFile(self.path) as file:
                table = file.read_row_group(group, columns=self._columns, use_threads=False)
        except self._failures as error:
            raise not_found(self.key, self.path, f"row group {group}: {_line(error)}") from error
        self._kept[group] = table
        while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > _KEPT_BYTES:
            self._kept.popitem(last=False)
        # Decoding takes several times the table; the pool would keep that for itself.
        default_memory_pool().release_unused()
        return table

    def parse(self, row: int, stored: dict[str, Any]) -> dict[str, Any]:
        """The values as JSON would have them: a column without a value is a missing field."""
        values = {name: value for name, value in stored.items() if value is not None}
        try:
            return json.loads(json.dumps(values, default=_plain))
        except (TypeError, ValueError) as error:
            raise malformed(self.path, row + 1, f"a value has no form in JSON ({error})") from error


def _plain(value: Any) -> str:
    """Dates, times and decimals as text."""
    if isinstance(value, bytes):
        raise TypeError("bytes")
    return str(value)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")
