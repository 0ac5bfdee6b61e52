"""Names of the arguments of SGLang and its router, read from their sources where they are installed.

Nothing of them is imported. What cannot be read, or is not installed here, is not judged: the rollout node's own
start then tells. Only misspellings (a known name is close) are refused, so that an argument which a release declares
in another way still passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from services.common.run_spec import RolloutSettings
from services.common.settings import SettingsError
from services.console.core.suggest import nearest

_FIELD = re.compile(r"^ {4}([a-z]\w*)\s*:", re.MULTILINE)
_FLAG = re.compile(r"--([a-z][a-z0-9-]+)")


def check_engine_arguments(rollout: RolloutSettings) -> None:
    """Raises SettingsError for a misspelt argument under rollout.sglang or rollout.sglang_router."""
    if rollout.sglang and rollout.engine == "sglang":
        _check("sglang", rollout.sglang, ("sglang", "srt", ("server_args.py", "arg_groups/**/*.py")))
    if rollout.sglang_router:
        _check("sglang_router", rollout.sglang_router, ("sglang_router", "", ("router_args.py",)))


def _check(key: str, given: Iterable[str], source: tuple[str, str, tuple[str, ...]]) -> None:
    known = _names(*source)
    for name in given:
        spelt = name.lstrip("-").replace("-", "_")
        close = nearest(spelt, known) if known and spelt not in known else None
        if close:
            raise SettingsError(f"rollout.{key}.{name} is no argument of {source[0]}; did you mean {close!r}?")


def _names(package: str, folder: str, patterns: tuple[str, ...]) -> set[str]:
    """Fields and flags in the sources of an installed package; empty when there are none."""
    spec = PathFinder.find_spec(package)
    names: set[str] = set()
    for place in spec.submodule_search_locations or () if spec else ():
        for file in (file for pattern in patterns for file in (Path(place) / folder).glob(pattern)):
            text = file.read_text(encoding="utf-8", errors="replace")
            names.update(_FIELD.findall(text))
            names.update(flag.replace("-", "_") for flag in _FLAG.findall(text))
    return names
