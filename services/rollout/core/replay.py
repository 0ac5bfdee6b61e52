"""Groups of an exported file in place of generated ones: training alone, the same samples every time.

A file is what `tetrarch export-samples` or `save_debug_rollout_data` wrote. Group i of the run gets group i of the
file, from the start again when the file ends; with "{rollout_id}" in the path every step, from 0, has a file of its
own. What engines said of a sample (tokens, masks, log-probs, reward) is kept; its versions are not: another run's
weights made it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from services.common.errors import invalid_field
from services.common.records import Group, Prompt, Sample, SampleStatus, TeacherLogProbs
from services.common.sample_file import STEP
from services.rollout.core.run_settings import RunSettings

KEY = "load_debug_rollout_data"
_FILES_KEPT = 4


def read_groups(path: Path) -> list[list[Mapping[str, Any]]]:
    """Rows of a JSONL or parquet file by group, in the file's order. Raises INVALID_FIELD."""
    try:
        rows = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
        groups = [list(group) for _, group in groupby(rows, lambda row: row["group_id"])]
    except OSError as error:
        raise invalid_field(KEY, str(path), f"it cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise invalid_field(KEY, str(path), "it is not what `tetrarch export-samples` writes") from error
    if not groups:
        raise invalid_field(KEY, str(path), "it has no samples")
    return groups


def _read_jsonl(path: Path) -> list[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def _read_parquet(path: Path) -> list[Mapping[str, Any]]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise invalid_field(KEY, str(path), "parquet needs pyarrow: install tetrarch[parquet], or use JSONL") from error
    return parquet.read_table(path).to_pylist()


def check_replay(run: RunSettings) -> None:
    """Reads the first file of a run that replays one. Raises INVALID_FIELD."""
    if path := run.keys.get(KEY):
        read_groups(Path(path.replace(STEP, "0")))


@dataclass
class ReplayMaker:
    """Makes groups of a file's."""

    run: RunSettings
    _files: dict[Path, list[list[Mapping[str, Any]]]] = field(default_factory=dict)

    async def make(self, prompt: Prompt, partial: Group | None = None) -> Group:
        """The file's group under this prompt's name. Raises INVALID_FIELD."""
        path, batch = str(self.run.keys[KEY]), int(self.run.keys["rollout_batch_size"])
        step, position = divmod(prompt.ordinal, batch) if STEP in path else (0, prompt.ordinal)
        file = Path(path.replace(STEP, str(step)))
        if file not in self._files:
            groups = await asyncio.to_thread(read_groups, file)
            if len(self._files) >= _FILES_KEPT:
                self._files.pop(next(iter(self._files)))
            self._files[file] = groups
        rows = self._files[file][position % len(self._files[file])]
        rollouts = {i if row.get("rollout_index") is None else row["rollout_index"] for i, row in enumerate(rows)}
        if len(rollouts) != self.run.samples_per_prompt:
            why = f"its group {rows[0]['group_id']} has {len(rollouts)} rollouts; set n_samples_per_prompt to that"
            raise invalid_field(KEY, str(file), why)
        return Group(prompt.group_id, prompt.ordinal, tuple(_sample(row, prompt, i) for i, row in enumerate(rows)))


def _teacher(row: Mapping[str, Any]) -> TeacherLogProbs:
    sampled, top = np.asarray(row["log_probs"], np.float32), (len(row["log_probs"]), -1 if row["top_ids"] else 0)
    return TeacherLogProbs(
        sampled,
        np.asarray(row["top_ids"], np.int32).reshape(top),
        np.asarray(row["top_log_probs"], np.float32).reshape(top),
    )


def _sample(row: Mapping[str, Any], prompt: Prompt, index: int) -> Sample:
    return Sample(
        sample_id=f"{prompt.group_id}-{index}",
        group_id=prompt.group_id,
        index=index,
        status=SampleStatus[row["status"].upper()],
        prompt_length=row["prompt_length"],
        tokens=np.asarray(row["tokens"], np.int32),
        loss_mask=np.asarray(row["loss_mask"], np.uint8),
        log_probs=np.asarray(row["log_probs"], np.float32),
        response=row["response"],
        reward=row["reward"],
        unscored_reason=row["unscored_reason"],
        metadata_json=json.dumps({"replayed": row["group_id"]}),
        teacher=_teacher(row["teacher"]) if row.get("teacher") else None,
        rollout_index=row.get("rollout_index"),
    )
