"""Runs made of a run file for a benchmark: the file's engines and trainer, the benchmark's own prompts and sizes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from services.common.settings import read_yaml

_EVALUATION = ("eval_", "n_samples_per_eval")
_PLACES = ("save", "load", "ref_load", "eval_")


def bare_settings(run_file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The groups rollout and trainer of a run file, without evaluations, checkpoints and custom functions."""
    file = read_yaml(run_file)
    rollout, trainer = file["rollout"], file.get("trainer") or {}
    return (
        {key: value for key, value in rollout.items() if not key.startswith((*_EVALUATION, "custom_"))},
        {key: value for key, value in trainer.items() if not key.startswith(_PLACES)},
    )


def write_prompts(path: Path, count: int) -> list[str]:
    """Prompts of one length, each different from the first character on, for any tokenizer that knows digits."""
    chance = random.Random(1)

    def text() -> str:
        return "".join(f"{chance.randrange(1000):03}+{chance.randrange(1000):03}=" for _ in range(6))

    texts = [text() for _ in range(count)]
    path.write_text("".join(json.dumps({"input": text, "label": "0"}) + "\n" for text in texts))
    return texts
