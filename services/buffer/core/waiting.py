"""Waiting for a change of a run without spinning and without missing another server's change.

A waiter sleeps until this process changes the run, or for a short poll, since other buffer servers work on the
same store. Invariant: no wait is longer than its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

POLL_SECONDS = 0.2
Answer = TypeVar("Answer")
Item = TypeVar("Item")


class Changes:
    """Wakes waiters of a run."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}
        self._closed = False
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Ends every wait, now and from now on: the process is about to end and callers go elsewhere."""
        self._closed = True
        self._closing.set()
        for run_id in list(self._events):
            self.notify(run_id)

    def notify(self, run_id: str) -> None:
        """Something about the run changed."""
        event = self._events.pop(run_id, None)
        if event:
            event.set()

    async def wait(self, run_id: str, seconds: float) -> None:
        """Returns at the next change, or after `seconds`."""
        event = self._events.setdefault(run_id, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)

    async def closing(self, seconds: float) -> bool:
        """Sleeps; True at once when the process is about to end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closed

    async def until(
        self,
        run_id: str,
        max_wait: float,
        attempt: Callable[[], Awaitable[Answer]],
        done: Callable[[Answer], bool],
    ) -> Answer:
        """Repeats `attempt` until its answer is `done` or `max_wait` seconds have passed; returns the last answer."""
        deadline = time.monotonic() + max_wait
        while True:
            answer = await attempt()
            left = deadline - time.monotonic()
            if done(answer) or left <= 0 or self._closed:
                return answer
            await self.wait(run_id, min(left, POLL_SECONDS))


async def ahead(items: AsyncIterator[Item]) -> AsyncIterator[Item]:
    """The same items; each is fetched while the consumer still works on the one before."""
    coming = asyncio.ensure_future(anext(items))
    try:
        while True:
            try:
                item = await coming
            except StopAsyncIteration:
                return
            coming = asyncio.ensure_future(anext(items))
            yield item
    finally:
        coming.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await coming
