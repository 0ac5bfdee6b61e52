"""The checksum's kernel in Triton's interpreter, against the passes in torch. On a GPU: tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_the_kernel_equals_the_passes_in_torch() -> None:
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.oracle.checksum_cases"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
