"""The pool of worker processes: `services.reward.core.scoring.Workers` made of operating-system processes.

Exclusive workers are started at once, warm, and take one task at a time; one that overruns or crashes is killed
and replaced while the others go on. Async functions of users share one further worker, started when first
needed; when its loop stops turning it is killed, and what was in flight runs again, each task by itself.

Invariants: the number of exclusive workers, counting those being started, never changes; a worker is in the
idle queue, in one task's hands, or being replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.errors import Code, ServiceError
from services.common.telemetry import get_logger
from services.reward import metrics
from services.reward.adapters.worker_process import EXCLUSIVE, SHARED, WorkerDied, WorkerProcess
from services.reward.core.catalogue import not_loadable
from services.reward.core.records import Outcome, Task, Unscored, unscored

_START_SECONDS = 60.0
_WATCH_SECONDS = 1.0
# A shared worker cancels a call a little before its caller stops waiting, so that the two never race.
_MARGIN_SECONDS = 0.1
# Items of a built-in grader that go together take milliseconds; more than this means that one of them hangs.
_TOGETHER_SECONDS = 2.0
_log = get_logger(__name__)


class _WorkerLost(Exception):
    """A worker had to be replaced during a call; what its single item would get."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


@dataclass(frozen=True)
class Limits:
    """Numbers of a pool."""

    workers: int
    item_seconds: float
    """Longest run of one item of a function that is not async."""
    import_seconds: float
    """Longest import of a reward function."""


@dataclass(frozen=True)
class _Loaded:
    """What is known of a grader's code."""

    is_async: bool
    file: str
    modified_ns: int


class WorkerPool:
    """Workers of one service."""

    def __init__(self, limits: Limits, python_path: tuple[str, ...]) -> None:
        self._limits = limits
        self._python_path = python_path
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        self._numbers = itertools.count(1)
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self._all: set[WorkerProcess] = set()
        self._known: dict[str, _Loaded] = {}
        self._shared: WorkerProcess | None = None
        self._shared_lock = asyncio.Lock()
        self._background: set[asyncio.Task] = set()

    async def start(self) -> None:
        """Starts the workers; returns when one is ready. Raises WORKERS_NOT_STARTED."""
        self._sockets = tempfile.TemporaryDirectory(prefix="tetrarch-reward-")
        try:
            await self._start_exclusive()
        except (WorkerDied, TimeoutError) as error:
            raise ServiceError(
                Code.UNAVAILABLE,
                "WORKERS_NOT_STARTED",
                f"No worker process of the reward service came up: {error or 'it took too long'}.",
            ) from error
        for _ in range(self._limits.workers - 1):
            self._spawn(self._keep_starting())

    async def close(self) -> None:
        """Ends every worker."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._all))
        if self._sockets:
            self._sockets.cleanup()

    def _spawn(self, coroutine) -> asyncio.Task:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _new_worker(self, mode: str) -> WorkerProcess:
        assert self._sockets, "start() comes first"
        path = Path(self._sockets.name) / str(next(self._numbers))
        worker = WorkerProcess(mode, path, self._python_path, lambda line: _log.info("grader output", line=line))
        self._all.add(worker)
        try:
            await worker.start(_START_SECONDS)
        except BaseException:
            self._all.discard(worker)
            await worker.stop()
            raise
        return worker

    async def _start_exclusive(self) -> None:
        self._release(await self._new_worker(EXCLUSIVE))

    async def _keep_starting(self) -> None:
        """Starts one exclusive worker, trying again until it comes up."""
        for attempt in itertools.count(1):
            try:
                return await self._start_exclusive()
            except (WorkerDied, TimeoutError, OSError) as error:
                _log.error("a worker did not start", attempt=attempt, error=str(error))
                await asyncio.sleep(min(30.0, 2.0**attempt))

    def _replace(self, worker: WorkerProcess, why: str) -> None:
        """Kills a worker in the background; an exclusive one gets a successor."""
        metrics.WORKERS_REPLACED.labels(why).inc()

        async def replace() -> None:
            await worker.stop()
            self._all.discard(worker)
            if worker.mode == EXCLUSIVE:
                await self._keep_starting()

        self._spawn(replace())

    def _release(self, worker: WorkerProcess) -> None:
        self._idle.put_nowait(worker)

    async def _acquire(self, deadline: float) -> WorkerProcess:
        """An idle, usable worker. Raises TimeoutError."""
        async with asyncio.timeout(deadline - time.monotonic()):
            while True:
                worker = await self._idle.get()
                if worker.usable:
                    return worker
                self._replace(worker, "outdated" if worker.stale else "died")

    async def load(self, task: Task, deadline: float) -> bool:
        """See Workers.load. A function whose file changed since is loaded anew, in new workers."""
        key = task.code_key
        known = self._known.get(key)
        if known and _modified_ns(known.file) == known.modified_ns:
            return known.is_async
        if known:
            del self._known[key]
            for worker in self._all:
                worker.stale = worker.stale or key in worker.loaded
        worker = await self._acquire(deadline)
        await self._prepare(worker, task, deadline)
        self._release(worker)
        return self._known[key].is_async

    async def _prepare(self, worker: WorkerProcess, task: Task, deadline: float) -> None:
        """Has a worker import a task's grader.

        An import that outlasts the caller's deadline goes on, so that the next caller finds it done.
        Raises GRADER_NOT_LOADABLE (the worker is idle again or being replaced), TimeoutError (it will be).
        """
        if task.code_key in worker.loaded:
            return
        importing = self._spawn(self._import(worker, task))
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await asyncio.shield(importing)
        except (TimeoutError, asyncio.CancelledError):
            importing.add_done_callback(lambda done: done.cancelled() or done.exception() or self._release(worker))
            raise

    async def _import(self, worker: WorkerProcess, task: Task) -> None:
        """The import itself, limited by `import_seconds`."""
        name = task.custom_path or task.grader
        try:
            reply = await worker.load(Task(task.grader, (), {}, task.custom_path), self._limits.import_seconds)
        except (TimeoutError, WorkerDied) as error:
            self._replace(worker, "import")
            hung = f"its module was not imported within {self._limits.import_seconds:.3g} s"
            why = hung if isinstance(error, TimeoutError) else "importing its module ended the process"
            raise not_loadable(name, why) from error
        except ServiceError:
            self._release(worker)
            raise
        self._known[task.code_key] = _Loaded(reply["is_async"], reply["file"], _modified_ns(reply["file"]))

    async def run(self, task: Task, deadline: float) -> list[Outcome]:
        """See Workers.run. Independent items go together; when one of them costs the worker, each goes by itself."""
        scale = len(task.items) if task.grouped else 1
        together = len(task.items) > scale
        seconds = min(self._limits.item_seconds * scale, _TOGETHER_SECONDS if together else math.inf)
        try:
            return await self._run_once(task, deadline, seconds)
        except _WorkerLost as lost:
            if not together:
                return [lost.outcome] * len(task.items)
        alone = (self.run(replace(task, items=(item,)), deadline) for item in task.items)
        return [outcomes[0] for outcomes in await asyncio.gather(*alone)]

    async def _run_once(self, task: Task, deadline: float, seconds: float) -> list[Outcome]:
        """One call of a worker, of at most `seconds`. Raises _WorkerLost when it had to be replaced."""
        started = time.monotonic()
        try:
            worker = await self._acquire(deadline)
            await self._prepare(worker, task, deadline)
        except TimeoutError:
            waited = time.monotonic() - started
            late = unscored(Unscored.TIMEOUT, f"No worker was free within {waited:.3g} s.")
            return [late] * len(task.items)
        limit = max(0.0, min(seconds, deadline - time.monotonic()))
        try:
            results = await worker.score(task, limit)
        except TimeoutError as error:
            self._replace(worker, "timeout")
            message = f"The grader did not finish within {limit:.3g} s."
            raise _WorkerLost(unscored(Unscored.TIMEOUT, message, limit)) from error
        except WorkerDied as error:
            self._replace(worker, "crash")
            raise _WorkerLost(unscored(Unscored.GRADER_ERROR, "The grader ended its process.")) from error
        except BaseException:  # the caller went away; the worker is still at it
            self._replace(worker, "cancelled")
            raise
        self._release(worker)
        return results

    async def run_shared(self, task: Task, deadline: float) -> list[Outcome]:
        """See Workers.run_shared."""
        try:
            worker = await self._shared_worker(task, deadline)
            left = max(0.0, deadline - time.monotonic())
            return await worker.score(task, left, limit=max(left / 2, left - _MARGIN_SECONDS))
        except TimeoutError:
            late = unscored(Unscored.TIMEOUT, "The grader did not finish within its budget.")
            return [late] * len(task.items)
        except WorkerDied:
            return await self.run(task, deadline)

    async def _shared_worker(self, task: Task, deadline: float) -> WorkerProcess:
        """The shared worker with a task's grader imported. Raises TimeoutError, WorkerDied."""
        async with asyncio.timeout(deadline - time.monotonic()), self._shared_lock:
            worker = self._shared
            if worker is None or not worker.usable:
                if worker:  # what it still has in flight runs again
                    self._replace(worker, "outdated" if worker.stale else "died")
                worker = self._shared = await self._new_worker(SHARED)
                self._spawn(self._watch(worker))
            if task.code_key not in worker.loaded:
                await worker.load(Task(task.grader, (), {}, task.custom_path), self._limits.import_seconds)
        return worker

    async def _watch(self, worker: WorkerProcess) -> None:
        """Kills a shared worker whose loop does not turn; its callers then see WorkerDied."""
        with contextlib.suppress(WorkerDied):
            while not worker.stale:
                await asyncio.sleep(_WATCH_SECONDS)
                try:
                    await worker.ping(self._limits.item_seconds)
                except TimeoutError:
                    if not self._shared_lock.locked():  # else it is importing, which has a limit of its own
                        _log.warning("an async reward function blocks its event loop; its worker is replaced")
                        await worker.stop()


def _modified_ns(file: str) -> int:
    """Time of the last change of a file; 0 when there is none."""
    try:
        return os.stat(file).st_mtime_ns if file else 0
    except OSError:
        return 0
