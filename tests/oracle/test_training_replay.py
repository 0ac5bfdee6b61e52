"""Replay of routing and of top-p on a tiny mixture of experts: against transformers, and over parallel layouts.

Worlds of `replay_program` leave their numbers behind. All float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.oracle.models import write_models
from tests.support.rank_processes import run_ranks

TOLERANCE = 1e-5
"""Absolute, of log-probs of about −5; measured 3e-6."""
LAYOUT_TOLERANCE = 1e-5
"""Relative, of losses and gradient norms."""
LAYOUTS = ("single", "tp2", "cp2")
_DEADLINE_SECONDS = 240


def _run(layout: str, world_size: int, root: Path) -> dict:
    run_ranks("tests.oracle.replay_program", layout, world=world_size, root=root, seconds=_DEADLINE_SECONDS)
    return torch.load(root / f"{layout}.pt", weights_only=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Results by layout."""
    root = tmp_path_factory.mktemp("replay")
    write_models(root, ("qwen3", "qwen3_moe"))
    return {layout: _run(layout, 1 if layout == "single" else 2, root) for layout in LAYOUTS}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_go_to_the_engines_experts(found, layout):
    expected, engine = found["single"]["transformers"], found[layout]["engine"]
    assert (engine["before"] - expected["experts"]).abs().max() <= TOLERANCE
    assert (engine["now"] - expected["experts"]).abs().max() <= TOLERANCE
    assert (expected["experts"] - expected["plain"]).abs().max() > 0.1, "the routing under test must matter"


def test_gradients_flow_through_the_routers_own_weights(found):
    assert found["single"]["engine"]["norm"].item() == pytest.approx(
        found["single"]["transformers"]["norm"].item(), rel=1e-5
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_record_is_consumed_exactly_once(found, layout):
    engine = found[layout]["engine"]
    assert engine["consumed"]
    assert "is to be replayed in training a second time" in engine["again"]
    assert "was not replayed in training" in engine["unused"]
    assert "s0" in engine["unused"]


def test_experts_that_do_not_fit_are_refused_by_sample_and_shape(found):
    few, narrow, strange = found["single"]["engine"]["refused"]
    assert "Sample s0 cannot be replayed: its routed experts have shape [" in few
    assert "rows of 6" in few
    assert ", 4], but a model of 3 layers with 2 experts a token needs" in narrow
    assert "it was routed to expert" in strange
    assert "of a model that has 8" in strange
    assert "in layer 0, whose router is asked for" in found["single"]["engine"]["cut"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_where_the_old_pass_went(found, layout):
    """R2, with routers that moved in between."""
    trainer = found[layout]["trainer"]
    assert (trainer["before"] - found["single"]["transformers"]["plain"]).abs().max() <= TOLERANCE
    assert trainer["same"], "a replaying pass records nothing"
    assert trainer["consumed"]
    assert trainer["fresh"] == (None, False), "a training pass records nothing"
    moved = (trainer["again"] - trainer["unrecorded"]).abs().max()
    assert moved > 1e-3, "without the record, tokens go elsewhere"
    assert (trainer["again"] - found["single"]["trainer"]["again"]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_are_of_the_kept_tokens(found, layout):
    expected = found["single"]["transformers"]
    assert (found[layout]["nucleus"]["log_probs"] - expected["kept"]).abs().max() <= TOLERANCE
    assert (expected["kept"] > expected["plain"]).all()


def test_kept_tokens_that_do_not_fit_are_refused_by_sample(found):
    short, none, strange = found["single"]["nucleus"]["refused"]
    assert "Sample s0 cannot be replayed: its kept tokens have shape [" in short
    assert "no kept tokens are recorded for its trained response token" in none
    assert "it kept token 131 of a vocabulary of 131" in strange


@pytest.mark.parametrize("replayed", ["rollout", "trainer"])
def test_first_steps_are_on_policy_and_layouts_train_alike(found, replayed):
    single, tensor = (found[layout]["training"][replayed] for layout in ("single", "tp2"))
    assert all(metrics["ppo_kl_first"] == 0 for metrics in single)
    for ours, theirs in zip(tensor, single, strict=True):
        for key in ("loss", "grad_norm", "entropy"):
            assert ours[key] == pytest.approx(theirs[key], rel=LAYOUT_TOLERANCE, abs=1e-6)


def test_a_model_without_experts_has_no_routing_to_replay(found):
    assert found["single"]["dense"] == (
        "use_routing_replay is set, but a qwen3 model has no experts to route to; leave it out."
    )
