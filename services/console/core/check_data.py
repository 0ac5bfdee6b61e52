"""Do the data files of a run hold what its keys promise? One pass over JSONL, line by line, constant memory.

Looks at the first `CHECKED_ROWS` rows of a JSONL file and at the columns of a parquet file; the buffer checks every row
when it draws it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.common.run_spec import DataSettings, PromptSet
from services.common.settings import SettingsError

CHECKED_ROWS = 100_000
_SLICE = re.compile(r"(?P<path>.*)@\[-?\d*:-?\d*\]")
"""A path may end in "@[a:b]", a slice of its rows."""


def check_data(data: DataSettings) -> None:
    """Checks the prompts and every evaluation set. Raises SettingsError naming file and line."""
    if not data.prompt_data and not data.prompt_data_mixture:
        raise SettingsError("prompt_data is not set; name the JSONL file of prompts with --prompt-data FILE.")
    if data.prompt_data:
        check_file(data.prompt_data, "prompt_data", _fields(data))
    for part in data.prompt_data_mixture:
        check_file(part.path, f"prompt_data_mixture {part.name}", _fields(data, part))
    own = {"input_key": data.eval_input_key, "label_key": data.eval_label_key}
    sets = {part.name: part for part in data.prompt_data_mixture}
    for name, path in data.eval_datasets.items():
        # An evaluation set may name its fields differently; the message then names the key that does it.
        fields = {key: field for key, field in _fields(data, sets.get(name)).items() if not own[key]}
        fields |= {f"eval_{key}": field for key, field in own.items() if field}
        check_file(path, f"eval_prompt_data {name}", fields)


def _fields(data: DataSettings, part: PromptSet | None = None) -> dict[str, str]:
    """Key that names a field → field, of the run or of a set of its mixture."""
    fields = {"input_key": (part and part.input_key) or data.input_key}
    label = (part and part.label_key) or data.label_key
    return fields | ({"label_key": label} if label else {})


def check_file(path: str, key: str, fields: dict[str, str]) -> int:
    """Rows looked at of a data file, all of which have the fields (key that names a field → field).

    Raises SettingsError for a missing or empty file, a malformed row or a missing field.
    """
    slice_of = _SLICE.fullmatch(path)
    file = Path(slice_of["path"] if slice_of else path)
    if not file.is_file():
        what = "is a directory" if file.is_dir() else "does not exist"
        raise SettingsError(f"{key} {file} {what}; give the path of a JSONL file, one object a line, or of parquet.")
    if file.suffix == ".parquet":
        return _check_parquet(file, key, fields)
    return _check_jsonl(file, key, fields)


def _check_parquet(file: Path, key: str, fields: dict[str, str]) -> int:
    """Looks at the footer. Without pyarrow here the buffer alone can tell."""
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        return 0
    try:
        metadata = parquet.read_metadata(file)
    except (ArrowException, OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200].rstrip(".")
        raise SettingsError(f"{key} {file} is no parquet file that can be read ({why}); write it again.") from error
    names = metadata.schema.to_arrow_schema().names
    for setting, field in fields.items():
        if field not in names:
            raise SettingsError(
                f"{file}: no column {field!r}, which {setting} names; its columns are {', '.join(map(repr, names))}."
                f" Set {setting} or correct the file."
            )
    if not metadata.num_rows:
        raise SettingsError(f"{key} {file} has no rows; write one prompt a row.")
    return metadata.num_rows


def _check_jsonl(file: Path, key: str, fields: dict[str, str]) -> int:
    count = 0
    for number, row in itertools.islice(_rows(file), CHECKED_ROWS):
        _check_row(f"{file}:{number}", row, fields)
        count += 1
    if not count:
        raise SettingsError(f"{key} {file} has no rows; write one JSON object a line.")
    return count


def _rows(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if not raw.strip():
                continue
            try:
                yield number, json.loads(raw)
            except UnicodeDecodeError as error:
                raise SettingsError(f"{file}:{number}: not UTF-8 text; convert the file.") from error
            except json.JSONDecodeError as error:
                raise SettingsError(
                    f"{file}:{number}: not valid JSON ({error.msg} at column {error.colno}); correct the line."
                ) from error


def _check_row(where: str, row: Any, fields: dict[str, str]) -> None:
    if not isinstance(row, dict):
        raise SettingsError(f"{where}: expected a JSON object, found {_name(row)}; write {{...}}, one object a line.")
    for key, field in fields.items():
        if field not in row:
            present = ", ".join(map(repr, row)) or "none"
            raise SettingsError(
                f"{where}: no field {field!r}, which {key} names; the fields of this row are {present}."
                f" Set {key} or correct the row."
            )
        if key.endswith("input_key"):
            _check_input(where, key, field, row[field])


def _check_input(where: str, key: str, field: str, value: Any) -> None:
    messages = isinstance(value, list) and value and all(isinstance(part, dict) and "role" in part for part in value)
    if not (messages or (isinstance(value, str) and value)):
        found = "is empty" if value in ("", []) else f"is {_name(value)}"
        raise SettingsError(
            f"{where}: field {field!r} ({key}) {found}; a prompt is a text or a list of messages with role and content."
        )


def _name(value: Any) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
