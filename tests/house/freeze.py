"""Writes what is frozen: `python -m tests.house.freeze`.

Frozen are the settings of a run and of every service (JSON schemas in tests/house/schemas) and the table of error
reasons (docs/errors.md). A test compares them, so that a change of what users type or match on is seen in review.
"""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from services.common.run_spec import RunSpec
from services.common.settings import ServiceSettings

from .tree import ROOT, TIERS

SCHEMAS = ROOT / "tests" / "house" / "schemas"
ERRORS = ROOT / "docs" / "errors.md"
_HEADER = """# Error reasons

Every failure of a call carries a status code, one of these reasons (`google.rpc.ErrorInfo`) and one sentence. Names in
braces are filled in and stand in the error's metadata. Made by `python -m tests.house.freeze`.
"""


FROZEN_SETTINGS = ("run_spec", *TIERS)


def settings_model(name: str) -> type[BaseModel]:
    """Frozen model by the name of its file."""
    if name == "run_spec":
        return RunSpec
    module = importlib.import_module(f"services.{name}.config")
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ServiceSettings) and value.__module__ == module.__name__
    )


def schema_text(model: type[BaseModel]) -> str:
    """JSON schema of a model."""
    return json.dumps(model.model_json_schema(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _sentence(node: ast.expr) -> str:
    """Text of a string or an f-string with names in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else _sentence(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return _sentence(node.left) + _sentence(node.right)
    return f"{{{ast.unparse(node)}}}"


def reasons(file: Path) -> Iterator[tuple[str, str, str]]:
    """Reason, status code and sentence of every ServiceError that a file raises by literal name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ServiceError" and len(node.args) >= 3:
            code, reason, message = node.args[:3]
            if isinstance(reason, ast.Constant) and isinstance(code, ast.Attribute):
                yield reason.value, code.attr, " ".join(_sentence(message).split())


def errors_text() -> str:
    """The page of error reasons."""
    parts = [_HEADER]
    for folder in ("common", *TIERS):
        rows = {row for file in (ROOT / "services" / folder).rglob("*.py") for row in reasons(file)}
        parts.append(f"\n## {folder}\n\n| reason | status | sentence |\n|---|---|---|\n")
        parts += [f"| `{reason}` | {code} | {text.replace('|', '¦')} |\n" for reason, code, text in sorted(rows)]
    return "".join(parts)


def frozen() -> dict[Path, str]:
    """Frozen files and what they should hold."""
    files = {SCHEMAS / f"{name}.json": schema_text(settings_model(name)) for name in FROZEN_SETTINGS}
    return {**files, ERRORS: errors_text()}


def main() -> None:
    """Writes them all."""
    for path, text in frozen().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
