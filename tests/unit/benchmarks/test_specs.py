"""Benchmarks that make runs of run files: what they make is valid on every device, before a GPU is asked for it."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import engine_kill, rollout_rate, step_split
from benchmarks.checkpoints import endless_copy
from benchmarks.run_files import write_prompts
from examples.first_run.__main__ import CONFIGS
from services.console.core.history import Event, History

DEVICES = ("cpu", "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ["sglang", "simulated"])
def test_a_round_of_the_rollout_rate_is_what_its_run_admits(device, engine, tmp_path):
    groups, inflight, tokens = rollout_rate.SIZES[device]
    chosen = Namespace(
        device=device,
        engine=engine,
        run_file=CONFIGS / rollout_rate.RUN_FILES[device],
        groups=groups,
        inflight=inflight,
        tokens=tokens,
        samples=8,
        engine_tokens_per_second=1e6,
    )
    spec = rollout_rate.make_spec(chosen, tmp_path / "run", tmp_path, tmp_path / "prompts.jsonl")
    assert spec.rollout.rollout_batch_size * (spec.trainer.max_staleness + 1) == groups
    context = spec.rollout.rollout_max_context_len
    assert context is None or context >= tokens + 100
    assert spec.rollout.device == device


@pytest.mark.parametrize("device", DEVICES)
def test_a_kill_run_has_two_engines_and_one_epoch(device, tmp_path):
    chosen = Namespace(
        device=device,
        engine="sglang",
        run_file=CONFIGS / engine_kill.RUN_FILES[device],
        steps=engine_kill.STEPS[device],
    )
    spec = engine_kill.make_spec(chosen, tmp_path, tmp_path)
    rows = (tmp_path / "prompts.jsonl").read_text().splitlines()
    assert spec.rollout.engine_count == 2
    assert spec.data.num_epoch == 1
    assert len(rows) == spec.rollout.num_rollout * spec.rollout.rollout_batch_size


def test_prompts_differ_and_have_one_length(tmp_path):
    texts = write_prompts(tmp_path / "prompts.jsonl", 200)
    assert len(set(texts)) == 200
    assert {len(text) for text in texts} == {48}
    assert [json.loads(line)["input"] for line in (tmp_path / "prompts.jsonl").open()] == texts


def test_an_endless_copy_has_no_end_token_and_the_same_weights(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    files = {
        "config.json": {"eos_token_id": 2, "max_position_embeddings": 64},
        "generation_config.json": {"eos_token_id": 2},
        "tokenizer_config.json": {"eos_token": "<eos>", "bos_token": "<bos>"},
    }
    for name, content in files.items():
        (source / name).write_text(json.dumps(content))
    (source / "model.safetensors").write_bytes(b"weights")
    copy = endless_copy(source, tmp_path / "copy", positions=256)
    assert json.loads((copy / "config.json").read_text()) == {"eos_token_id": None, "max_position_embeddings": 256}
    assert json.loads((copy / "tokenizer_config.json").read_text()) == {"eos_token": None, "bos_token": "<bos>"}
    assert not (copy / "generation_config.json").exists()
    assert (copy / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((source / "config.json").read_text())["eos_token_id"] == 2


def test_a_split_of_steps_leaves_the_warm_up_and_the_last_step_out():
    history = History()
    for step in range(step_split.WARM_UP + 3):
        slow = step < step_split.WARM_UP or step == step_split.WARM_UP + 2
        metrics = {"total_seconds": 100.0 if slow else 2.0, "train_forward_backward_seconds": 0.5}
        history.add(Event(step, "step", step, metrics))
    figures = {figure.name: figure.value for figure in step_split.figures_of(history, bare=1.0)}
    assert figures["step"] == 2.0
    assert figures["share that is not model compute"] == pytest.approx(0.25)
    with pytest.raises(SystemExit, match="too few steps"):
        step_split.figures_of(History(), None)


def test_an_outage_is_judged_by_the_steps_that_touch_it(tmp_path):
    chosen = Namespace(device="cpu", engine="simulated", run_file=CONFIGS / "first_run_grpo.yaml", steps=9)
    spec = engine_kill.make_spec(chosen, Path(tmp_path), Path(tmp_path))
    ends = [0.0, 1.0, 2.0, 3.0, 4.0, 9.0, 10.0, 11.0, 12.0]
    outage = engine_kill.Outage("e-1", 4.5, 5, out_of_router=0.1, up=4.0, serving=5.0, version=6, published=6)
    outage.said_by_engine = "6"
    trained = engine_kill.Trained(ends, engine_kill.collections.Counter(range(72)), 0)
    figures = {one.name.strip(): one for one in engine_kill.figures_of(spec, outage, trained, whole=True)}
    assert all(figure.passed for figure in figures.values())
    assert figures["gap between steps, longest in the outage"].value == 5.0
    assert figures["gap between steps, median without the outage"].value == 1.0
    assert figures["steps during the outage"].value == 1


def test_a_benchmark_that_hangs_is_ended_through_its_clean_up():
    program = """
import time
from benchmarks.report import limit
limit(1)
try:
    time.sleep(30)
finally:
    print("cleaned up")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, "cleaned up\n")
    assert "not done after 1 s" in done.stderr
