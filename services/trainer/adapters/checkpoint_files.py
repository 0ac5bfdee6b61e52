"""Directories of trainer checkpoints on a file system that controller and ranks share.

Reads what the ranks write (`step_NNNNNN`, `latest`) and keeps a marker of its own beside them. Implements
`ports.CheckpointFiles`. Invariant: the marker is there before the first checkpoint.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from services.common.errors import Code, ServiceError
from services.common.files import write_whole
from services.trainer.core.ports import CheckpointMarker

_LATEST = "latest"
_MARKER = "run.json"
_COMPLETE = "metadata.json"


class SharedCheckpointFiles:
    """Checkpoint directories by path."""

    def latest(self, directory: str) -> str | None:
        """The checkpoint named by `latest`; the newest complete one when that was being replaced at a crash."""
        root = Path(directory)
        try:
            named = root / (root / _LATEST).read_text().strip()
        except OSError:
            return None
        if (named / _COMPLETE).exists():
            return str(named)
        complete = sorted(path.parent for path in root.glob(f"step_*/{_COMPLETE}"))
        return str(complete[-1]) if complete else None

    def marker(self, directory: str) -> CheckpointMarker | None:
        """Whose checkpoints are here; None when nobody's, or unknown."""
        try:
            data = json.loads((Path(directory) / _MARKER).read_text())
            return CheckpointMarker(data["run_id"], data["first_step"])
        except (OSError, ValueError, KeyError):
            return None

    def check_export(self, directory: str) -> None:
        """Looks at the place of an export before ranks write there. Raises EXPORT_REFUSED."""
        target = Path(directory)
        try:
            if target.exists() and (not target.is_dir() or any(target.iterdir())):
                raise _export_refused(directory, "it exists and is not an empty directory; name a new one")
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent):
                pass
        except OSError as error:
            raise _export_refused(directory, f"{error.strerror or error}; name another place") from error

    def mark(self, directory: str, marker: CheckpointMarker) -> None:
        """Claims a directory for a run. Raises SAVE_NOT_WRITABLE."""
        root = Path(directory)
        if self.marker(directory) == marker:
            return
        try:
            write_whole(root / _MARKER, json.dumps({"run_id": marker.run_id, "first_step": marker.first_step}).encode())
        except OSError as error:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "SAVE_NOT_WRITABLE",
                f"save {directory} cannot be written: {error.strerror or error}.",
                path=directory,
            ) from error


def _export_refused(directory: str, why: str) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "EXPORT_REFUSED",
        f"Nothing is exported to {directory} on the trainer's host: {why}.",
        path=directory,
    )
