"""Keeps a step's samples as a file (`save_debug_rollout_data`), before the step is committed.

So every committed step has its file, and tokens that nobody needs after the commit are still stored.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.common.errors import invalid_field
from services.common.sample_file import step_path, write_rows
from services.trainer.core.ports import Buffer
from services.trainer.core.records import Batch

_KEY = "save_debug_rollout_data"


async def keep_samples(buffer: Buffer, run_id: str, template: str, step: int, batch: Batch) -> Path:
    """Writes the samples of a reserved batch in the order in which they are trained. Raises INVALID_FIELD."""
    path = step_path(template, step)
    rows = await buffer.group_rows(run_id, list(dict.fromkeys(sample.group_id for sample in batch.samples)), step + 1)
    try:
        await asyncio.to_thread(write_rows, path, rows)
    except ModuleNotFoundError as error:
        why = "parquet needs pyarrow: install tetrarch[parquet], or use JSONL"
        raise invalid_field(_KEY, str(path), why) from error
    except OSError as error:
        raise invalid_field(_KEY, str(path), f"it cannot be written: {error.strerror}") from error
    return path
