"""Named moments at which a test, a benchmark or the soak may strike a process: `reach("trainer.before_prepare")`.

Inert unless TETRARCH_FAULT_DIR names a directory. A point is armed by a file DIR/NAME holding a JSON object of labels
that must match ({} matches all). The first process that reaches it with matching labels takes it, by renaming the file
to NAME.reached and writing its pid, process group and time into it, and stands still on that thread until the file is
gone. Whoever armed it then kills, stops or lets go the process, by pid. Knows no service.

Invariants: one arming holds up one process once; a hold ends after `_HOLD_SECONDS` whatever happens.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

VARIABLE = "TETRARCH_FAULT_DIR"
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
    armed, reached = Path(directory) / name, Path(directory) / f"{name}.reached"
    try:
        wanted = json.loads(armed.read_text())
        if any(labels.get(key) != value for key, value in wanted.items()):
            return None
        mine = Path(directory) / f"{name}.{os.getpid()}"
        os.rename(armed, mine)  # one of several processes succeeds
        mine.write_text(json.dumps({"pid": os.getpid(), "pgid": os.getpgid(0), "time": time.time()} | labels))
        os.rename(mine, reached)
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return reached, time.monotonic() + _HOLD_SECONDS


def _held(reached: Path, deadline: float) -> bool:
    return reached.exists() and time.monotonic() < deadline
