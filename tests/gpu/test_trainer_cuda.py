"""The trainer's numbers on a GPU: against transformers, against its own CPU path, and across a checkpoint.

Every program runs in rank processes of its own (`tests.gpu.rank_program`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.processes import run
from tests.gpu.rank_program import HEADS, SMOOTH
from tests.oracle.softmax_cases import SIZES, TOLERANCE, differences

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.timeout(200)


def test_log_probs_in_bfloat16_are_as_near_to_float32_as_transformers_are(root: Path) -> None:
    """Rounding puts every bfloat16 implementation at some distance from float32: ours must not be farther."""
    found = run("log_probs", root)
    assert found["passes"].endswith("softmax_kernels")
    truth = found["float32"]
    ours, theirs = ((found[name] - truth).abs() for name in ("ours", "bfloat16"))
    print(f"|bf16 - fp32|: ours mean {ours.mean():.4f} p99 {ours.quantile(0.99):.4f}, transformers {theirs.mean():.4f}")
    assert ours.mean() <= 1.2 * theirs.mean()
    assert ours.quantile(0.99) <= 1.5 * theirs.quantile(0.99)
    assert ours.mean() <= 0.05
    assert (found["ours"] - found["chunks"]).abs().max() <= 2e-5


@pytest.mark.parametrize(("rows", "vocabulary"), [*SIZES, (1027, 49152)])
def test_the_softmax_kernels_equal_the_passes_in_torch(rows: int, vocabulary: int) -> None:
    """Of TOLERANCE: values absolutely, gradients by their row's largest."""
    found = differences("cuda", rows, vocabulary)
    assert found.keys() == TOLERANCE.keys()
    assert {name: value for name, value in found.items() if not value <= TOLERANCE[name]} == {}


@pytest.fixture(scope="module")
def attention(root: Path) -> dict:
    """Outputs and gradients of both ways."""
    return run("attention", root)


@pytest.fixture(scope="module")
def cut_attention(root: Path) -> dict:
    """Attention of cut packs and of whole ones."""
    return run("cut_attention", root)


@pytest.mark.parametrize("heads", HEADS)
def test_the_kernel_and_the_padded_way_agree(attention: dict, heads: str) -> None:
    """Output, then gradients of query, key and value: relative error in the 2-norm, bfloat16 having 8 bits."""
    for kernel, padded in zip(*attention[heads].values(), strict=True):
        assert (kernel - padded).norm() / padded.norm() <= 0.01


@pytest.mark.parametrize("heads", HEADS)
def test_two_ranks_parts_of_a_pack_are_the_whole(cut_attention: dict, heads: str) -> None:
    """Output, then gradients of query, key and value, in bfloat16."""
    for whole, cut in zip(*cut_attention[heads], strict=True):
        assert (cut - whole).norm() / whole.norm() <= 0.01


def test_a_step_equals_the_cpus(root: Path) -> None:
    gpu, cpu = run("step", root), run("step", root, "cpu")
    for name in ("qwen3", "llama31", "qwen2"):
        (metrics, weights), (expected, target) = gpu[name], cpu[name]
        for key in ("loss", "grad_norm", "entropy", "log_prob_abs_diff_mean", "log_prob_abs_diff_p99"):
            assert metrics[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6)
        assert weights.keys() == target.keys()
        worst = max((weights[key] - target[key]).abs().max().item() for key in target)
        assert worst <= 1e-3 * SMOOTH["lr"]
    for key in ("grad_norm", "entropy", "log_prob_abs_diff_mean"):
        assert gpu["bfloat16"][key] == pytest.approx(cpu["qwen3"][0][key], rel=0.05)
    assert gpu["bfloat16"]["ppo_kl_first"] == 0


def test_a_checkpoint_restores_every_bit(root: Path) -> None:
    found = run("checkpoint", root)
    saved, loaded = found["states"]
    assert found["counters"] == (1, 1)
    assert saved.keys() == loaded.keys()
    assert [key for key in saved if not torch.equal(saved[key], loaded[key])] == []
    assert {saved[key].dtype for key in saved if key.startswith(("main", "exp"))} == {torch.float32}
    kept, again = found["next"]  # the kernel's backward pass adds in no fixed order
    assert again == pytest.approx(kept, rel=1e-2, abs=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one(root: Path) -> None:
    expected = run("lone", root)["lone"]
    for ours in run("parallel", root, world=2).values():
        for metrics, alone in zip(ours, expected, strict=True):
            for key in ("loss", "grad_norm", "log_prob_abs_diff_p99"):
                assert metrics[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-6)
