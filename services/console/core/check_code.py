"""Do the functions that a run names by import path exist? Looks at sources; imports nothing of the user's."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from services.common.run_spec import RunSpec
from services.common.settings import SettingsError
from services.console.core.suggest import nearest

BUILT_IN_FILTER = "check_reward_nonzero_std"


def check_code(spec: RunSpec) -> None:
    """Checks every key that names a function. Raises SettingsError."""
    sampling_filter = spec.rollout.dynamic_sampling_filter_path
    if sampling_filter and (sampling_filter == BUILT_IN_FILTER or sampling_filter.startswith("slime.")):
        sampling_filter = None  # by its name alone, or by slime's path of it
    paths = {
        "custom_generate_function_path": spec.rollout.custom_generate_function_path,
        "custom_rm_path": spec.reward.custom_rm_path,
        "curriculum_path": spec.data.curriculum_path,
        "dynamic_sampling_filter_path": sampling_filter,
        "buffer_filter_path": spec.data.buffer_filter_path,
        "stale_policy_path": spec.trainer.stale_policy_path,
        "custom_loss_function_path": spec.trainer.custom_loss_function_path,
        "custom_advantage_function_path": spec.trainer.custom_advantage_function_path,
        "custom_tis_function_path": spec.trainer.custom_tis_function_path,
    }
    for key, path in paths.items():
        if path:
            check_import_path(path, key, [str(Path.cwd()), *sys.path])


def check_import_path(path: str, key: str, search: Sequence[str]) -> None:
    """The function "package.module.function" (or "package.module:function") must exist. Raises SettingsError."""
    module, _, name = path.replace(":", ".").rpartition(".")
    if not module or not all(part.isidentifier() for part in [*module.split("."), name]):
        raise SettingsError(f"{key} {path!r} is no import path; write package.module.function.")
    spec, missing = _find(module, search)
    if spec is None:
        raise SettingsError(
            f"{key} {path!r}: there is no module {missing!r}; correct the path, or put its directory on PYTHONPATH."
        )
    names = _names(spec)
    if names is not None and name not in names:
        close = nearest(name, names)
        hint = f"did you mean {close!r}?" if close else "name a function that it defines."
        raise SettingsError(f"{key} {path!r}: {spec.origin} defines no {name!r}; {hint}")


def _find(module: str, search: Sequence[str]) -> tuple[ModuleSpec | None, str]:
    """Spec of a module, found without importing its parents, or None and the part that is missing."""
    places: Sequence[str] | None = search
    spec, parts = None, module.split(".")
    for depth, part in enumerate(parts, start=1):
        # By its last part: the places of a namespace package known by a dotted name ask for the imported parent.
        spec = PathFinder.find_spec(part, places) if places is not None else None
        if spec is None:
            return None, ".".join(parts[:depth])
        places = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
    return spec, ""


def _names(spec: ModuleSpec) -> set[str] | None:
    """Names at the top level of a module's source; None when they cannot be known without running it."""
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise SettingsError(f"{spec.origin}:{error.lineno}: not valid Python ({error.msg}); correct it.") from error
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return None if "*" in names or "__getattr__" in names else names
