"""The `exact_match` grader: 1 when response and label are equal after the chosen normalisation, else 0.

By default both are stripped of surrounding white space and compared as they are. Extraction is applied to the
response; to the label too where the label contains what is extracted, so that labels may be bare answers.

Invariant: every built-in extraction takes time linear in the response. A `pattern` of the user may not, so
tasks with a pattern run in a worker process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from services.common.errors import invalid_field
from services.reward.core.records import Item, Outcome, Unscored, unscored

EXTRACTIONS = ("none", "last_number", "last_line", "boxed")
# A sign counts unless it stands between two operands, as in 12-5.
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d{1,3})?")
_KEYS = ("strip", "lower", "extract", "pattern", "label_pattern")


@dataclass(frozen=True)
class ExactMatchOptions:
    """How the two sides are made comparable, in this order: extract, strip, lower."""

    strip: bool = True
    """Ignore surrounding white space."""
    lower: bool = False
    """Ignore case."""
    extract: str = "none"
    """last_number (compared by value), last_line, boxed (the last \\boxed{...}), or none."""
    pattern: str | None = None
    """Regular expression; its last match in the response counts, or group 1 of it. Replaces `extract`."""
    label_pattern: str | None = None
    """The same for the label; by default the label is used whole."""


def parse_options(options: dict[str, Any]) -> ExactMatchOptions:
    """Options of a request. Raises INVALID_FIELD."""
    for key, value in options.items():
        if key not in _KEYS:
            raise invalid_field("options_json", key, f"exact_match has no such option; use {', '.join(_KEYS)}")
        wanted = bool if key in ("strip", "lower") else str
        if not isinstance(value, wanted) and not (value is None and "pattern" in key):
            raise invalid_field(f"options_json.{key}", value, f"it must be a {wanted.__name__}")
    parsed = ExactMatchOptions(**options)
    if parsed.extract not in EXTRACTIONS:
        raise invalid_field("options_json.extract", parsed.extract, f"use one of {', '.join(EXTRACTIONS)}")
    for key in ("pattern", "label_pattern"):
        try:
            re.compile(getattr(parsed, key) or "")
        except re.error as error:
            raise invalid_field(
                f"options_json.{key}", getattr(parsed, key), f"not a regular expression ({error})"
            ) from error
    return parsed


def score_exact_match(item: Item, options: ExactMatchOptions) -> Outcome:
    """1.0 or 0.0. A response from which nothing can be extracted is wrong; an item without a label is unscored."""
    if not item.label:
        return unscored(
            Unscored.GRADER_ERROR, "The item has no label; set label_key to the column that holds the answer."
        )
    answer = _extract(item.response, options.extract, options.pattern)
    expected = _extract(item.label, options.extract if options.pattern is None else "none", options.label_pattern)
    if expected is None:  # a bare label: `42` beside `\boxed{42}`
        expected = item.label
    if answer is None:
        return Outcome(reward=0.0)
    return Outcome(reward=float(_normal(answer, options) == _normal(expected, options)))


def _extract(text: str, kind: str, pattern: str | None) -> str | None:
    """The part of a text that is compared; None when there is none."""
    if pattern is not None:
        matches = list(re.finditer(pattern, text))
        if not matches:
            return None
        return matches[-1].group(1 if matches[-1].re.groups else 0)
    if kind == "last_number":
        numbers = _NUMBER.findall(text)
        return _canonical_number(numbers[-1]) if numbers else None
    if kind == "last_line":
        return next((line for line in reversed(text.splitlines()) if line.strip()), None)
    return last_boxed(text) if kind == "boxed" else text


def _canonical_number(text: str) -> str:
    """One spelling for every spelling of a number: 1,000.0 → 1000."""
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return text
    if number == number.to_integral_value() and abs(number) < 10**30:
        return str(int(number))
    return str(number.normalize())


def last_boxed(text: str) -> str | None:
    """Content of the last complete \\boxed{...} with balanced braces; None when there is none."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for position in range(start + len("\\boxed{") - 1, end):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : position]
        end = start
    return None


def _normal(text: str | None, options: ExactMatchOptions) -> str:
    text = text or ""
    text = text.strip() if options.strip else text
    return text.lower() if options.lower else text
