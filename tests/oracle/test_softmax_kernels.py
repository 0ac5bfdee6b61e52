"""The kernels for log-probs in Triton's interpreter, against the passes in torch. On a GPU: tests/gpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.oracle.softmax_cases import SIZES, TOLERANCE

pytest.importorskip("triton")


def test_the_kernels_equal_the_passes_in_torch() -> None:
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    command = [sys.executable, "-m", "tests.oracle.softmax_cases"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for size, found in zip(SIZES, json.loads(done.stdout), strict=True):
        assert found.keys() == TOLERANCE.keys()
        assert {name: value for name, value in found.items() if not value <= TOLERANCE[name]} == {}, size
