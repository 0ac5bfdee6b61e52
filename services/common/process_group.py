"""Looks at the processes of a group, by what the kernel says of them (Linux). Signals nothing.

A process that was stopped (SIGSTOP, a job control stop) runs no instruction until somebody continues it: unlike one
that is only slow, it needs no patience.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_STATE, _GROUP = 0, 2
"""Fields of /proc/PID/stat behind the program's name."""


def members(group: int) -> list[int]:
    """Ids of the processes of a group; empty when there are none."""
    ids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in ids if (fields := _fields(pid)) and fields[_GROUP] == str(group)]


def any_stopped(pids: Iterable[int]) -> bool:
    """True when one of the processes was stopped by a signal."""
    return any((fields := _fields(pid)) and fields[_STATE] == "T" for pid in pids)


def _fields(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return []
    return text.rpartition(")")[2].split()
