"""Do the JSONL files of a run hold what its keys promise? One pass, line by line, constant memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.common.run_spec import DataSettings
from services.common.settings import SettingsError

_SLICE = re.compile(r"(?P<path>.*)@\[-?\d*:-?\d*\]")
"""A path may end in "@[a:b]", a slice of its rows."""


def check_data(data: DataSettings) -> None:
    """Checks the prompts and every evaluation set. Raises SettingsError naming file and line."""
    if not data.prompt_data:
        raise SettingsError("prompt_data is not set; name the JSONL file of prompts with --prompt-data FILE.")
    fields = {"input_key": data.input_key}
    if data.label_key:
        fields["label_key"] = data.label_key
    check_jsonl(data.prompt_data, "prompt_data", fields)
    own = {"input_key": data.eval_input_key, "label_key": data.eval_label_key}
    # An evaluation set may name its fields differently; the message then names the key that does it.
    eval_fields = {key: field for key, field in fields.items() if not own[key]}
    eval_fields |= {f"eval_{key}": field for key, field in own.items() if field}
    for name, path in data.eval_datasets.items():
        check_jsonl(path, f"eval_prompt_data {name}", eval_fields)


def check_jsonl(path: str, key: str, fields: dict[str, str]) -> int:
    """Rows of a JSONL file in which every object has the fields (key that names a field → field).

    Raises SettingsError for a missing or empty file, a malformed line or a missing field.
    """
    slice_of = _SLICE.fullmatch(path)
    file = Path(slice_of["path"] if slice_of else path)
    if not file.is_file():
        what = "is a directory" if file.is_dir() else "does not exist"
        raise SettingsError(f"{key} {file} {what}; give the path of a JSONL file, one object a line.")
    count = 0
    for number, row in _rows(file):
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
