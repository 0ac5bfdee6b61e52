"""Named moments at which a test, a benchmark or the soak may strike a process: `reach("trainer.before_prepare")`.

Inert unless TETRARCH_FAULT_DIR names a directory. A point is armed by a file DIR/NAME, or DIR/NAME@ANYTHING for several
at a time, holding a JSON object of labels that must match ({} matches all). The first process that reaches it with
matching labels takes it, by renaming the file to FILE.reached and writing its pid, process group and time into it, and
stands still on that thread until that file is gone. Whoever armed it then kills, stops or lets go the process, by pid.
Knows no service.

Invariants: one arming holds up one process once; a hold ends after `_HOLD_SECONDS` whatever happens.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

VARIABLE = "TETRARCH_FAULT_DIR"
REACHED = ".reached"
_HOLD_SECONDS = 60.0
_POLL_SECONDS = 0.005


def reach(name: str, **labels: str) -> None:
    """Holds this thread if the point is armed for these labels."""
    taken = _take(name, labels)
    while taken and _held(*taken):
        time.sleep(_POLL_SECONDS)


async def reach_async(name: str, **labels: str) -> None:
    """Holds this task, and no other, if the point is armed for these labels."""
    taken = _take(name, labels)
    while taken and _held(*taken):
        await asyncio.sleep(_POLL_SECONDS)


def _take(name: str, labels: dict[str, str]) -> tuple[Path, float] | None:
    directory = os.environ.get(VARIABLE)
    if not directory:
        return None
    armed = [Path(directory) / name, *Path(directory).glob(f"{name}@*")]
    for file in armed:
        if file.suffix != REACHED and _claim(file, labels):
            return file.with_name(file.name + REACHED), time.monotonic() + _HOLD_SECONDS
    return None


def _claim(file: Path, labels: dict[str, str]) -> bool:
    """True when the file matches and no other process was faster."""
    mine = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        wanted = json.loads(file.read_text())
        if any(labels.get(key) != value for key, value in wanted.items()):
            return False
        os.rename(file, mine)
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    mine.write_text(json.dumps({"pid": os.getpid(), "pgid": os.getpgid(0), "time": time.time()} | labels))
    os.rename(mine, file.with_name(file.name + REACHED))
    return True


def _held(reached: Path, deadline: float) -> bool:
    return reached.exists() and time.monotonic() < deadline
