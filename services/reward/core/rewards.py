"""What a grader returned, as a reward.

Accepted: a number (bool, int, float, or anything with `__float__`, as numpy's scalars), or a dict whose reward
stands under `reward_key` (by default "reward", else "score") and whose other numbers become details.

Invariant: a reward is finite; everything else is INVALID_REWARD, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from services.reward.core.records import Outcome, Unscored, unscored

_DEFAULT_KEYS = ("reward", "score")


def _number(value: Any) -> float | None:
    """Finite float of a value, or None."""
    if value is None or isinstance(value, (str, bytes)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def to_outcome(raw: Any, *, reward_key: str | None = None, seconds: float = 0.0) -> Outcome:
    """Outcome of a returned value."""
    details: dict[str, float] = {}
    value = raw
    if isinstance(raw, Mapping):
        key = next((name for name in ((reward_key,) if reward_key else _DEFAULT_KEYS) if name in raw), None)
        if key is None:
            wanted = repr(reward_key) if reward_key else "'reward' or 'score'"
            found = ", ".join(map(repr, raw)) or "nothing"
            return unscored(
                Unscored.INVALID_REWARD, f"The grader returned a dict with {found} but no {wanted}.", seconds
            )
        value = raw[key]
        numbers = {str(name): _number(item) for name, item in raw.items() if name != key}
        details = {name: number for name, number in numbers.items() if number is not None}
    reward = _number(value)
    if reward is None:
        return unscored(
            Unscored.INVALID_REWARD, f"The grader returned {_short(value)}, which is not a finite number.", seconds
        )
    return Outcome(reward=reward, details=details, seconds=seconds)


def _short(value: Any) -> str:
    """repr of a value, cut to one line."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 80 else text[:77] + "..."
