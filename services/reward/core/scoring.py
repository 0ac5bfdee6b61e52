"""Scores a batch: chooses graders, spreads items over workers, keeps the budget.

Invariants: every item of a job has exactly one outcome, in order; an item whose grader fails, hangs or crashes
costs no other item its reward; the answer is there when the budget is over. Nothing here blocks the event loop:
only `exact_match` without a regular expression runs inline.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any, Protocol

from services.common.errors import invalid_field
from services.reward.core import catalogue
from services.reward.core.exact_match import parse_options, score_exact_match
from services.reward.core.records import Job, Outcome, Task, Unscored, unscored

_INLINE_BATCH = 16
# Items of a built-in grader that travel to a worker together: the way there costs more than most answers do.
_SHARE = 4


class Workers(Protocol):
    """Processes in which graders run. Deadlines are `time.monotonic()` values."""

    async def load(self, task: Task, deadline: float) -> bool:
        """Imports the task's grader; True when it is async. Raises GRADER_NOT_LOADABLE, TimeoutError."""
        ...

    async def run(self, task: Task, deadline: float) -> list[Outcome]:
        """Scores a task in a worker of its own. Never raises for a fault of the grader.

        The items of a task that is not grouped are independent: one that hangs or crashes costs no other its reward.
        """
        ...

    async def run_shared(self, task: Task, deadline: float) -> list[Outcome]:
        """Scores a task of an async function beside others."""
        ...


class Scorer:
    """Scores jobs on `workers`."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def score(self, job: Job, budget: float) -> list[Outcome]:
        """Outcomes of a job's items within `budget` seconds.

        Raises GRADER_NOT_FOUND, GRADER_NOT_LOADABLE, INVALID_FIELD. A job without items checks its grader only.
        """
        deadline = time.monotonic() + budget
        graders = [catalogue.grader_of(item, job) for item in job.items]
        known = set(graders) | ({catalogue.check_grader(job.grader)} if job.grader else set())
        for name in known:
            if job.grader:  # options belong to the grader that was asked for, not to whatever rm_type names
                catalogue.check_options(name, job.options)
            if name == catalogue.CUSTOM and not job.custom_path:
                raise invalid_field("custom_path", "", "the custom grader needs the import path of a function")
        results: list[Outcome | None] = [None] * len(job.items)
        await asyncio.gather(
            *(
                self._score_with(name, job, [i for i, other in enumerate(graders) if other == name], results, deadline)
                for name in known
            )
        )
        return [outcome or _late(budget) for outcome in results]

    async def _score_with(
        self, name: str, job: Job, indices: list[int], results: list[Outcome | None], deadline: float
    ) -> None:
        """Fills in the outcomes of the items of one grader."""
        options = job.options if job.grader else {}
        if name == catalogue.EXACT_MATCH and not _has_pattern(options):
            await _score_inline(job, indices, results, options)
            return
        path = job.custom_path if name == catalogue.CUSTOM else ""
        try:
            is_async = await self._workers.load(Task(name, (), options, path), deadline)
        except TimeoutError:
            return
        grouped = job.grouped and name == catalogue.CUSTOM
        size = len(indices) if grouped else 1 if name == catalogue.CUSTOM else _SHARE
        shares = [indices[start : start + size] for start in range(0, len(indices), max(1, size))]
        run = self._workers.run_shared if is_async else self._workers.run

        async def score(share: list[int]) -> None:
            task = Task(name, tuple(job.items[index] for index in share), options, path, grouped)
            for index, outcome in zip(share, await run(task, deadline), strict=True):
                results[index] = outcome

        await asyncio.gather(*map(score, shares))


def _has_pattern(options: dict[str, Any]) -> bool:
    return bool(options.get("pattern") or options.get("label_pattern"))


async def _score_inline(job: Job, indices: list[int], results: list[Outcome | None], options: dict[str, Any]) -> None:
    """exact_match on the event loop, which gets its turn every few items."""
    parsed = parse_options(options)
    for count, index in enumerate(indices, start=1):
        started = time.monotonic()
        outcome = score_exact_match(job.items[index], parsed)
        results[index] = replace(outcome, seconds=time.monotonic() - started)
        if count % _INLINE_BATCH == 0:
            await asyncio.sleep(0)


def _late(budget: float) -> Outcome:
    return unscored(Unscored.TIMEOUT, f"The grader was not ready within the budget of {budget:.3g} s.")
