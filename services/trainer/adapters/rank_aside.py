"""Rank 0's second connection: numbered commands that it answers in any order, beside what it is doing.

Knows nothing of processes or of what a failure means: `local_ranks` does. Invariant: every question gets an answer, or
EOFError when the connection ends; the answer of a question that was given up is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from typing import Any

from services.trainer.core.commands import Command


class Aside:
    """The controller's end.

    Args:
        pipe: the connection, after its Hello.
        sender: thread that writes to it.
    """

    def __init__(self, pipe: connection.Connection, sender: ThreadPoolExecutor) -> None:
        self._pipe = pipe
        self._sender = sender
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future] = {}
        self._ended = False
        threading.Thread(target=self._read, name="rank 0 aside", daemon=True).start()

    async def ask(self, command: Command) -> Any:
        """The answer. Raises EOFError or OSError."""
        if self._ended:
            raise EOFError
        number = next(self._numbers)
        answer = self._asked[number] = self._loop.create_future()
        try:
            await self._loop.run_in_executor(self._sender, self._pipe.send, (number, command))
            return await answer
        finally:
            self._asked.pop(number, None)

    def close(self) -> None:
        """Ends the connection."""
        self._sender.shutdown(wait=False)
        with contextlib.suppress(OSError):
            self._pipe.close()

    def _read(self) -> None:
        while True:
            try:
                number, answer = self._pipe.recv()
            except (EOFError, OSError, TypeError):  # TypeError: it was closed while it was read
                break
            self._tell(self._resolve, number, answer)
        self._tell(self._end)

    def _tell(self, call: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has gone
            self._loop.call_soon_threadsafe(call, *args)

    def _resolve(self, number: int, answer: Any) -> None:
        waiting = self._asked.get(number)
        if waiting and not waiting.done():
            waiting.set_result(answer)

    def _end(self) -> None:
        self._ended = True
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(EOFError())
