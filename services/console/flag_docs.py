"""`python -m services.console.flag_docs`: prints docs/flags.md, made from the model and the table of refusals."""

from __future__ import annotations

from services.console.core.keys import Key, all_keys
from services.console.core.refused import PREFIXES, REFUSED, ROUTER_OWNED, SGLANG_OWNED

_HEAD = """\
# Keys of a run

<!-- Made by `python -m services.console.flag_docs > docs/flags.md`; do not edit. -->

Every key can stand in the run file, below its group, or on the command line as a flag, which wins:
`rollout: {rollout_batch_size: 32}` and `--rollout-batch-size 32` are the same. A boolean is `--use-kl-loss` or
`--no-use-kl-loss`. A list is given by several values or by repeating the flag, numbers also with commas. `none` unsets
a key without a default. What is not listed here is refused, with the reason where the name is known from elsewhere.

Batch law: `rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout`.
`global_batch_size` follows from it when it is not set.
"""
_TITLES = {
    "": "Run",
    "data": "data: the prompts",
    "rollout": "rollout: generation and evaluation",
    "reward": "reward: scoring",
    "trainer": "trainer: training and weight updates",
}
_PASS_THROUGH = """\
## Arguments of the engine and its router

`--sglang-<name> value` (or `rollout: {sglang: {name: value}}`) passes any argument of the SGLang server, as in
`--sglang-mem-fraction-static 0.8`; a flag without a value means true. `--sglang-router-<name>` does the same for
sglang-router. These are settled by the rollout node and refused:
"""
_REFUSED = """\
## Known flags that do not apply

Names known from slime and Megatron-LM. Each is refused with its reason, never ignored.

| flag | why, and what to do instead |
|---|---|
"""


def _default(key: Key) -> str:
    if key.required:
        return "required"
    if key.default in (None, (), {}):
        return "–"
    return f"`{str(key.default).lower() if key.kind == 'bool' else key.default}`"


def _values(key: Key) -> str:
    if key.choices:
        return ", ".join(f"`{choice}`" for choice in key.choices)
    if key.kind == "list":
        return "list of " + ("mappings" if key.item == "map" else key.item)
    return {"bool": "on or off", "str": "text", "map": "mapping"}.get(key.kind, key.kind)


def _group(group: str) -> str:
    rows = [
        f"| `{key.flag}` | {_values(key)} | {_default(key)} | {key.help} |"
        for key in all_keys().values()
        if key.group == group
    ]
    return f"## {_TITLES[group]}\n\n| flag | value | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _by_reason(table: dict[str, str], prefix: str = "", suffix: str = "") -> list[str]:
    """One row per reason: flags, then the reason."""
    names: dict[str, list[str]] = {}
    for name, reason in table.items():
        names.setdefault(reason, []).append(f"`{prefix}{name.replace('_', '-')}{suffix}`")
    return [f"| {', '.join(flags)} | {reason} |" for reason, flags in names.items()]


def document() -> str:
    """The whole page."""
    owned = ["| argument | instead |", "|---|---|"]
    owned += _by_reason(SGLANG_OWNED, "--sglang-") + _by_reason(ROUTER_OWNED, "--sglang-router-")
    refused = _REFUSED + "\n".join(_by_reason(REFUSED, "--") + _by_reason(PREFIXES, "--", "…")) + "\n"
    groups = [_group(group) for group in _TITLES]
    return "\n".join([_HEAD, *groups, _PASS_THROUGH, "\n".join(owned) + "\n", refused])


if __name__ == "__main__":
    print(document(), end="")
