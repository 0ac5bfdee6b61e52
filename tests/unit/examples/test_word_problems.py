"""The word problems, their run files, and the way from llama.cpp's tensors to Hugging Face's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from examples.word_problems.evaluate import last_number
from examples.word_problems.make_checkpoint import halves, hf_name
from examples.word_problems.task import EXAMPLES, SIZES, make_rows, write_task
from services.console.adapters.engine_arguments import check_engine_arguments
from services.console.core.flags import parse_flags
from services.console.core.placement import Placement, check_fit
from services.console.core.resolve import resolve
from services.console.core.validate import validate
from services.reward.core.exact_match import parse_options, score_exact_match
from services.reward.core.records import Item
from tests.support.engine import write_checkpoint

CONFIGS = Path(__file__).resolve().parents[3] / "deploy" / "config"


def question(row: dict) -> str:
    return row["prompt"][-1]["content"]


def calculation(row: dict) -> tuple:
    return row["kind"], tuple(re.findall(r"\d+", question(row)))


def test_files_are_made_from_the_seed_alone_and_share_no_calculation():
    rows = make_rows(3)
    assert rows == make_rows(3)
    assert rows != make_rows(4)
    assert {name: len(files) for name, files in rows.items()} == SIZES
    assert not {calculation(row) for row in rows["train"]} & {calculation(row) for row in rows["heldout"]}
    assert len({question(row) for row in rows["heldout"]}) == SIZES["heldout"]
    assert {row["kind"] for row in rows["train"]} == {row["kind"] for row in rows["heldout"]}


def test_labels_are_what_a_right_answer_ends_with():
    solve = {
        "more": lambda a, b: a + b,
        "fewer": lambda a, b: a - b,
        "packs": lambda each, boxes: each * boxes,
        "packs less some": lambda boxes, each, given: boxes * each - given,
        "together": lambda a, b: a + a + b,
    }
    for row in make_rows(1)["heldout"]:
        kind, numbers = calculation(row)
        assert solve[kind](*map(int, numbers)) == int(row["label"])
        assert int(row["label"]) > 0
        assert row["prompt"][:-1] == EXAMPLES


@pytest.mark.parametrize(
    ("answer", "label", "reward"),
    [("7 + 5 = 12", "12", 1.0), ("2 * 6 = 12. 12 - 5 = 7 pens.", "7", 1.0), ("15-6", "9", 0.0), ("no idea", "3", 0.0)],
)
def test_the_last_number_of_an_answer_counts(answer, label, reward):
    options = parse_options({"extract": "last_number"})
    assert score_exact_match(Item("i", "", answer, label), options).reward == reward
    assert (last_number(answer) == label) == bool(reward)


@pytest.mark.parametrize(("name", "trainer", "rollout"), [("smollm2_grpo", 1, 1), ("smollm2_grpo_8gpu", 4, 4)])
def test_run_files_are_valid(tmp_path, monkeypatch, name, trainer, rollout):
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "data" / "word_problems", 1)
    write_checkpoint(tmp_path / "models" / "smollm2")
    spec = resolve(parse_flags([str(CONFIGS / f"{name}.yaml"), "--device", "cpu"]))
    validate(spec)
    check_engine_arguments(spec.rollout)
    gpus = tuple(str(gpu) for gpu in range(trainer + rollout))
    check_fit(spec, Placement(gpus[:trainer], gpus[trainer:]))
    assert spec.rollout.num_rollout * spec.rollout.rollout_batch_size <= SIZES["train"]  # one epoch


def test_rows_of_a_head_are_put_into_halves():
    heads, dim = 2, 6
    expected = torch.arange(heads * dim)[:, None] * torch.ones(1, 3, dtype=torch.long)
    # llama.cpp holds the rows of a head as 0, 3, 1, 4, 2, 5: row i beside row i + dim/2.
    order = [head * dim + i + half * dim // 2 for head in range(heads) for i in range(dim // 2) for half in (0, 1)]
    assert torch.equal(halves(expected[order], heads), expected)


def test_names_of_tensors():
    assert hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(SystemExit, match=r"rope_freqs\.weight"):
        hf_name("rope_freqs.weight")


def test_rows_on_disk(tmp_path):
    write_task(tmp_path, 1)
    first = json.loads((tmp_path / "train.jsonl").open().readline())
    assert [message["role"] for message in first["prompt"]] == ["user", "assistant"] * 3 + ["user"]
