"""Size budget: 400 lines a file, 60 a function, 7 arguments; what a tier's folder must hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from .tree import ROOT, TIERS, name_of, python_files

FILE_LINES, FUNCTION_LINES, ARGUMENTS, MAIN_LINES = 400, 60, 7, 40
EXCEPTIONS: dict[str, str] = {}
"""File, or file:function, → why it may be larger. The only place for exceptions."""

FOLDERS = ("services", "tests", "examples")


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, node
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, prefix)


def argument_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Arguments that a caller gives."""
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def oversized() -> dict[str, str]:
    """What is over the budget, and by how much."""
    found = {}
    for path in python_files(*FOLDERS):
        text = path.read_text()
        lines = text.count("\n")
        if lines > FILE_LINES:
            found[name_of(path)] = f"{lines} lines"
        for name, node in functions(ast.parse(text)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found[f"{name_of(path)}:{name}"] = f"{length} lines"
            elif argument_count(node) > ARGUMENTS:
                found[f"{name_of(path)}:{name}"] = f"{argument_count(node)} arguments"
    return found


def test_files_and_functions_stay_small():
    found = oversized()
    over = {name: size for name, size in found.items() if name not in EXCEPTIONS}
    assert not over, "split it, or give a reason in EXCEPTIONS"
    assert not set(EXCEPTIONS) - set(found), "these exceptions are not needed any more"


@pytest.mark.parametrize("tier", TIERS)
def test_every_tier_has_the_same_files(tier):
    folder = ROOT / "services" / tier
    names = ("__main__.py", "config.py", "app.py", "servicer.py", "convert.py", "core", "adapters", "README.md")
    assert not [name for name in names if not (folder / name).exists()]
    assert (folder / "__main__.py").read_text().count("\n") <= MAIN_LINES


def test_every_module_says_what_it_is():
    modules = {f: f.read_text() for f in python_files("services", "examples")}
    assert not [name_of(f) for f, text in modules.items() if text.strip() and not ast.get_docstring(ast.parse(text))]
