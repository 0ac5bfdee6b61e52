"""A thread with an event loop of its own for functions of the user.

A user function may block, crash or never end; the node's own loop must not notice. Invariants: whatever the
function raises, SystemExit included, reaches the caller as a `ServiceError`; a caller waits no longer than its
deadline; a loop that stands still is named in the log with the line that blocks it, and when a deadline passes
while it stands still it is abandoned for a fresh one (a blocked thread cannot be stopped).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from services.common.errors import Code, ServiceError
from services.common.telemetry import get_logger

log = get_logger(__name__)
ResultT = TypeVar("ResultT")

_BEAT_SECONDS = 0.25


class _Worker:
    """One thread and its loop."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.beat = time.monotonic()
        self.warned = False
        self.calls: set[concurrent.futures.Future[Any]] = set()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._tick)
        self.loop.run_forever()

    def _tick(self) -> None:
        self.beat = time.monotonic()
        self.warned = False
        self.loop.call_later(_BEAT_SECONDS, self._tick)

    @property
    def stalled_seconds(self) -> float:
        """How long the loop has not turned."""
        return max(0.0, time.monotonic() - self.beat - _BEAT_SECONDS)

    def end(self) -> None:
        """Cancels what runs and stops the loop, once it turns."""

        def stop() -> None:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.call_later(0.05, self.loop.stop)

        self.loop.call_soon_threadsafe(stop)

    def blocked_at(self) -> str:
        """File, line and source of what the thread does now, innermost line of the user's."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        if frame is None:
            return "an unknown line"
        stack = [item for item in traceback.extract_stack(frame) if "/asyncio/" not in item.filename]
        last = stack[-1] if stack else traceback.extract_stack(frame)[-1]
        return f"{last.filename}:{last.lineno} ({last.line})"


class UserLoop:
    """Runs coroutines of user functions in a thread.

    Args:
        name: what the functions are, for messages.
        stall_seconds: a loop that stands still longer than this is reported.
    """

    def __init__(self, name: str, stall_seconds: float = 2.0) -> None:
        self._name = name
        self._stall = stall_seconds
        self._worker: _Worker | None = None
        self._monitor: asyncio.Task[None] | None = None
        self.abandoned_count = 0

    async def run(self, call: Callable[[], Awaitable[ResultT]], timeout: float) -> ResultT:
        """Result of `await call()` in the thread.

        Raises GENERATE_FAILED (the function raised), GENERATE_TIMEOUT (the deadline passed).
        """
        worker = self._ready()
        future = asyncio.run_coroutine_threadsafe(_guard(call), worker.loop)
        worker.calls.add(future)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        except TimeoutError:
            where = f"; it blocks at {worker.blocked_at()}" if worker.stalled_seconds > self._stall else ""
            self._abandon_if_stalled(worker)
            raise ServiceError(
                Code.DEADLINE_EXCEEDED,
                "GENERATE_TIMEOUT",
                f"{self._name} did not end within {timeout:.0f} s (generate_timeout){where}.",
            ) from None
        finally:
            worker.calls.discard(future)

    def _ready(self) -> _Worker:
        if self._worker is None:
            self._worker = _Worker(self._name)
        if self._monitor is None or self._monitor.done():
            self._monitor = asyncio.create_task(self._watch())
        return self._worker

    async def _watch(self) -> None:
        """Names the line that blocks, once a stall."""
        while self._worker is not None:
            await asyncio.sleep(self._stall / 2)
            worker = self._worker
            if worker and worker.calls and worker.stalled_seconds > self._stall and not worker.warned:
                worker.warned = True
                log.warning(
                    "a user function blocks its event loop; other samples wait for it. Await, or use asyncio.to_thread",
                    function=self._name,
                    at=worker.blocked_at(),
                )

    def _abandon_if_stalled(self, worker: _Worker) -> None:
        if worker is not self._worker or worker.stalled_seconds <= self._stall:
            return
        self.abandoned_count += 1
        log.warning("a blocked event loop is abandoned", function=self._name, at=worker.blocked_at())
        worker.end()  # if the block ever ends
        self._worker = None  # its other callers run into their own deadlines, or end if the block ends

    def close(self) -> None:
        """Stops the thread's loop."""
        if self._monitor is not None:
            self._monitor.cancel()
        if self._worker is not None:
            self._worker.end()
            self._worker = None


async def _guard(call: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Turns whatever a user function raises into a ServiceError, so that the thread lives on."""
    try:
        return await call()
    except (ServiceError, asyncio.CancelledError):
        raise
    except BaseException as error:  # SystemExit would end the loop
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ServiceError(
            Code.INTERNAL,
            "GENERATE_FAILED",
            f"The generate function raised {type(error).__name__}: {error} ({last.filename}:{last.lineno}).",
        ) from error
