"""One repetition of a row, and a row of them: strike, watch until all is as before, count.

Full rate: the steps of the run are watched in windows of `SAVE_INTERVAL`, so that each holds one checkpoint. After a
strike the run is back at full rate from the end of the first step on which a window follows that takes no longer than
1 / 0.9 of the undisturbed median; if the window that begins with the last step before the strike does not, the rate
never fell, and the time is 0. A machine that others use may be slower after a strike than before: when full rate
does not come in half a minute, the median is taken anew, a while after all that was struck is of use again.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.recovery.ledger import Ledger
from benchmarks.recovery.world import POLL_SECONDS, SAVE_INTERVAL, Shape, Stuck, World

RATE = 0.9
CALM_SECONDS = 120.0
RECOVER_SECONDS = 150.0
_FIRST, _BETWEEN, _REMEMBERED = 16, 2, 60
"""Undisturbed windows at first, and between two strikes; and of how many the median is taken."""
_PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Struck:
    """A strike that was made.

    Args:
        at: when (time.time()).
        detected: when the product first said or did something about it; None while it has not.
        back: whether, or since when, the victim itself is of use again.
        engines: how many engines were struck, and may have restarted.
        undone: steps that were trained but not committed at that moment, hence done again.
        others: whether those of the same kind that were not struck did what the victim was in the middle of.
    """

    at: float
    detected: Callable[[], Awaitable[float | None]]
    back: Callable[[], Awaitable[float | bool | None]]
    engines: int = 0
    undone: int = 0
    others: Callable[[], Awaitable[bool]] | None = None


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        name: on the command line.
        victim, moment: in the table.
        strike: waits for the moment and strikes; it may heal what it did while it returns from `back`.
        shape: world in which it is measured.
        bars: figure → most it may be.
    """

    name: str
    victim: str
    moment: str
    strike: Callable[[World], Awaitable[Struck]]
    shape: Shape = field(default_factory=Shape)
    bars: dict[str, float] = field(default_factory=dict)


@dataclass
class Repetition:
    """What one strike cost. Seconds since the strike."""

    detect_seconds: float
    steady_seconds: float
    back_seconds: float
    others_seconds: float | None
    """Until those that were not struck did what the victim was in the middle of."""
    steps_repeated: int
    engines_restarted: int
    engines_restarted_needlessly: int
    undisturbed_step_seconds: float


@dataclass
class RowResult:
    """A measured row."""

    name: str
    repetitions: list[Repetition]
    drawn: int
    lost: int
    doubled: int
    faults: list[str]

    def to_json(self) -> dict[str, Any]:
        """As a plain object."""
        return asdict(self)


def window_rates(ends: Sequence[float]) -> list[float]:
    """Mean step seconds of every window of consecutive steps."""
    return [(after - before) / SAVE_INTERVAL for before, after in zip(ends, ends[SAVE_INTERVAL:], strict=False)]


def steady_after(ends: Sequence[float], struck: float, median: float) -> float | None:
    """Seconds from the strike to full rate; None while it is not reached. `ends`: when steps ended, all of them."""
    first = max((index for index, end in enumerate(ends) if end <= struck), default=0)
    for index in range(first, len(ends) - SAVE_INTERVAL):
        if ends[index + SAVE_INTERVAL] - ends[index] <= SAVE_INTERVAL * median / RATE:
            return max(0.0, ends[index] - struck)
    return None


class Measured:
    """Repeats rows in one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ledger = Ledger(world)
        self._calm: deque[float] = deque(maxlen=_REMEMBERED)
        """Mean step seconds of the last undisturbed windows."""
        self._well_since = time.time()

    def _ends(self) -> list[float]:
        return [entry["time"] for entry in self.world.history.read() if entry["kind"] == "step"]

    async def calm(self) -> float:
        """Waits until everything runs and some undisturbed steps are done; → the median seconds of those lately."""
        world = self.world

        async def well() -> bool:
            return all([await world.healthy(name) for name in world.lines]) and await world.serving()

        asked = time.time()
        await world.until(well, CALM_SECONDS, "all well")
        since = self._well_since if time.time() - asked < 1.0 else time.time()
        count = SAVE_INTERVAL + (_BETWEEN if self._calm else _FIRST)

        def enough() -> list[float] | None:
            ends = [end for end in self._ends() if end >= since]
            return ends if len(ends) >= count else None

        self._calm.extend(window_rates(await world.until(enough, CALM_SECONDS, f"{count} undisturbed steps")))
        return statistics.median(self._calm)

    async def repeat(self, row: Row, median: float | None) -> Repetition:
        """One strike, watched to the end; without a `median` the rate is not waited for. Raises Stuck."""
        world = self.world
        lives = await world.incarnations()
        struck = await row.strike(world)
        trained = await self._trained_at(struck)
        seen: dict[str, float] = {}
        if median is None:
            seen["steady"] = 0.0
        if struck.others is None:
            seen["others"] = struck.at
        deadline = time.monotonic() + RECOVER_SECONDS
        while missing := {"detected", "back", "steady", "others"} - seen.keys():
            if time.monotonic() > deadline:
                late = ", ".join(sorted(missing))
                raise Stuck(f"{row.name}: not {late} after {RECOVER_SECONDS:.0f} s. {await world.describe()}")
            await self._look(struck, missing, seen)
            if median and "steady" not in seen:
                waited = time.time() - seen.get("back", time.time())
                if waited > _PATIENCE_SECONDS:
                    self._calm.clear()  # is it the machine that has become slower?
                    median = max(median, await self.calm())
                if (steady := steady_after(self._ends(), struck.at, median)) is not None:
                    seen["steady"] = steady
            await asyncio.sleep(POLL_SECONDS)
        self._well_since = max(seen["back"], struck.at + seen["steady"])
        after = await world.incarnations()
        restarted = sum(after.get(engine) != life for engine, life in lives.items())
        return Repetition(
            detect_seconds=max(0.0, seen["detected"] - struck.at),
            steady_seconds=seen["steady"],
            back_seconds=seen["back"] - struck.at,
            others_seconds=seen["others"] - struck.at if struck.others else None,
            steps_repeated=self._repeated(struck, trained),
            engines_restarted=restarted,
            engines_restarted_needlessly=max(0, restarted - struck.engines),
            undisturbed_step_seconds=median or 0.0,
        )

    @staticmethod
    async def _look(struck: Struck, missing: set[str], seen: dict[str, float]) -> None:
        """Notes what has happened since the last look."""
        if "detected" in missing and (found := await struck.detected()):
            seen["detected"] = found
        if "others" in missing and struck.others and await struck.others():
            seen["others"] = time.time()
        if "back" in missing and (found := await struck.back()):
            seen["back"] = time.time() if found is True else found

    async def _trained_at(self, struck: Struck) -> int:
        """Steps whose training was done when the strike fell, by what the buffer knows right after."""
        steps = [entry for entry in self.world.history.read() if entry["kind"] == "step" and entry["time"] <= struck.at]
        known = int(steps[-1]["step"]) + 1 if steps else 0
        run = await self.world.run()
        return max(known, run.committed_step + 1 if run else 0) + struck.undone

    def _repeated(self, struck: Struck, trained: int) -> int:
        """Steps between what was trained and what the run went on from."""
        restores = self.world.history.since(struck.at, "restore")
        return max(0, trained - int(min(entry["step_count"] for entry in restores))) if restores else 0


async def measure(measured: Measured, row: Row, repetitions: int, say: Callable[[str], None]) -> RowResult:
    """A whole row. Raises Stuck."""
    done: list[Repetition] = []
    for number in itertools.count(1):
        one = await measured.repeat(row, await measured.calm())
        done.append(one)
        say(
            f"{row.name} {number}/{repetitions}: detected {one.detect_seconds:.2f} s, full rate"
            f" {one.steady_seconds:.2f} s, back {one.back_seconds:.2f} s, {one.steps_repeated} steps repeated,"
            f" {one.engines_restarted} engines restarted"
        )
        if number == repetitions:
            break
    verdict = await measured.ledger.close()
    return RowResult(row.name, done, verdict.drawn, verdict.lost, verdict.doubled, list(verdict.faults))
