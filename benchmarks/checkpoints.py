"""Checkpoints for benchmarks: the demo's random model, and a copy of any model that never ends a response."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples.first_run.__main__ import ROOT


def random_model(directory: Path, seed: int = 1) -> Path:
    """The demo's model with random weights, made when it is not there."""
    if not (directory / "config.json").is_file():
        command = [sys.executable, "-W", "ignore", "-m", "examples.first_run.model", str(directory), str(seed)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    return directory


def endless_copy(model: Path, directory: Path, positions: int | None = None) -> Path:
    """A copy of `model` without an end token: every response runs to its limit, whatever is sampled.

    Weights are linked, not copied. `positions` raises the longest context of a model whose positions are not learned.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for path in sorted(model.iterdir()):
        if path.name == "generation_config.json":
            continue
        if path.name == "config.json":
            config = _read(path) | {"eos_token_id": None}
            if positions:
                config["max_position_embeddings"] = positions
            (directory / path.name).write_text(json.dumps(config))
        elif path.name in ("tokenizer_config.json", "special_tokens_map.json"):
            (directory / path.name).write_text(json.dumps(_read(path) | {"eos_token": None}))
        elif path.is_file():
            (directory / path.name).symlink_to(path.resolve())
    return directory


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
