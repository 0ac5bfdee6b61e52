"""Settings and error reasons are part of the contract with users: they change on purpose only."""

from __future__ import annotations

import re

import pytest

from .freeze import ERRORS, FROZEN_SETTINGS, SCHEMAS, errors_text, reasons, schema_text, settings_model
from .tree import python_files

REMEDY = "if the change is meant, run `python -m tests.house.freeze` and commit what it writes"


@pytest.mark.parametrize("name", FROZEN_SETTINGS)
def test_settings(name):
    assert schema_text(settings_model(name)) == (SCHEMAS / f"{name}.json").read_text(), REMEDY


def rows(page: str) -> list[tuple[str, ...]]:
    """Headings, and reason and status of every row; how a sentence is worded may change freely."""
    lines = [line for line in page.splitlines() if line.startswith(("##", "| `"))]
    return list(dict.fromkeys(tuple(line.split("|")[:3]) for line in lines))


def test_error_reasons():
    assert rows(errors_text()) == rows(ERRORS.read_text(encoding="utf-8")), REMEDY


def test_error_reasons_have_the_form_of_one():
    for file in python_files("services"):
        for reason, _, sentence in reasons(file):
            assert re.fullmatch(r"[A-Z][A-Z0-9_]{2,62}", reason), f"{file}: {reason}"
            assert sentence.endswith((".", "}", "?")), f"{file}: {reason} is no sentence: {sentence!r}"


@pytest.mark.parametrize("name", FROZEN_SETTINGS)
def test_every_setting_is_explained(name):
    schema = settings_model(name).model_json_schema()
    models = {"": schema, **schema.get("$defs", {})}
    silent = [
        f"{model}.{key}"
        for model, content in models.items()
        for key, value in content.get("properties", {}).items()
        if not value.get("description")
    ]
    assert not silent
