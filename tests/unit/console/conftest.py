"""A small valid run on disk: every test of a mistake begins with it and breaks one thing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

CONFIG = {"vocab_size": 300, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
RUN = """\
data:
  prompt_data: train.jsonl
  label_key: label
  eval_prompt_data: [held, eval.jsonl]
rollout:
  hf_checkpoint: model
  num_rollout: 3
  rollout_batch_size: 4
  n_samples_per_prompt: 4
trainer:
  global_batch_size: 16
"""


def write_rows(path: Path, rows: list[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with run.yaml, data and a checkpoint without real weights."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.jsonl", [{"input": f"{i}+1=", "label": str(i + 1)} for i in range(8)])
    write_rows(tmp_path / "eval.jsonl", [{"input": "1+1=", "label": "2"}])
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").write_bytes(b"")
    vocabulary = {f"t{i}": i for i in range(290)}
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 290, "content": "<eos>"}]}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


@pytest.fixture
def edit(run_folder: Path) -> Callable[[str, str], None]:
    """Replaces text of run.yaml."""

    def replace(old: str, new: str) -> None:
        text = (run_folder / "run.yaml").read_text()
        assert old in text
        (run_folder / "run.yaml").write_text(text.replace(old, new))

    return replace
