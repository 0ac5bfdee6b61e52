"""Which way imports go, and how light the command lines are."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from .tree import ROOT, TIERS

HELP_CPU_SECONDS = 2.0
HEAVY = ("torch", "transformers", "megatron", "sglang", "tensorflow", "matplotlib", "math_verify", "sympy")
PROBE = """
import json, runpy, sys
sys.argv = [sys.argv[1], "--help"]
status = 0
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    status = end.code or 0
print(json.dumps({"status": status, "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


def test_import_rules():
    """The contracts of .importlinter."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [*TIERS, "console"])
def test_help_is_quick_and_light(name):
    """Measured as processor time, so that a busy machine does not matter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, f"services.{name}"], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.splitlines()
    result = json.loads(last)
    assert result["status"] == 0
    assert shown, "--help says nothing"
    assert not set(HEAVY) & set(result["modules"])
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < HELP_CPU_SECONDS


@pytest.mark.parametrize("tier", TIERS)
def test_a_misspelt_key_is_one_sentence_and_exit_code_2(tier):
    done = subprocess.run(
        [sys.executable, "-m", f"services.{tier}", "--set", "prot=1"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "'prot'" in done.stderr
    assert "'port'" in done.stderr
