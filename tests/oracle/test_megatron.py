"""The trainer's numbers against transformers', and two ranks against one.

One process world of one rank and one of two run `rank_program`; the tests compare what they left behind. All float32.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.oracle.models import NAMES, write_models
from tests.support.rank_processes import run_ranks

LOGIT_TOLERANCE = 1e-4
"""Largest absolute difference of logits of a scale of about 5; measured 4e-6."""
LAYOUT_TOLERANCE = 1e-5
"""Largest relative difference of losses and gradient norms between layouts; measured 7e-6."""
TRAININGS = ("kl", "per_token", "sft")
_DEADLINE_SECONDS = 240


def _run(program: str, world_size: int, root: Path) -> dict:
    run_ranks("tests.oracle.rank_program", program, world=world_size, root=root, seconds=_DEADLINE_SECONDS)
    return torch.load(root / f"{program}.pt", weights_only=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("oracle")
    write_models(path)
    return path


@pytest.fixture(scope="module")
def single(root: Path) -> dict:
    """Results of a world of one rank."""
    return _run("single", 1, root)


@pytest.fixture(scope="module")
def pair(root: Path, single: dict) -> dict:
    """Results of a world of two ranks, which also loads the first world's checkpoint."""
    assert single
    return _run("pair", 2, root)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_packed_logits_equal_transformers(single: dict, name: str) -> None:
    expected, _ = single["hf"][name]
    assert (single["logits"][name] - expected).abs().max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_norm_equal_transformers_autograd(single: dict, name: str) -> None:
    _, expected = single["hf"][name]
    ours = {key: single["ours"][name][key] for key in expected}
    assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel_logits_equal_transformers(single: dict, pair: dict, name: str) -> None:
    expected, _ = single["hf"][name]
    assert (pair["logits"][name] - expected).abs().max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("export", ["export", "export2"])
def test_export_returns_the_checkpoint_bit_for_bit(root: Path, pair: dict, name: str, export: str) -> None:
    assert pair
    expected, got = (load_file(root / d / "model.safetensors") for d in (name, f"{export}_{name}"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[key], got[key]) for key in expected)
    assert (root / f"{export}_{name}" / "tokenizer.json").exists()


@pytest.mark.parametrize("layout", ["data_parallel", "tensor_parallel"])
@pytest.mark.parametrize("training", TRAININGS)
def test_two_ranks_train_as_one(single: dict, pair: dict, layout: str, training: str) -> None:
    for ours, expected in zip(pair[layout][training], single["training"][training], strict=True):
        assert ours.keys() == expected.keys()
        for key in ("loss", "grad_norm"):
            assert ours[key] == pytest.approx(expected[key], rel=LAYOUT_TOLERANCE, abs=1e-7)
        for key in ("lr", "trained_tokens", "total_tokens", "optimizer_steps"):
            assert ours[key] == expected[key]
        assert ours == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("world", ["single", "pair"])
def test_log_probs_and_entropies_equal_a_plain_softmax(request: pytest.FixtureRequest, world: str) -> None:
    differences = request.getfixturevalue(world)["softmax"]
    assert differences["logits_changed"] == 0
    assert max(differences.values()) < 1e-5


def test_a_group_receives_the_staged_weights(root: Path, pair: dict) -> None:
    groups = pair["groups"]
    assert groups["received"] == groups["staged"]
    tensors = load_file(root / "qwen3" / "model.safetensors")
    for bucket, digest in zip(groups["plan"].buckets, groups["staged"], strict=True):
        content = b"".join(tensors[spec.name].numpy().tobytes() for spec in bucket)
        assert hashlib.sha256(content).hexdigest() == digest
    assert {spec.name for bucket in groups["plan"].buckets for spec in bucket} == tensors.keys()


def test_checksums_are_of_concatenated_bytes(root: Path, pair: dict) -> None:
    tensors = load_file(root / "qwen3" / "model.safetensors")
    for rule, parts in pair["groups"]["rules"].items():
        content = b"".join(tensors[name].numpy().tobytes() for name in parts.sources) + bytes(parts.padding_bytes)
        assert pair["groups"]["checksums"][rule] == hashlib.sha256(content).hexdigest()[:16]


def test_a_broken_group_costs_its_own_deadline_only(pair: dict) -> None:
    groups = pair["groups"]
    assert groups["errors"]["good"] is None
    assert groups["errors"]["broken"]
    assert "timeout" in groups["errors"]["absent"]
    assert groups["seconds"] < 12


def test_metrics_without_padding_are_counted_once(single: dict) -> None:
    metrics = single["training"]["kl"][0]
    assert 0 < metrics["trained_tokens"] < metrics["total_tokens"]


def test_one_optimizer_step_is_exactly_on_policy(single: dict) -> None:
    for metrics in single["training"]["kl"]:
        assert metrics["ppo_kl"] == 0
        assert metrics["pg_clipfrac"] == 0
        assert metrics["ratio_max"] == 1


def test_later_optimizer_steps_compare_with_the_policy_before_the_first(single: dict) -> None:
    assert all(metrics["ppo_kl"] != 0 for metrics in single["training"]["per_token"])


def test_reference_is_the_first_policy(single: dict) -> None:
    kl = [metrics["kl_loss"] for metrics in single["training"]["kl"]]
    assert kl[0] == 0
    assert 0 < kl[1] < kl[2]


def test_resumed_training_equals_uninterrupted(single: dict) -> None:
    resume = single["resume"]
    assert resume["counters"] == (2, 2)
    assert resume["resumed"] == resume["uninterrupted"]
    kept, loaded = resume["weights"]
    assert all(torch.equal(kept[key], loaded[key]) for key in kept)


def test_checkpoint_before_the_first_step_restores_everything(single: dict) -> None:
    first, again = single["from_empty"]
    assert again == first


def test_half_precision_trains_like_full_precision(single: dict) -> None:
    for half, full in zip(single["half"]["first"], single["training"]["kl"], strict=False):
        assert half["pg_loss"] == pytest.approx(full["pg_loss"], rel=0.05, abs=0.02)
        assert half["entropy"] == pytest.approx(full["entropy"], rel=0.05)


def test_half_precision_keeps_full_precision_parameters(single: dict) -> None:
    half = single["half"]
    assert half["types"] == {(torch.float32, torch.bfloat16)}
    assert half["rounded"]
    assert half["fine"]


def test_half_precision_resumes_exactly(single: dict) -> None:
    half = single["half"]
    assert half["resumed"] == half["uninterrupted"]
    kept, loaded = half["weights"]
    assert all(torch.equal(kept[key], loaded[key]) for key in kept)


@pytest.mark.parametrize("world", ["single", "pair"])
def test_percentile_is_of_all_ranks_values(request: pytest.FixtureRequest, world: str) -> None:
    assert request.getfixturevalue(world)["percentiles"] == (989, 499, 0)


@pytest.mark.parametrize("training", ["kl", "per_token"])
def test_distance_to_the_engine_is_told_at_every_step(single: dict, training: str) -> None:
    for metrics in single["training"][training]:
        mean, high, largest = (metrics[f"log_prob_abs_diff_{name}"] for name in ("mean", "p99", "max"))
        assert abs(metrics["log_prob_diff_mean"]) <= mean < high <= largest


def test_norms_are_exempt_from_weight_decay(single: dict) -> None:
    assert single["decays"] == {(True, 0.0), (False, 0.1)}


def test_another_runs_checkpoint_brings_no_schedule_and_no_settings(single: dict) -> None:
    rate, groups = single["new_run"]
    assert rate == pytest.approx(1e-2 / 4)
    assert set(groups) == {(0.5, (0.9, 0.99))}


def test_checkpoint_of_one_rank_continues_on_two(single: dict, pair: dict) -> None:
    for ours, expected in zip(pair["resharded"], single["resume"]["uninterrupted"], strict=True):
        for key in ("loss", "grad_norm"):
            assert ours[key] == pytest.approx(expected[key], rel=LAYOUT_TOLERANCE)


def test_first_save_starts_no_process(single: dict) -> None:
    assert single["save_seconds"] < 3
