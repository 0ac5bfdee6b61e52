"""What holds for every test: a marker by folder, a time limit, and an environment fit for child processes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Before anything imports grpc or torch, and for every process that a test starts.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([str(ROOT), str(ROOT / "proto" / "gen"), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))])
)

SECONDS_BY_FOLDER = {
    "unit": 60,
    "contract": 60,
    "house": 60,
    "integration": 300,
    "faults": 300,
    "stateful": 120,
    "gpu": 600,
}
"""Folder under tests/ → time limit of one test. The folder's name is its marker."""


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers."""
    for folder, seconds in SECONDS_BY_FOLDER.items():
        config.addinivalue_line("markers", f"{folder}: tests in tests/{folder}, at most {seconds} s each")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test by its folder; `gpu` tests are skipped where there is none."""
    without_gpu = pytest.mark.skip(reason="no GPU on this machine")
    for item in items:
        if not item.path.is_relative_to(ROOT / "tests"):
            continue
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder not in SECONDS_BY_FOLDER:
            continue
        item.add_marker(getattr(pytest.mark, folder))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS_BY_FOLDER[folder]))
        if folder == "gpu" and shutil.which("nvidia-smi") is None:
            item.add_marker(without_gpu)
