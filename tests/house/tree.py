"""The files that belong to the repository."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIERS = ("buffer", "rollout", "reward", "trainer")
GENERATED = ("proto/gen/",)


@cache
def tracked_files() -> tuple[Path, ...]:
    """Tracked files that exist, generated ones left out."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = [name for name in listed.split("\0") if name and not name.startswith(GENERATED)]
    return tuple(ROOT / name for name in sorted(names) if (ROOT / name).is_file())


def python_files(*folders: str) -> list[Path]:
    """Tracked Python files below the folders."""
    return [f for f in tracked_files() if f.suffix == ".py" and f.relative_to(ROOT).parts[0] in folders]


def text_of(path: Path) -> str:
    """Text of a file; empty for a binary one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def name_of(path: Path) -> str:
    """Path within the repository."""
    return path.relative_to(ROOT).as_posix()
