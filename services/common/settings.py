"""Settings of a process: one strict model per service, filled from defaults < YAML file < environment < `--set`.

Every mistake ends the process with one sentence on stderr and exit code 2, before anything heavy is imported.
"""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class StrictModel(BaseModel):
    """A frozen model that refuses unknown keys. Attribute docstrings become help texts."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class ServiceSettings(StrictModel):
    """What every server process needs."""

    host: str = "127.0.0.1"
    """Address to bind. An address that other hosts can reach needs `allow_insecure_bind`."""
    port: int = Field(ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    advertise_host: str | None = None
    """Host name by which others reach this process; `host` when not set."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Prometheus port; 0 serves no metrics."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log_json: bool = False
    """One JSON object a line instead of text."""
    allow_insecure_bind: bool = False
    """Permit plaintext on an address that other hosts can reach."""
    drain_seconds: float = Field(default=5.0, ge=0)
    """Longest wait for calls in flight after SIGTERM."""


SettingsT = TypeVar("SettingsT", bound=StrictModel)


class SettingsError(ValueError):
    """A setting that cannot be used; the message is one sentence for the user."""


def suggest(name: str, known: list[str] | tuple[str, ...]) -> str:
    """' Did you mean X?' when a known name is close, else an empty string."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def explain(error: ValidationError, model: type[BaseModel], *, known: list[str] | None = None) -> str:
    """The first problem of a validation error as one sentence naming key, value and remedy."""
    # A misspelt key also shows as a missing one; the misspelling is what the user must see.
    first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        leaf = str(first["loc"][-1])
        return f"Unknown key {path!r}.{suggest(leaf, known or list(model.model_fields))}"
    if first["type"] == "missing":
        return f"Missing key {path!r}; it has no default."
    message = first["msg"].removeprefix("Value error, ")
    if not path:
        return message.rstrip(".") + "."
    return f"{path} is {first['input']!r}: {message[0].lower()}{message[1:]}."


def read_yaml(path: str | Path) -> dict:
    """A YAML mapping from a file. Raises SettingsError with file and line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"Cannot read {path}: {error.strerror or error}.") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise SettingsError(f"{where}: not valid YAML ({getattr(error, 'problem', error)}).") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise SettingsError(f"{path}: expected a mapping of keys, found {type(data).__name__}.")
    return data


def _assign(data: dict, key: str, text: str) -> None:
    """Sets a dotted key; the text is parsed as YAML so that numbers and lists work."""
    *groups, leaf = key.split(".")
    for group in groups:
        data = data.setdefault(group, {})
    data[leaf] = yaml.safe_load(text) if text else text


def build_settings(cls: type[SettingsT], argv: list[str], env_prefix: str) -> SettingsT:
    """Settings from arguments and environment. Raises SettingsError."""
    data: dict = {}
    overrides: list[tuple[str, str]] = []
    rest = list(argv)
    while rest:
        flag = rest.pop(0)
        if flag not in ("--config", "--set") or not rest:
            raise SettingsError(f"Unknown or incomplete argument {flag!r}; use --config FILE or --set key=value.")
        value = rest.pop(0)
        if flag == "--config":
            data |= read_yaml(value)
        elif "=" not in value:
            raise SettingsError(f"--set {value!r} has no '='; write --set key=value.")
        else:
            key, _, text = value.partition("=")
            overrides.append((key, text))
    known = list(cls.model_fields)
    for name, text in os.environ.items():
        if name.startswith(env_prefix):
            key = name.removeprefix(env_prefix).lower()
            if key not in known:
                raise SettingsError(f"Unknown environment setting {name}.{suggest(key, known)}")
            _assign(data, key, text)
    for key, text in overrides:
        _assign(data, key, text)
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise SettingsError(explain(error, cls)) from error


def help_text(cls: type[StrictModel], prog: str, env_prefix: str) -> str:
    """Usage and one line per key."""
    lines = [
        f"usage: {prog} [--config FILE] [--set key=value ...]",
        "",
        f"Keys (also as environment variables {env_prefix}<KEY>):",
    ]
    for name, info in cls.model_fields.items():
        default = "required" if info.is_required() else f"default {info.get_default(call_default_factory=True)!r}"
        lines.append(f"  {name} ({default})")
        if info.description:
            lines.append(f"      {' '.join(info.description.split())}")
    return "\n".join(lines)


def parse_settings(cls: type[SettingsT], argv: list[str] | None = None, *, prog: str, env_prefix: str) -> SettingsT:
    """Settings of a process, or its end: `--help` exits 0, a mistake prints one sentence and exits 2."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(help_text(cls, prog, env_prefix))
        raise SystemExit(0)
    try:
        return build_settings(cls, argv, env_prefix)
    except SettingsError as error:
        exit_with(f"{prog}: {error}")


def exit_with(message: str) -> NoReturn:
    """Prints one sentence on stderr and ends the process with exit code 2 (bad input)."""
    print(message, file=sys.stderr)
    raise SystemExit(2)
