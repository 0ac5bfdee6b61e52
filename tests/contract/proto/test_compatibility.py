"""The contract keeps its promises: style, released images, released bytes, and stubs that match the sources."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import json_format

from .conftest import PROTO, ROOT, tool
from .wire_fixtures import MAIN_MESSAGES, message_class

RELEASED = ROOT / "tests" / "contract" / "released"
FIXTURES = sorted(RELEASED.rglob("*.json"))


def buf(*arguments: str) -> str:
    """Output of buf; empty when it has nothing to say."""
    done = subprocess.run([tool("buf"), *arguments], cwd=PROTO, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_lint():
    assert buf("lint") == ""


def test_format():
    assert buf("format", "--diff") == ""


@pytest.mark.parametrize("image", sorted((PROTO / "released").glob("*.binpb")), ids=lambda path: path.stem)
def test_nothing_released_is_broken(image):
    assert buf("breaking", "--against", str(image)) == ""


def test_stubs_are_up_to_date(tmp_path):
    """`make proto` would change nothing."""
    sources = sorted(str(file.relative_to(PROTO)) for file in (PROTO / "tetrarch").rglob("*.proto"))
    outputs = [f"--{kind}_out={option}{tmp_path}" for kind, option in OUTPUTS]
    plugins = [f"--plugin={name}={tool(name)}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *plugins, *outputs, *sources]
    subprocess.run(command, cwd=PROTO, check=True, capture_output=True)
    made, committed = _files(tmp_path), _files(PROTO / "gen")
    assert made == committed, "run `make proto`"
    _, different, errors = filecmp.cmpfiles(tmp_path, PROTO / "gen", [str(name) for name in made], shallow=False)
    assert not different + errors, "run `make proto`"


OUTPUTS = (("python", ""), ("grpc_python", ""), ("mypy", "quiet:"), ("mypy_grpc", "quiet:"))


def _files(root: Path) -> list[Path]:
    return sorted(f.relative_to(root) for f in root.rglob("*_pb2*") if f.suffix in (".py", ".pyi"))


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_released_bytes_are_still_understood(path):
    cls = message_class(path.stem)
    from_json = json_format.Parse(path.read_text(), cls())
    from_bytes = cls.FromString(path.with_suffix(".binpb").read_bytes())
    assert from_bytes == from_json
    assert json_format.ParseDict(json_format.MessageToDict(from_bytes), cls()) == from_json
    # A field that nobody knows any more would pass unseen: only JSON refuses it by name.
    assert len(from_bytes.SerializeToString()) == path.with_suffix(".binpb").stat().st_size


def test_the_main_messages_are_released():
    assert {path.stem for path in FIXTURES} == set(MAIN_MESSAGES)
