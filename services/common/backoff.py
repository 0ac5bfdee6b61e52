"""How long to leave something alone that failed: twice as long each time."""

from __future__ import annotations

import time
from collections.abc import Callable


class Backoff:
    """Waits by key, which double from `first` to `longest` seconds; a success forgets them."""

    def __init__(self, first: float, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first = first
        self._longest = longest
        self._clock = clock
        self._waits: dict[str, tuple[float, float]] = {}

    def due(self, key: str) -> bool:
        """Whether it may be tried."""
        return key not in self._waits or self._waits[key][0] <= self._clock()

    def failed(self, key: str) -> float:
        """→ seconds until it is due again."""
        seconds = min(2 * self._waits[key][1], self._longest) if key in self._waits else self._first
        self._waits[key] = (self._clock() + seconds, seconds)
        return seconds

    def succeeded(self, key: str) -> None:
        """The next failure waits `first` seconds again."""
        self._waits.pop(key, None)
