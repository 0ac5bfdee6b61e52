"""Where the seconds of a step go. Parts may not overlap, so that parts and "other" add up to the wall clock."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator


class StepClock:
    """Sums seconds by part between two calls of `lap`."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._parts: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time of the block to a part."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._parts[name] += time.monotonic() - began

    def lap(self) -> dict[str, float]:
        """`<part>_seconds` of every part, `other_seconds` and `total_seconds` since the last lap."""
        now = time.monotonic()
        total = now - self._started
        seconds = {f"{name}_seconds": value for name, value in self._parts.items()}
        seconds["other_seconds"] = max(0.0, total - sum(self._parts.values()))
        seconds["total_seconds"] = total
        self._started = now
        self._parts.clear()
        return seconds
