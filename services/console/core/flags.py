"""The command line of `train`: a run file and any key of a run as a flag.

Knows the spelling of flags, not whether values make sense: they come out typed as far as their spelling allows
and are validated together with the file.

Invariants: nothing is dropped silently; every token is a run file, a flag or a flag's value, or an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from services.common.settings import SettingsError
from services.console.core.keys import ROUTER, SGLANG, Key, all_keys, flag_of
from services.console.core.refused import ROUTER_OWNED, SGLANG_OWNED, refusal
from services.console.core.suggest import nearest


@dataclass
class CommandLine:
    """What was given. `values[group][key]`; `sources["group.key"]` is the flag as the user wrote it."""

    run_file: str | None = None
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


class _Tokens:
    """Reads tokens from left to right."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = list(tokens)
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._tokens)

    def next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def value(self) -> str | None:
        """The next token unless it is a flag or the input ends."""
        if not self or self._tokens[self._at].startswith("--"):
            return None
        return self.next()

    def optional(self) -> list[str]:
        """Values up to the next flag; a run file at that place stays a run file."""
        found = []
        while self and not self._tokens[self._at].startswith("--") and not is_run_file(self._tokens[self._at]):
            found.append(self.next())
        return found


def is_run_file(token: str) -> bool:
    """True for a name that ends as YAML files do."""
    return token.endswith((".yaml", ".yml"))


def parse_flags(tokens: Sequence[str]) -> CommandLine:
    """Reads a command line. Raises SettingsError with one sentence."""
    line, rest = CommandLine(), _Tokens(tokens)
    while rest:
        token = rest.next()
        if not token.startswith("--"):
            if line.run_file is not None:
                raise SettingsError(
                    f"Unexpected argument {token!r}: the run file is {line.run_file!r} already, and settings are flags."
                )
            line.run_file = token
            continue
        spelt, _, inline = token[2:].partition("=")
        _read_flag(line, rest, spelt.replace("-", "_"), inline if "=" in token else None)
    return line


def _read_flag(line: CommandLine, rest: _Tokens, name: str, inline: str | None) -> None:
    """Reads one flag and its values."""
    keys = all_keys()
    if name in keys:
        key = keys[name]
        _store(line, key, _value(key, rest, inline, line.values.get(key.group, {}).get(name)))
    elif name.startswith("no_") and name[3:] in keys and keys[name[3:]].kind == "bool":
        if inline is not None:
            raise SettingsError(f"{flag_of(name)} takes no value; write {flag_of(name)} or {flag_of(name[3:])}.")
        _store(line, keys[name[3:]], False)
    elif reason := refusal(name):
        raise SettingsError(f"{flag_of(name)} does not apply: {reason}.")
    elif name.startswith(ROUTER):
        _pass_through(line, rest, "sglang_router", name.removeprefix(ROUTER), inline)
    elif name.startswith(SGLANG):
        _pass_through(line, rest, "sglang", name.removeprefix(SGLANG), inline)
    else:
        raise SettingsError(_unknown(name))


def _unknown(name: str) -> str:
    keys = all_keys()
    spellings = {key.flag: key.name for key in keys.values()}
    spellings |= {flag_of("no_" + key.name): key.name for key in keys.values() if key.kind == "bool"}
    close = nearest(flag_of(name), spellings)
    hint = f"did you mean {close}?" if close else "every key is listed in docs/flags.md."
    return f"Unknown flag {flag_of(name)}: {hint}"


def _store(line: CommandLine, key: Key, value: Any) -> None:
    line.values.setdefault(key.group, {})[key.name] = value
    line.sources[key.path] = key.flag


def _value(key: Key, rest: _Tokens, inline: str | None, before: Any) -> Any:
    """The value of a flag of the run; lists grow with every use."""
    if key.kind == "bool":
        return True if inline is None else scalar(inline)
    if key.kind == "list":
        texts = [inline] if inline is not None else rest.optional()
        if not texts:
            raise SettingsError(f"{key.flag} needs at least one value.")
        if not key.required and [text.lower() for text in texts] in (["none"], ["null"]):
            return []
        if key.item == "map":
            return [*(before or []), *(_mapping(key, text) for text in texts)]
        if key.item != "str":
            texts = [part for text in texts for part in text.split(",") if part]
        items = texts if key.item == "str" else [scalar(text) for text in texts]
        return [*(before or []), *items]
    text = inline if inline is not None else rest.value()
    if text is None:
        raise SettingsError(f"{key.flag} needs a value{_example(key)}.")
    if key.default is None and not key.required and text.lower() in ("none", "null"):
        return None
    if key.kind == "map":
        return {**(before or {}), **_mapping(key, text)}
    if key.kind in ("str", "choice"):
        return text
    return scalar(text)


def _example(key: Key) -> str:
    if key.choices:
        return f", one of {', '.join(key.choices)}"
    return "" if key.default in (None, (), {}) else f", as in {key.flag} {key.default}"


def scalar(text: str) -> Any:
    """A number, boolean or null when the text is one, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | list | dict) or value is None else text


def _mapping(key: Key, text: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        raise SettingsError(f"{key.flag} is {text!r}: write a mapping, as in {key.flag} '{{name: value}}'.")
    return value


def _pass_through(line: CommandLine, rest: _Tokens, target: str, name: str, inline: str | None) -> None:
    """An argument of SGLang or its router: no value means true, several make a list."""
    owned = SGLANG_OWNED if target == "sglang" else ROUTER_OWNED
    if name in owned:
        raise SettingsError(f"{flag_of(f'{target}_{name}')} does not apply: {owned[name]}.")
    texts = [inline] if inline is not None else rest.optional()
    values = [scalar(text) for text in texts]
    value = True if not values else values[0] if len(values) == 1 else values
    line.values.setdefault("rollout", {}).setdefault(target, {})[name] = value
    line.sources[f"rollout.{target}.{name}"] = flag_of(f"{target}_{name}")
