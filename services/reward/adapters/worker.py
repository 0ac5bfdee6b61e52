"""A worker process: `python -m services.reward.adapters.worker SOCKET exclusive|shared`.

It connects to its pool's Unix socket and answers one JSON object a line: `load` imports a grader, `score` runs
it on the items of a task, `ping` shows that the loop turns. Exclusive workers handle one call at a time without
a running event loop (so a plain function may use its own); shared workers run all their calls on one loop, for
async functions that mostly wait. Printing in a reward function goes to the service's log.

Invariant: a worker never gives up on time by itself, except that a shared one cancels an async call at its
limit; its pool kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

from services.common.errors import ServiceError
from services.reward.core import catalogue, custom
from services.reward.core.exact_match import parse_options, score_exact_match
from services.reward.core.records import Outcome, Task, Unscored, unscored
from services.reward.core.wire import outcome_to_dict, task_from_dict

_functions: dict[str, custom.CustomFunction] = {}


def _custom_function(path: str) -> custom.CustomFunction:
    if path not in _functions:
        _functions[path] = custom.load(path)
    return _functions[path]


def _load(task: Task) -> dict[str, Any]:
    """Imports what a task needs."""
    if task.grader == catalogue.CUSTOM:
        function = _custom_function(task.custom_path)
        return {"is_async": function.is_async, "file": function.file}
    if task.grader == catalogue.MATH:
        try:
            from services.reward.adapters import math_verifier
        except ImportError as error:
            raise catalogue.not_loadable("math", f"{error}; install the package math-verify") from error
        math_verifier.warm_up()
    return {"is_async": False, "file": ""}


def _score_built_in(task: Task) -> list[Outcome]:
    """Scores each item by itself."""
    if task.grader == catalogue.MATH:
        from services.reward.adapters.math_verifier import score_math

        grade = partial(score_math, options=task.options)
    else:
        grade = partial(score_exact_match, options=parse_options(task.options))
    results = []
    for item in task.items:
        started = time.monotonic()
        try:
            outcome = grade(item)
        except Exception as error:
            outcome = unscored(Unscored.GRADER_ERROR, f"The grader raised {custom.describe(error)}.")
        results.append(replace(outcome, seconds=time.monotonic() - started))
    return results


def score_now(task: Task, loop: asyncio.AbstractEventLoop) -> list[Outcome]:
    """Scores a task; an exception of the grader is an outcome."""
    if task.grader != catalogue.CUSTOM:
        return _score_built_in(task)
    started = time.monotonic()
    try:
        samples, raw = custom.call(_custom_function(task.custom_path), task, loop.run_until_complete)
        return custom.outcomes(task, samples, raw, time.monotonic() - started)
    except ServiceError:
        raise
    except Exception as error:
        return custom.failure(task, error, time.monotonic() - started)


async def score_shared(task: Task, limit: float) -> list[Outcome]:
    """Scores a task with an async function, cancelled after `limit` seconds."""
    started = time.monotonic()
    function = _custom_function(task.custom_path)
    samples = [custom.to_sample(item) for item in task.items]
    scope = asyncio.timeout(limit)
    try:
        async with scope:
            raw = await function.call(*custom.arguments(function, task, samples))
        return custom.outcomes(task, samples, raw, time.monotonic() - started)
    except Exception as error:
        seconds = time.monotonic() - started
        if isinstance(error, TimeoutError) and scope.expired():
            message = f"The grader did not finish within {limit:.3g} s."
            return [unscored(Unscored.TIMEOUT, message, seconds)] * len(samples)
        return custom.failure(task, error, seconds)


def _error_reply(error: Exception) -> dict[str, Any]:
    if not isinstance(error, ServiceError):
        error = catalogue.not_loadable("?", custom.describe(error))
    return {
        "error": {
            "code": error.code.value,
            "reason": error.reason,
            "message": error.message,
            "metadata": error.metadata,
        }
    }


def run_exclusive(connection: socket.socket) -> None:
    """Answers calls one after another until the pool hangs up."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    with connection.makefile("rw", encoding="utf-8", newline="\n") as stream:
        for line in stream:
            request = json.loads(line)
            try:
                reply = _answer(request, loop)
            except Exception as error:
                reply = _error_reply(error)
            stream.write(json.dumps({**reply, "id": request["id"]}) + "\n")
            stream.flush()


def _answer(request: dict[str, Any], loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
    task = task_from_dict(request["task"])
    if request["op"] == "load":
        return _load(task)
    return {"outcomes": [outcome_to_dict(outcome) for outcome in score_now(task, loop)]}


async def run_shared(connection: socket.socket, line_limit: int) -> None:
    """Answers calls as they come, all at once, until the pool hangs up."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=line_limit)
    running: set[asyncio.Task] = set()

    async def handle(request: dict[str, Any]) -> None:
        try:
            if request["op"] == "ping":
                reply: dict[str, Any] = {}
            elif request["op"] == "load":
                reply = _load(task_from_dict(request["task"]))
            else:
                results = await score_shared(task_from_dict(request["task"]), request["limit"])
                reply = {"outcomes": [outcome_to_dict(outcome) for outcome in results]}
        except Exception as error:
            reply = _error_reply(error)
        writer.write(json.dumps({**reply, "id": request["id"]}).encode() + b"\n")
        await writer.drain()

    while line := await reader.readline():
        running.add(handler := asyncio.create_task(handle(json.loads(line))))
        handler.add_done_callback(running.discard)


def main() -> None:
    """Entry of the process."""
    path, mode, line_limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # The terminal's Ctrl-C is the service's business; it drains and then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if mode == "exclusive":
        with contextlib.suppress(ServiceError):  # told to whoever asks for the grader
            _load(Task(catalogue.MATH, ()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        connection.sendall(b'{"id": 0}\n')
        if mode == "exclusive":
            run_exclusive(connection)
        else:
            asyncio.run(run_shared(connection, line_limit))


if __name__ == "__main__":
    main()
