"""An event loop whose clock jumps to the next timer: hours of deadlines pass in milliseconds, in one order.

For code that waits for nothing but asyncio; a thread or a socket in it would find the clock gone ahead. Its clock
is `time.monotonic` while it runs.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock


class Deadlock(AssertionError):
    """Everybody waits and no timer runs: a wait without a deadline."""


class _Selector(selectors.DefaultSelector):
    """Never sleeps. `now` is the time in seconds; `look` is called once a turn of the loop."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.now = 1000.0
        self._look = look

    def clock(self) -> float:
        """In place of `time.monotonic`."""
        return self.now

    def select(self, timeout: float | None = None):
        try:
            self._look()
        except BaseException:
            self._look = lambda: None  # what follows is the run's end
            raise
        if timeout is None:
            raise Deadlock("nothing is scheduled and nobody would ever go on")
        self.now += max(timeout, 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, selector: _Selector) -> None:
        self._virtual = selector
        super().__init__(selector)

    def time(self) -> float:
        return self._virtual.now


def run(main: Coroutine[Any, Any, Any], look: Callable[[], None] = lambda: None) -> Any:
    """Result of `main`. `look` is called at every turn and may raise, which ends the run.

    Raises:
        Deadlock: nobody would ever go on.
    """
    selector = _Selector(look)
    with (
        mock.patch.object(time, "monotonic", selector.clock),
        asyncio.Runner(loop_factory=lambda: _Loop(selector)) as runner,
    ):
        return runner.run(main)
