"""An indexed JSONL file: rows are found by offset and read when asked for.

Holds one number a row (its offset), and a second one only where blank lines make row and line differ; never the text.
Blank lines are no rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from services.buffer.adapters.rows import RowFile, malformed, not_found

MAX_LINE_BYTES = 64 * 1024 * 1024
_BLOCK_BYTES = 1 << 19
_BLANK = np.isin(np.arange(256), np.frombuffer(b" \t\r\n\v\f", np.uint8))


class JsonlFile(RowFile):
    """Rows of a JSONL file."""

    def index(self) -> int:
        """Finds the rows: lines that are not blank."""
        try:
            self._offsets, self._lines = self._scan()
        except OSError as error:
            raise not_found(self.key, self.path, error.strerror or str(error)) from error
        return len(self._offsets)

    def _scan(self) -> tuple[np.ndarray, np.ndarray | None]:
        """(offset of every row, its line or None when rows and lines agree)."""
        parts, doubtful, base, at_start = [np.zeros(1, np.int64)], [], 0, True
        block = bytearray(_BLOCK_BYTES)
        with self.path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                data = np.frombuffer(block, np.uint8, count)
                ends = np.flatnonzero(data == 10)
                starts = ends + 1
                # The first byte tells whether a line may be blank; that of the last may be in the next block.
                inside = starts[starts < count]
                if at_start and _BLANK[data[0]]:
                    doubtful.append(np.array([base]))
                doubtful.append(inside[_BLANK[data[inside]]] + base)
                at_start = bool(data[-1] == 10)
                parts.append(starts + base)
                base += count
            offsets = np.concatenate(parts)
            if offsets[-1] == base:
                offsets = offsets[:-1]
            suspects = np.concatenate(doubtful) if doubtful else np.zeros(0, np.int64)
            blank = [offset for offset in suspects.tolist() if self._is_blank(file, offset)]
        if not blank:
            return offsets, None
        full = ~np.isin(offsets, blank)
        return offsets[full], np.flatnonzero(full).astype(np.int32)

    @staticmethod
    def _is_blank(file: Any, offset: int) -> bool:
        """Whether the line at an offset holds nothing but white space."""
        file.seek(offset)
        while part := file.read(4096):
            line, newline, _ = part.partition(b"\n")
            if line.strip():
                return False
            if newline:
                return True
        return True

    def row_numbers(self, places: np.ndarray) -> np.ndarray:
        """Zero-based lines."""
        return places if self._lines is None else self._lines[places]

    def fetch(self, places: Sequence[int]) -> list[tuple[int, bytes]]:
        """(line, its bytes) of rows."""
        try:
            with self.path.open("rb") as file:
                found = []
                for place in places:
                    file.seek(int(self._offsets[place]))
                    line = place if self._lines is None else int(self._lines[place])
                    found.append((line, file.readline(MAX_LINE_BYTES)))
                return found
        except OSError as error:
            raise not_found(self.key, self.path, error.strerror or str(error)) from error

    def parse(self, row: int, stored: bytes) -> dict[str, Any]:
        """Object of a line. Raises DATA_MALFORMED."""
        try:
            found = json.loads(stored.rstrip())
        except UnicodeDecodeError as error:
            raise malformed(self.path, row + 1, "not valid UTF-8") from error
        except json.JSONDecodeError as error:
            raise malformed(self.path, row + 1, f"not valid JSON ({error.msg} at column {error.colno})") from error
        except RecursionError as error:
            raise malformed(self.path, row + 1, "its JSON is nested too deeply") from error
        if not isinstance(found, dict):
            raise malformed(self.path, row + 1, f"expected a JSON object, found {type(found).__name__}")
        return found
