"""Every algorithm on a real model: what the first step must find, kept weights, moving references, broken numbers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from services.common.process import free_port
from tests.oracle.models import write_models
from tests.oracle.training_program import ALGORITHMS

_DEADLINE_SECONDS = 420
ROUNDING = 2e-6
"""Of a mean of float32 log-probs; the largest measured is 1e-7."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    root = tmp_path_factory.mktemp("algorithms")
    write_models(root)
    command = [sys.executable, "-m", "tests.oracle.training_program", str(free_port()), str(root)]
    with (root / "log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=log, env=dict(os.environ), timeout=_DEADLINE_SECONDS)
    assert done.returncode == 0, (root / "log").read_text()[-3000:]
    return torch.load(root / "algorithms.pt", weights_only=False)


@pytest.mark.timeout(450)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_first_step_finds_one_policy(found: dict, name: str) -> None:
    """The policy is its own old policy, reference and engine: KL 0, ratio 1, nothing clipped, nothing corrected."""
    metrics, settings = found["first_steps"][name], ALGORITHMS[name]
    exact = not settings.get("use_rollout_logprobs")
    assert metrics["ppo_kl_first"] == (0 if exact else pytest.approx(0, abs=ROUNDING))
    assert abs(metrics["mis_kl"]) < ROUNDING
    assert metrics["log_prob_abs_diff_max"] < 10 * ROUNDING
    if "num_steps_per_rollout" not in settings:
        assert metrics["ppo_kl"] == pytest.approx(0, abs=ROUNDING)
        assert metrics["ratio_mean"] == (1 if exact else pytest.approx(1, abs=ROUNDING))
        assert metrics["ratio_max"] == (1 if exact else pytest.approx(1, abs=10 * ROUNDING))
        assert metrics["pg_clipfrac"] == 0
        assert metrics["kl_loss"] == pytest.approx(0, abs=ROUNDING)
    if "kl_coef" in settings:
        assert metrics["kl"] == pytest.approx(0, abs=ROUNDING)
    if "use_tis" in settings or name == "custom":
        assert metrics["tis"] == pytest.approx(1, abs=ROUNDING)
        assert metrics["rs_token_fraction"] == 0
    if "use_opsm" in settings:
        assert metrics["opsm_fraction"] == 0
    if "use_decoupled_loss" in settings:
        assert metrics["behave_weight"] == pytest.approx(1, abs=ROUNDING)
        assert metrics["behave_dropped_fraction"] == 0
    if name == "custom":
        assert metrics["custom_gain"] == 1
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("form", ["broadcast", "returns", "baseline_kl", "gae"])
def test_the_token_stage_equals_loops_over_tokens(found: dict, form: str) -> None:
    assert found["stages"][form] < 1e-5


def test_kept_weights_find_what_the_engine_said(found: dict) -> None:
    kept = found["kept_actors"]
    assert kept["swapped"]
    assert kept["restored"]
    assert kept["known"]["kept_missing_fraction"] == 0
    assert kept["known"]["log_prob_abs_diff_max"] < 10 * ROUNDING
    assert kept["known"]["tis"] == pytest.approx(1, abs=ROUNDING)
    assert abs(kept["known"]["ppo_kl"]) > 1e-4, "half of the tokens are of other weights"


def test_tokens_of_forgotten_weights_have_the_engines_numbers(found: dict) -> None:
    forgotten = found["kept_actors"]["forgotten"]
    assert forgotten["kept_missing_fraction"] == 1
    assert forgotten["tis"] == 1
    assert not [name for name in forgotten if name.startswith(("mis_", "log_prob_"))], "nothing is known of a mismatch"


@pytest.mark.parametrize(
    ("case", "reason", "words"),
    [
        ("log_prob", "LOSS_NOT_FINITE", "The loss of optimizer step 0 is infinite or not a number for sample s3;"),
        ("whitened", "LOSS_NOT_FINITE", "The advantage is infinite or not a number for samples"),
        ("shape", "CUSTOM_LOSS_FAILED", "returned a loss of shape []"),
    ],
)
def test_broken_numbers_stop_the_step_before_the_update(found: dict, case: str, reason: str, words: str) -> None:
    stopped = found["stopped"][case]
    assert stopped["said"][0] == reason
    assert words in stopped["said"][1]
    assert stopped["unchanged"]
    assert stopped["steps"] == 0


def test_the_reference_follows(found: dict) -> None:
    moving = found["moving"]
    first, second = moving["first"]
    assert first["reference_step"] == 0
    assert second["kl_loss"] > 1e-7
    assert moving["followed"]
    assert moving["third"]["reference_step"] == 2
    assert moving["third"]["kl_loss"] == pytest.approx(0, abs=1e-7)


def test_the_coefficient_adapts(found: dict) -> None:
    first, second = found["moving"]["first"]
    assert first["kl_coef"] == 0.1
    assert second["kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 12 / 100))


def test_the_coefficient_follows_the_kl_per_token_whatever_a_token_counts(found: dict) -> None:
    (first, second), target = found["adapting"], 1.0
    assert first["kl"] < target < first["kl_loss"]
    assert second["kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 12 / 100))


def test_companions_survive_a_death(found: dict) -> None:
    moving = found["moving"]
    assert moving["resumed"] == moving["uninterrupted"]
    theirs, ours = moving["weights"]
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_another_run_begins_with_companions_of_its_own(found: dict) -> None:
    assert found["moving"]["new_run"] == (0.1, 0)
