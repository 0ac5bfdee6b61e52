"""The `math` grader, by the math-verify library. Imported in worker processes only.

math-verify's own time limits work by signals inside the process and give up silently with "not equal". They are
off: a worker that overruns is killed by its pool, and the item is unscored.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from services.reward.core.exact_match import last_boxed
from services.reward.core.records import Item, Outcome, Unscored, unscored

# Each call without a time limit would log a warning.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_CONFIGS = (LatexExtractionConfig(), ExprExtractionConfig())
_MARKS = ("$", "\\(", "\\[", "\\boxed")


@lru_cache(maxsize=4096)
def _parse_label(label: str) -> tuple[Any, ...]:
    """Parsed label. A bare one is read as LaTeX first, since `\\frac{1}{2}` means nothing outside math mode."""
    if any(mark in label for mark in _MARKS):
        return tuple(parse(label, _CONFIGS, parsing_timeout=None))
    return tuple(parse(f"${label}$", _CONFIGS, parsing_timeout=None) or parse(label, _CONFIGS, parsing_timeout=None))


def score_math(item: Item, options: dict[str, Any]) -> Outcome:
    """1.0 when the final answer equals the label, else 0.0. A label that is no mathematics leaves it unscored.

    Options: `boxed_only`, only a \\boxed answer counts; `precision`, decimals that are compared (6).
    """
    expected = _parse_label(item.label) if item.label else ()
    if not expected:
        why = f"label {item.label!r} could not be read as mathematics" if item.label else "the item has no label"
        return unscored(Unscored.GRADER_ERROR, f"The math grader cannot judge item {item.item_id!r}: {why}.")
    boxed = last_boxed(item.response)
    if options.get("boxed_only") and boxed is None:
        return Outcome(reward=0.0)
    answer = parse(item.response if boxed is None else f"${boxed}$", _CONFIGS, parsing_timeout=None)
    equal = verify(list(expected), answer, float_rounding=options.get("precision", 6), timeout_seconds=None)
    return Outcome(reward=float(equal))


def warm_up() -> None:
    """Builds the parser's tables, so that the first item does not pay for them."""
    for response in ("The answer is 12.", "\\boxed{\\frac{1}{2}}", "$x^2 + 2x + 1$"):
        score_math(Item("", "", response, "$(x+1)^2$"), {})
