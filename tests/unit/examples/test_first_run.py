"""The demo's run files."""

import pytest

from examples.first_run.__main__ import CONFIGS
from services.console.cli import places
from services.console.core.flags import parse_flags
from services.console.core.placement import NO_GPUS, NO_WISH
from services.console.core.resolve import resolve
from services.console.state import StateDir


@pytest.mark.parametrize("name", ["first_run_sft", "first_run_grpo"])
def test_the_demo_stays_on_the_cpu_where_there_are_gpus(tmp_path, monkeypatch, name):
    monkeypatch.setattr(places, "visible_gpus", lambda: ("0", "1"))
    prompts = str(tmp_path / "prompts.jsonl")
    flags = ["--hf-checkpoint", str(tmp_path), "--prompt-data", prompts, "--eval-prompt-data", "heldout", prompts]
    spec = resolve(parse_flags([str(CONFIGS / f"{name}.yaml"), *flags]))
    assert spec.rollout.device == "cpu"
    assert places.placement_for(spec, StateDir(tmp_path), NO_WISH) == NO_GPUS
