"""The directory of a run's weight versions, on a path that trainer and nodes share. Implements
`core.weight_files.WeightStore`."""

from __future__ import annotations

from pathlib import Path

from services.common.weight_files.manifest import Expected, version_directory, write_expected
from services.common.weight_files.write import remove_versions


class SharedWeightStore:
    """Versions of one run.

    Args:
        directory: update_weight_disk_dir.
        run_id: its subdirectory.
    """

    def __init__(self, directory: str, run_id: str) -> None:
        self._root, self._run_id = Path(directory).absolute(), run_id

    def path(self, version: int) -> str:
        """Absolute, since engines have other working directories."""
        return str(version_directory(self._root, self._run_id, version))

    def expect(self, expected: Expected) -> None:
        """Replaces `expected.json`."""
        write_expected(Path(self.path(expected.version)), expected)

    def keep(self, versions: set[int]) -> None:
        """Removes the others that are older than the newest of them."""
        remove_versions(self._root / self._run_id, versions)
