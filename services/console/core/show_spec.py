"""The resolved form of a run: complete for the file, compact for the screen."""

from __future__ import annotations

import os
from typing import Any

import yaml

from services.common.run_spec import RunSpec

_GROUPS = ("data", "rollout", "reward", "trainer")


def to_yaml(spec: RunSpec) -> str:
    """Every key with its value, as a run file that gives the same run again."""
    data = spec.model_dump(mode="json")
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


def changed(spec: RunSpec) -> dict[str, dict[str, Any]]:
    """Keys by group whose value is not the default."""
    found = {}
    for group in _GROUPS:
        section = getattr(spec, group)
        fields = type(section).model_fields
        values = {
            name: value
            for name, value in section.model_dump(mode="json").items()
            if fields[name].is_required() or value != _plain(fields[name].get_default(call_default_factory=True))
        }
        if values:
            found[group] = values
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def compact(spec: RunSpec) -> list[tuple[str, str]]:
    """(group, "key value · key value") for the screen; paths are shown relative to where the user is."""
    return [
        (group, " · ".join(f"{name} {_short(value)}" for name, value in values.items()))
        for group, values in changed(spec).items()
    ]


def _short(value: Any) -> str:
    if isinstance(value, str) and value.startswith("/"):
        relative = os.path.relpath(value)
        return relative if len(relative) < len(value) else value
    if isinstance(value, list):
        return " ".join(_short(item) for item in value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
