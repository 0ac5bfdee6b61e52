# ruff: noqa: E501 (sentences stand as they are read)
"""Mixtures and parquet files on the command line: what is accepted, and one exact sentence for what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.common.settings import SettingsError
from services.console.core.flags import parse_flags
from services.console.core.resolve import resolve
from services.console.core.show_spec import to_yaml
from services.console.core.validate import validate
from tests.unit.console.conftest import write_rows


@pytest.fixture
def folder(run_folder: Path, edit) -> Path:
    """A run folder whose run has a mixture of two sets."""
    write_rows(run_folder / "hard.jsonl", [{"question": "1", "answer": "2"}])
    text = (run_folder / "run.yaml").read_text()
    line = next(line for line in text.splitlines() if "prompt_data: " in line and "eval" not in line)
    edit(
        line,
        "  prompt_data_mixture:\n"
        "    - {name: easy, path: train.jsonl, weight: 3}\n"
        "    - {name: hard, path: hard.jsonl, input_key: question, label_key: answer, rm_type: math, max_response_len: 9}",
    )
    return run_folder


def sentence(*flags: str) -> str:
    with pytest.raises(SettingsError) as caught:
        validate(resolve(parse_flags(["run.yaml", *flags])))
    return str(caught.value)


def test_a_mixture_is_resolved_with_absolute_paths_and_stored_as_it_is(folder):
    spec = resolve(parse_flags(["run.yaml"]))
    validate(spec)
    easy, hard = spec.data.prompt_data_mixture
    assert (easy.name, easy.path, easy.weight) == ("easy", str(folder / "train.jsonl"), 3.0)
    assert (hard.input_key, hard.rm_type, hard.max_response_len, hard.top_p) == ("question", "math", 9, None)
    (folder / "again.yaml").write_text(to_yaml(spec))
    assert resolve(parse_flags(["again.yaml"])) == spec


def test_a_set_can_be_added_by_flag(run_folder, edit):
    text = (run_folder / "run.yaml").read_text()
    edit(next(line for line in text.splitlines() if "prompt_data: " in line and "eval" not in line), "")
    one = {"name": "a", "path": "train.jsonl"}
    spec = resolve(
        parse_flags(["run.yaml", "--prompt-data-mixture", json.dumps(one), "{name: b, path: train.jsonl, weight: .5}"])
    )
    validate(spec)
    assert [(part.name, part.weight) for part in spec.data.prompt_data_mixture] == [("a", 1.0), ("b", 0.5)]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("weight: 3", "wieght: 3", "prompt_data_mixture, data set 1: unknown key 'wieght'; did you mean 'weight'?"),
        ("weight: 3", "weight: 0", "prompt_data_mixture, data set 1: weight is 0: input should be greater than 0."),
        ("name: hard, ", "", "prompt_data_mixture, data set 2: it has no name; set it."),
        ("name: hard", "name: easy", "prompt_data_mixture has two data sets called 'easy'; give each its own name."),
        ("rm_type: math", "rm_type: maths", "data set 2: rm_type is 'maths': not a grader; use one of exact_match, math, custom."),
        ("rm_type: math", "rm_type: custom", "data set hard of prompt_data_mixture has rm_type custom; set custom_rm_path"),
        ("label_key: answer", "label_key: reply", "hard.jsonl:1: no field 'reply', which label_key names; the fields of this row are 'question', 'answer'."),
        ("path: hard.jsonl", "path: harder.jsonl", "harder.jsonl does not exist; give the path of a JSONL file, one object a line, or of parquet."),
    ],
)  # fmt: skip
def test_mistakes_in_a_mixture(folder, edit, old, new, words):
    edit(old, new)
    assert words in sentence()


def test_one_source_of_prompts_and_curricula_only_for_mixtures(folder):
    assert "prompt_data and prompt_data_mixture are both set; a run has one of them" in sentence(
        "--prompt-data", "x.jsonl"
    )
    assert "curriculum_path 'os.path.nothing'" in sentence("--curriculum-path", "os.path.nothing")


def test_a_parquet_file_must_have_the_columns(run_folder, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["1"], "label": ["2"]}), run_folder / "p.parquet")
    assert sentence("--prompt-data", "p.parquet").endswith(
        "p.parquet: no column 'input', which input_key names; its columns are 'text', 'label'. Set input_key or correct the file."
    )
    validate(
        resolve(
            parse_flags(["run.yaml", "--prompt-data", "p.parquet", "--input-key", "text", "--eval-input-key", "input"])
        )
    )
    (run_folder / "q.parquet").write_text("no")
    assert "q.parquet is no parquet file that can be read" in sentence("--prompt-data", "q.parquet")
