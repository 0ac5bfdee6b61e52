"""What runs on this machine: a directory that one supervisor holds at a time.

`up.json` names the supervisor and its addresses; whether it lives is told by a lock on the directory, which the
kernel drops with the process, so that a killed supervisor leaves no trace to clean up.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from services.common.files import write_whole

DEFAULT_STATE_DIR = ".tetrarch"


@dataclass(frozen=True)
class Running:
    """A live supervisor. `command`: "up" or "train"; `addresses`: host:port by tier; `gpus`: ids by tier."""

    pid: int
    command: str
    addresses: dict[str, str] = field(default_factory=dict)
    run_id: str = ""
    gpus: dict[str, list[str]] = field(default_factory=dict)


class StateDir:
    """The state directory.

    Args:
        path: made when it is missing.
    """

    def __init__(self, path: str | Path = DEFAULT_STATE_DIR) -> None:
        self.path = Path(path).absolute()
        self._lock: int | None = None

    @property
    def store_dir(self) -> Path:
        """Where Valkey keeps its append-only file."""
        return self.path / "store"

    @property
    def log_dir(self) -> Path:
        """Where tiers log."""
        return self.path / "logs"

    def acquire(self) -> bool:
        """Takes the directory for this process; False when another one holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def release(self) -> None:
        """Gives the directory back."""
        if self._lock is not None:
            (self.path / "up.json").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def write(self, running: Running) -> None:
        """Tells others what runs here; only for the holder."""
        assert self._lock is not None, "acquire() comes first"
        write_whole(self.path / "up.json", f"{json.dumps(asdict(running), indent=2)}\n".encode())

    def running(self) -> Running | None:
        """The live supervisor of this directory, or None."""
        if not (self.path / "up.json").is_file():
            return None
        if self._lock is None and self.acquire():  # its holder is gone
            self.release()
            return None
        try:
            return Running(**json.loads((self.path / "up.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None
