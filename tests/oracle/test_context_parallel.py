"""Two ranks that share packs compute what one computes, and whatever is written of them is written once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.oracle.context_program import SEGMENTS, WORLD
from tests.oracle.models import write_models
from tests.support.rank_processes import run_ranks

_DEADLINE_SECONDS = 240


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("context")
    write_models(path)
    return path


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict]:
    """What each rank found."""
    run_ranks("tests.oracle.context_program", world=WORLD, root=root, seconds=_DEADLINE_SECONDS)
    return torch.load(root / "context.pt", weights_only=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("segments", SEGMENTS)
def test_attention_of_a_cut_pack_is_that_of_the_whole(ranks: list[dict], segments: str) -> None:
    for rank in ranks:
        assert rank["attention"][segments] == pytest.approx(
            dict.fromkeys(("output", "query", "key", "value"), 0.0), abs=2e-6
        )


def test_rows_come_together_in_order_and_their_gradients_go_back(ranks: list[dict]) -> None:
    assert all(rank["rows"] for rank in ranks)


def test_weights_are_staged_by_one_rank_only(ranks: list[dict]) -> None:
    assert [rank["staged"] for rank in ranks] == [True, False]


def test_export_is_the_checkpoint_bit_for_bit(root: Path, ranks: list[dict]) -> None:
    assert ranks
    expected, got = (load_file(root / name / "model.safetensors") for name in ("qwen3", "exported"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[key], got[key]) for key in expected)


def test_metrics_are_equal_on_all_ranks(ranks: list[dict]) -> None:
    first, second = (rank["uninterrupted"] for rank in ranks)
    assert first == second


def test_a_data_parallel_run_continues_a_context_parallel_checkpoint(ranks: list[dict]) -> None:
    for ours, expected in zip(ranks[0]["data_parallel"], ranks[0]["uninterrupted"], strict=True):
        for key in ("loss", "grad_norm", "trained_tokens", "total_tokens"):
            assert ours[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-7)
