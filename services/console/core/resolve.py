"""A run file and flags become one validated run.

Flags win over the file, the file over defaults. Knows where each value came from, so that a mistake names file
and line, or flag. Looks at no file but the run file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from services.common.run_spec import ADVANTAGE_ESTIMATORS, GRADERS, PromptSet, RunSpec
from services.common.settings import SettingsError
from services.console.core.flags import CommandLine
from services.console.core.keys import all_keys, flag_of
from services.console.core.run_file import RunFile, read_run_file
from services.console.core.suggest import nearest

_MIXTURE = "prompt_data_mixture"
_LOCAL_PATHS = (
    ("", "run_dir"),
    ("data", "prompt_data"),
    ("rollout", "hf_checkpoint"),
    ("rollout", "load_debug_rollout_data"),
    ("rollout", "save_debug_rollout_data"),
    ("trainer", "load"),
    ("trainer", "save"),
    ("trainer", "update_weight_disk_dir"),
    ("trainer", "update_weight_local_checkpoint_dir"),
    ("trainer", "ref_load"),
    ("trainer", "opd_teacher_load"),
)


def resolve(line: CommandLine) -> RunSpec:
    """The run that a command line describes, with absolute paths. Raises SettingsError with one sentence."""
    file = read_run_file(line.run_file) if line.run_file else RunFile("")
    data = copy.deepcopy(file.data)
    for group, values in line.values.items():
        target = data.setdefault(group, {}) if group else data
        for name, value in values.items():
            # Pass-through arguments on the command line add to those of the file.
            merge = name in ("sglang", "sglang_router") and isinstance(target.get(name), dict)
            target[name] = {**target[name], **value} if merge else value
    if "run_id" not in data and line.run_file:
        data["run_id"] = Path(line.run_file).stem
    try:
        return RunSpec.model_validate(_with_checkpoints(_absolute(data)))
    except ValidationError as error:
        raise SettingsError(_explain(error, file, line.sources)) from error


def _absolute(data: dict[str, Any]) -> dict[str, Any]:
    """The services do not share this process's working directory, so paths must not depend on it."""
    for group, name in _LOCAL_PATHS:
        section = data.get(group) if group else data
        if isinstance(section, dict) and isinstance(section.get(name), str):
            section[name] = _path(section[name])
    data.setdefault("run_dir", _path("runs"))
    section = data.get("data")
    pairs = section.get("eval_prompt_data") if isinstance(section, dict) else None
    if isinstance(pairs, list | tuple) and all(isinstance(part, str) for part in pairs):
        section["eval_prompt_data"] = [
            _path(part) if index % 2 or len(pairs) == 1 else part for index, part in enumerate(pairs)
        ]
    mixture = section.get(_MIXTURE) if isinstance(section, dict) else None
    if isinstance(mixture, list | tuple):
        section[_MIXTURE] = [
            {**part, "path": _path(part["path"])}
            if isinstance(part, dict) and isinstance(part.get("path"), str)
            else part
            for part in mixture
        ]
    return data


def _with_checkpoints(data: dict[str, Any]) -> dict[str, Any]:
    """A run that says nothing of checkpoints keeps them in its own directory, so that it can be resumed."""
    trainer = data.setdefault("trainer", {})
    if isinstance(trainer, dict) and "save" not in trainer:
        trainer["save"] = str(Path(str(data["run_dir"])) / str(data.get("run_id", "run")) / "checkpoints")
    return data


def _path(text: str) -> str:
    """A file name as an absolute path; what is no such path (a name on a model hub) stays and is refused later."""
    return str(Path(text).expanduser().absolute())


def _explain(error: ValidationError, file: RunFile, sources: Mapping[str, str]) -> str:
    """The first problem as one sentence naming where it is, key, value and remedy."""
    problems = error.errors()
    # A missing key is the least informative when something else is wrong as well.
    first = min(problems, key=lambda problem: problem["type"] == "missing")
    location = [part for part in first["loc"] if isinstance(part, str)]
    path = ".".join(location)
    if location[1:2] == [_MIXTURE] and len(location) > 2:
        return _about_mixture(first, file, sources)
    if first["type"] == "missing":
        return _missing(location, file)
    reason = first["msg"].removeprefix("Value error, ").rstrip(".")
    whole_group = isinstance(first["input"], dict) and all_keys().get(location[-1] if location else "") is None
    if whole_group:
        return _about_group(reason, path, file)
    start = f"{sources[path]} is" if path in sources else f"{file.where(path)}: {path} is"
    return _sentence(
        f"{start} {first['input']!r}: {reason[0].lower()}{reason[1:]}{_hint(location[-1], first['input'])}"
    )


def _sentence(text: str) -> str:
    return text if text.endswith("?") else text + "."


def _about_group(reason: str, path: str, file: RunFile) -> str:
    """A rule over several keys: the sentence names them itself."""
    if reason.startswith("rm_type ") and "not a grader" in reason:
        close = nearest(reason.split("'")[1], GRADERS)
        reason += f"; did you mean {close!r}?" if close else ""
    if not file.path:
        return _sentence(f"{reason[0].upper()}{reason[1:]}")
    return _sentence(f"{file.where(path)}: {reason}")


def _about_mixture(problem: Any, file: RunFile, sources: Mapping[str, str]) -> str:
    """A mistake inside a data set of a mixture, which is counted from 1."""
    group, mixture, index, name = problem["loc"][:4]
    start = sources.get(f"{group}.{mixture}") or f"{file.where(f'{group}.{mixture}')}: {mixture}"
    start += f", data set {index + 1}:"
    if problem["type"] == "missing":
        return f"{start} it has no {name}; set it."
    if problem["type"] == "extra_forbidden":
        close = nearest(name, list(PromptSet.model_fields))
        known = f"did you mean {close!r}?" if close else f"it may have {', '.join(PromptSet.model_fields)}."
        return f"{start} unknown key {name!r}; {known}"
    reason = problem["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{start} {name} is {problem['input']!r}: {reason[0].lower()}{reason[1:]}."


def _hint(name: str, value: Any) -> str:
    """The nearest value of a key with few values."""
    choices = all_keys()[name].choices if name in all_keys() else ()
    close = nearest(str(value), ADVANTAGE_ESTIMATORS if name == "advantage_estimator" else choices)
    return f"; did you mean {close!r}?" if close else ""


def _missing(location: list[str], file: RunFile) -> str:
    name = location[-1]
    if name not in all_keys():  # the whole group is missing
        needed = [key for key in all_keys().values() if key.group == name and key.required]
        names = ", ".join(key.path for key in needed)
        return f"{file.path + ': ' if file.path else ''}missing keys {names}; they have no default."
    where = f"{file.path}: " if file.path else ""
    return (
        f"{where}missing key {'.'.join(location)}; it has no default: set it in the run file or with {flag_of(name)}."
    )
