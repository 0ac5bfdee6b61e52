"""Steps of the trainer's algorithms on a GPU equal the CPU's: every metric of `tests.gpu.algorithm_program`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.algorithm_program import CASES, REPLAYS, STEPS
from tests.gpu.processes import run

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.timeout(310)
RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""On the CPU, weights that differ by 3e-7 of themselves change every metric but one by less than 0.35 of these."""
STEEP = {"mis_chi2_seq": 1e-3}
"""Both, of what is the exponential of twice a whole sample's sum: rounding grows with it, and 1 is taken off."""
OWN = {
    "ppo": {
        "value_loss",
        "explained_variance",
        "value_clipfrac",
        "value_mean",
        "return_mean",
        "critic_grad_norm",
        "kl",
    },
    "grpo": {"kl_loss", "kl"},
    "reinforce_plus_plus": {"kl"},
    "whitened": {"kl"},
    "tis": {"tis", "tis_ess"},
    "tis_normalized": {"tis"},
    "mis": {"tis", "rs_token_fraction", "rs_sequence_fraction", "rs_veto_fraction"},
    "opsm": {"opsm_fraction"},
    "decoupled": {"behave_weight", "behave_dropped_fraction"},
    "moving": {"kl_coef", "reference_step"},
    "kept_actor": {"kept_missing_fraction"},
    "distilled": {"opd_reverse_kl"},
    "distilled, top": {"opd_top_k_kl"},
}
"""Metrics that a case must have beside those of all."""


@pytest.fixture(scope="module")
def found(root: Path) -> dict[str, dict]:
    """Metrics by device."""
    return {name: run("algorithms", root, name, module="tests.gpu.algorithm_program") for name in ("cuda", "cpu")}


@pytest.mark.parametrize("case", ["ppo", *CASES, *REPLAYS])
def test_steps_equal_the_cpus(found: dict[str, dict], case: str) -> None:
    steps, expected = found["cuda"][case], found["cpu"][case]
    assert isinstance(steps, list), steps
    assert len(steps) == len(expected) == STEPS
    for ours, theirs in zip(steps, expected, strict=True):
        assert OWN.get(case, set()) | {"loss", "grad_norm", "entropy", "ppo_kl"} <= theirs.keys()
        assert ours.keys() == theirs.keys()
        wanted = {
            name: pytest.approx(number, rel=STEEP.get(name, RELATIVE), abs=STEEP.get(name, ABSOLUTE))
            for name, number in theirs.items()
        }
        assert {name: (n, theirs[name]) for name, n in ours.items() if n != wanted[name]} == {}
