"""What the keys of a run look like on a command line: group, kind and spelling of every one.

Derived from the model of a run alone; nothing is listed twice.

Invariants: a key is a flag of the same name with dashes; `--no-<key>` exists exactly for booleans.
"""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from services.common.run_spec import GROUPS, RunSpec, ServiceAddresses

SGLANG, ROUTER = "sglang_", "sglang_router_"
"""Prefixes of pass-through keys."""


@dataclass(frozen=True)
class Key:
    """One key. `kind`: bool, int, float, str, choice, list or map; `item`: kind of a list's items."""

    name: str
    group: str
    kind: str
    default: Any
    required: bool
    help: str
    choices: tuple[str, ...] = ()
    item: str = ""

    @property
    def flag(self) -> str:
        """As in --rollout-batch-size."""
        return flag_of(self.name)

    @property
    def path(self) -> str:
        """As in rollout.rollout_batch_size."""
        return f"{self.group}.{self.name}" if self.group else self.name


def flag_of(name: str) -> str:
    """Flag of a key."""
    return "--" + name.replace("_", "-")


_SCALARS = {bool: "bool", int: "int", float: "float", str: "str"}


def _kind(annotation: Any) -> tuple[str, tuple[str, ...], str]:
    """Kind, choices and item kind of a type annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        rest = [argument for argument in arguments if argument is not type(None)]
        return _kind(rest[0])
    if origin is Literal:
        return "choice", tuple(str(argument) for argument in arguments), ""
    if origin is tuple:
        return "list", (), _SCALARS.get(arguments[0], "map")
    if origin is dict:
        return "map", (), ""
    return _SCALARS[annotation], (), ""


@cache
def all_keys() -> dict[str, Key]:
    """Every key that is a flag, by name, in the order of the model."""
    groups = {"": RunSpec, **GROUPS}
    found: dict[str, Key] = {}
    for group, model in groups.items():
        for name, info in model.model_fields.items():
            if not group and name not in ("run_id", "run_dir"):
                continue
            kind, choices, item = _kind(info.annotation)
            required = info.is_required()
            default = None if required else info.get_default(call_default_factory=True)
            text = " ".join((info.description or "").split())
            found[name] = Key(name, group, kind, default, required, text, choices, item)
    return found


def top_keys() -> tuple[str, ...]:
    """Keys at the top of a run file."""
    return tuple(RunSpec.model_fields)


def group_keys(group: str) -> tuple[str, ...]:
    """Keys of one group of a run file."""
    model = ServiceAddresses if group == "services" else GROUPS[group]
    return tuple(model.model_fields)
