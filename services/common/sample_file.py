"""Files of samples: what `tetrarch export-samples` and `save_debug_rollout_data` write and `load_debug_rollout_data`
reads.

Knows rows and paths, not where rows come from (`sample_rows`). Invariant: a file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STEP = "{rollout_id}"
"""Stands for the step, from 0, in the path of a file."""
SUFFIXES = (".jsonl", ".parquet")


def step_path(template: str, step: int) -> Path:
    """File of a step (from 0). `template`: a path with "{rollout_id}" and one of `SUFFIXES`, or a directory, in which
    the files are called <step>.jsonl. Raises ValueError."""
    path = Path(template)
    if STEP not in template and path.suffix not in SUFFIXES:
        path /= f"{STEP}.jsonl"
    if STEP not in str(path):
        raise ValueError(f'it needs "{STEP}", for every step has a file of its own; or name a directory')
    if path.suffix not in SUFFIXES:
        raise ValueError("it ends in neither .jsonl nor .parquet; name one of these, or a directory")
    return Path(str(path).replace(STEP, str(step)))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows in the format that the suffix names.

    Raises:
        OSError: the place takes no file.
        ModuleNotFoundError: parquet without pyarrow.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        (_write_parquet if path.suffix == ".parquet" else _write_jsonl)(part, rows)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    # An empty list has no type of its own.
    kinds = {"tokens": pyarrow.int32(), "loss_mask": pyarrow.uint8(), "log_probs": pyarrow.float32()}
    table = pyarrow.Table.from_pylist(rows)
    for name, kind in kinds.items():
        column = pyarrow.array([row[name] for row in rows], pyarrow.list_(kind))
        table = table.set_column(table.schema.get_field_index(name), name, column)
    parquet.write_table(table, path)
