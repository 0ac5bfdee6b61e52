"""One worker process and the line to it, seen from the service.

Invariant: after `stop` the process is gone; a call in flight then raises `WorkerDied`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.common.errors import Code, ServiceError
from services.common.process import ManagedProcess
from services.reward.core.records import Outcome, Task
from services.reward.core.wire import outcome_from_dict, task_to_dict

LINE_LIMIT = 64 * 1024 * 1024
"""Longest line between pool and worker: above the largest gRPC message."""
EXCLUSIVE, SHARED = "exclusive", "shared"


class WorkerDied(Exception):
    """The process ended while a call waited for it."""


class WorkerProcess:
    """A worker.

    Args:
        mode: EXCLUSIVE (one call at a time) or SHARED (async functions, many calls at once).
        socket_path: where the worker connects; used once.
        python_path: directories added to the worker's import path, first first.
        on_line: gets what reward functions print.
    """

    def __init__(
        self, mode: str, socket_path: Path, python_path: tuple[str, ...], on_line: Callable[[str], None]
    ) -> None:
        self.mode = mode
        self.loaded: set[str] = set()
        self.stale = False
        self._socket_path = socket_path
        # `-m` puts the working directory first: a user's function is found where the service was started.
        entries = [os.getcwd(), *python_path, *filter(None, sys.path)]
        self._process = ManagedProcess(
            f"reward worker ({mode})",
            [sys.executable, "-m", "services.reward.adapters.worker", str(socket_path), mode, str(LINE_LIMIT)],
            env={"PYTHONPATH": os.pathsep.join(dict.fromkeys(entries)), "PYTHONUNBUFFERED": "1"},
            on_line=on_line,
        )
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def usable(self) -> bool:
        """True while the process answers and its code is current."""
        return not self._closed and not self.stale and self._process.running

    @property
    def busy(self) -> bool:
        """True while calls are in flight."""
        return bool(self._waiting)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def start(self, timeout: float) -> None:
        """Starts the process and waits until it is ready. Raises WorkerDied, TimeoutError."""
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.get_running_loop().create_future()
        )

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.set_result((reader, writer))

        server = await asyncio.start_unix_server(accept, self._socket_path, limit=LINE_LIMIT)
        try:
            await self._process.start()
            ended = asyncio.create_task(self._process.wait())
            async with asyncio.timeout(timeout):
                await asyncio.wait({connected, ended}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if not connected.done():
                raise WorkerDied(f"it ended while starting: {' | '.join(self._process.tail(3))}")
            reader, self._writer = connected.result()
            async with asyncio.timeout(timeout):
                await reader.readline()
        finally:
            server.close()
            self._socket_path.unlink(missing_ok=True)
        self._reading = asyncio.create_task(self._read(reader), name=f"replies of worker {self.pid}")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hands replies to their callers until the line breaks."""
        with contextlib.suppress(ConnectionError, ValueError):
            while line := await reader.readline():
                reply = json.loads(line)
                future = self._waiting.pop(reply["id"], None)
                if future and not future.done():
                    future.set_result(reply)
        self._closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerDied())
        self._waiting.clear()

    async def _call(self, op: str, timeout: float, **fields: Any) -> dict[str, Any]:
        """One request and its reply. Raises TimeoutError, WorkerDied, or the ServiceError of the worker."""
        if self._closed or not self._writer:
            raise WorkerDied
        number = next(self._ids)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                self._writer.write(json.dumps({"id": number, "op": op, **fields}).encode() + b"\n")
                await self._writer.drain()
                reply = await future
        except ConnectionError as error:
            raise WorkerDied from error
        finally:
            self._waiting.pop(number, None)
        if error := reply.get("error"):
            raise ServiceError(Code(error["code"]), error["reason"], error["message"], **error["metadata"])
        return reply

    async def load(self, task: Task, timeout: float) -> dict[str, Any]:
        """Imports a task's grader; `is_async` and `file` of it."""
        reply = await self._call("load", timeout, task=task_to_dict(task))
        self.loaded.add(task.code_key)
        return reply

    async def score(self, task: Task, timeout: float, *, limit: float = 0.0) -> list[Outcome]:
        """Scores a task; a shared worker cancels it after `limit` seconds."""
        reply = await self._call("score", timeout, task=task_to_dict(task), limit=limit)
        return [outcome_from_dict(outcome) for outcome in reply["outcomes"]]

    async def ping(self, timeout: float) -> None:
        """Returns when the worker's loop turns."""
        await self._call("ping", timeout)

    async def stop(self) -> None:
        """Kills the process and its children; a grader holds nothing worth a farewell."""
        self._closed = True
        if self._writer:
            self._writer.close()
        await self._process.stop(grace_seconds=0)
        if self._reading:
            await self._reading
