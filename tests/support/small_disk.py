"""A disk of a few megabytes that can be filled to the last byte: a tmpfs. Needs root; else tests are skipped."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_FILLER = ".filler"
_BLOCK = 4096
_COMMAND_SECONDS = 10.0


class SmallDisk:
    """A mounted tmpfs.

    Args:
        path: an empty directory, or one to make.
        size: bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self._size = path, size

    def mount(self) -> SmallDisk:
        """Raises RuntimeError with the reason where that is not permitted."""
        self.path.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={self._size}", "tmpfs", str(self.path))
        return self

    def unmount(self) -> None:
        """Also while a process has files open there."""
        _run("umount", "--lazy", str(self.path))

    @property
    def free_bytes(self) -> int:
        """Room left."""
        return shutil.disk_usage(self.path).free

    def fill(self) -> None:
        """Takes all room, whatever others write meanwhile."""
        size, step = 0, max(self.free_bytes, _BLOCK)
        with (self.path / _FILLER).open("ab") as file:
            while step >= _BLOCK:
                try:
                    os.posix_fallocate(file.fileno(), size, step)
                    size += step
                except OSError:  # all or nothing
                    step //= 2

    def make_room(self) -> None:
        """Gives back what `fill` took."""
        (self.path / _FILLER).unlink(missing_ok=True)


@contextlib.contextmanager
def disk_at(path: Path, size: int) -> Iterator[SmallDisk]:
    """A disk for as long as the block lasts. Skips the test where nothing can be mounted."""
    try:
        disk = SmallDisk(path, size).mount()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"a small disk cannot be mounted here: {error}")
    try:
        yield disk
    finally:
        disk.unmount()


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
