"""Recipes: each is a valid run of the demo's task and model as it stands, is listed, and is measured."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.recipes import AFTER, RECIPES, figures_of, stamps
from benchmarks.run_book import Book, Result
from examples.first_run.__main__ import CONFIGS
from examples.first_run.task import write_task
from services.console.core.flags import parse_flags
from services.console.core.resolve import resolve
from services.console.core.validate import validate

FOLDER = CONFIGS / "recipes"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demo leaves behind, without trained weights."""
    from examples.first_run.model import make_config, make_tokenizer

    folder = tmp_path_factory.mktemp("demo")
    made = folder / "runs" / "first-run-1"
    write_task(made / "data", 1)
    make_config().save_pretrained(made / "model")
    make_tokenizer().save_pretrained(made / "model")
    (made / "model" / "model.safetensors").write_bytes(b"")
    for run in ("sft", "grpo"):
        shutil.copytree(made / "model", made / run / "hf")
    return folder


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_a_valid_run_of_the_demo(file, demo, monkeypatch):
    monkeypatch.chdir(demo)
    spec = resolve(parse_flags([str(file)]))
    validate(spec)
    assert spec.run_id == file.stem
    assert spec.rollout.device == "cpu"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_says_where_it_comes_from_and_is_listed(file):
    head = file.read_text().partition("\ndata:")[0]
    assert "(20" in head or file.stem == "sft", "name the paper and its year"
    assert f"[{file.stem}]({file.name})" in (FOLDER / "README.md").read_text()


def test_every_recipe_is_measured_and_has_a_bar():
    assert set(RECIPES) == {file.stem for file in FILES} == set(AFTER)


def test_results_are_kept_until_the_recipe_changes(tmp_path):
    book, stamp = Book(tmp_path / "results.jsonl"), stamps()["grpo"]
    first = Result("grpo", 1, stamp, failed="it fell over")
    second = Result("grpo", 1, stamp, "grpo-2", 60.0, [(0, 0.4), (40, 0.9)], {"reward_mean": [0.5, 0.9]})
    for result in (first, second, Result("dapo", 1, "of another file", failed="old")):
        book.write(result)
    found = book.read(stamps())
    assert list(found) == [("grpo", 1)]
    assert found["grpo", 1].run_id == "grpo-2"
    assert [figure.passed for figure in figures_of(found["grpo", 1])] == [True, True]
    assert not all(figure.passed for figure in figures_of(first))
