"""A run file as data, with the line of every key, so that a mistake can be pointed at.

Knows YAML and the names of keys; values are judged elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from services.common.run_spec import GROUPS
from services.common.settings import SettingsError, read_yaml
from services.console.core.keys import all_keys, group_keys, top_keys
from services.console.core.refused import ROUTER_OWNED, SGLANG_OWNED, refusal
from services.console.core.suggest import nearest


@dataclass(frozen=True)
class RunFile:
    """`lines["group.key"]` is a line number from 1."""

    path: str
    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def where(self, key_path: str) -> str:
        """file:line of a key, or the file."""
        line = self.lines.get(key_path)
        return f"{self.path}:{line}" if line else self.path


def read_run_file(path: str) -> RunFile:
    """Reads a run file and checks the names of its keys. Raises SettingsError with file and line."""
    data = read_yaml(path)
    file = RunFile(path, data, _lines(path))
    for name, value in data.items():
        if name == "services":
            _check_group(file, name, value, group_keys("services"))
        elif name in GROUPS:
            _check_group(file, name, value, group_keys(name))
        elif name not in top_keys():
            raise SettingsError(f"{file.where(str(name))}: {_wrong_top(str(name))}")
    # An empty group ("data:" and nothing below) is the same as no group.
    return RunFile(path, {name: value for name, value in data.items() if value is not None}, file.lines)


def _check_group(file: RunFile, group: str, value: Any, known: tuple[str, ...]) -> None:
    if value is None:
        return
    if not isinstance(value, dict):
        raise SettingsError(f"{file.where(group)}: {group} is {value!r}: write its keys indented below '{group}:'.")
    for name in value:
        if name not in known:
            raise SettingsError(f"{file.where(f'{group}.{name}')}: {_wrong_key(group, str(name), known)}")
    for target, owned in (("sglang", SGLANG_OWNED), ("sglang_router", ROUTER_OWNED)):
        options = value.get(target) if group == "rollout" else None
        for name in options if isinstance(options, dict) else ():
            key = str(name).lstrip("-").replace("-", "_")
            if key in owned:
                where = file.where(f"rollout.{target}.{name}")
                raise SettingsError(f"{where}: rollout.{target}.{name} does not apply: {owned[key]}.")


def _wrong_top(name: str) -> str:
    keys = all_keys()
    if name in keys:
        return f"{name} belongs to the group {keys[name].group!r}; move it below '{keys[name].group}:'."
    if reason := refusal(name):
        return f"{name} does not apply: {reason}."
    close = nearest(name, [*top_keys(), *keys])
    if not close:
        return f"unknown key {name!r}; the keys at the top are {', '.join(top_keys())}."
    group = keys[close].group if close in keys else ""
    return f"unknown key {name!r}; did you mean {close!r}" + (f" of the group {group!r}?" if group else "?")


def _wrong_key(group: str, name: str, known: tuple[str, ...]) -> str:
    keys = all_keys()
    if name in top_keys():
        return f"{name} belongs to the top of the file, not to the group {group!r}; move it there."
    if name in keys:
        return f"{name} belongs to the group {keys[name].group!r}, not {group!r}; move it below '{keys[name].group}:'."
    if reason := refusal(name):
        return f"{name} does not apply: {reason}."
    if close := nearest(name, known):
        return f"unknown key {group}.{name}; did you mean {close!r}?"
    if close := nearest(name, keys):
        return f"unknown key {group}.{name}; did you mean {close!r} of the group {keys[close].group!r}?"
    return f"unknown key {group}.{name}; every key is listed in docs/flags.md."


def _lines(path: str) -> dict[str, int]:
    """Line of every key of the file by dotted path. Raises SettingsError for a key given twice."""
    found: dict[str, int] = {}

    def visit(node: yaml.Node | None, prefix: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            name, line = prefix + str(key.value), key.start_mark.line + 1
            if name in found:
                raise SettingsError(f"{path}:{line}: {name} is given twice, first on line {found[name]}; keep one.")
            found[name] = line
            visit(value, name + ".")

    visit(yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader), "")
    return found
