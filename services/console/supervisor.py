"""Starts the tiers of one machine, keeps them running and stops them in reverse.

Knows processes and when they are ready, nothing of what they do.

Invariants: a tier counts as started only when it is ready; one that dies is started again at once, and after a growing
pause when it dies again before it was of any use, a bounded number of times in a row; every wait has a deadline;
nothing outlives the supervisor (see ManagedProcess).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.common.process import ManagedProcess


@dataclass(frozen=True)
class Tier:
    """One process.

    `ready` answers an empty string, or why it cannot be used yet; `stop_seconds` is how long it may finish its work
    after SIGTERM; `patient` says that it may have work to finish.
    """

    name: str
    argv: tuple[str, ...]
    ready: Callable[[], Awaitable[str]]
    env: Mapping[str, str] = field(default_factory=dict)
    stop_seconds: float = 10.0
    patient: bool = True


@dataclass(frozen=True)
class Patience:
    """How long and how often the supervisor tries. Seconds.

    A tier that was ready for `stable` seconds owes nothing for earlier deaths: however often something strikes it from
    outside, it is started again. `restarts` bounds the deaths in a row of one that was not.
    """

    start: float = 90.0
    first_pause: float = 0.5
    longest_pause: float = 10.0
    restarts: int = 5
    stable: float = 2.0
    poll: float = 0.1


class TierFailed(Exception):
    """A tier could not be started or kept running; the message names it, says why and ends with its last output."""


class Supervisor:
    """The tiers of one machine.

    Args:
        stages: tiers that may start at the same time, stage after stage; stopped in reverse.
        log_dir: one file per tier.
        on_line: called with tier and line of output.
        on_note: called with one sentence when something happens that a user should know.
        patience: deadlines and restarts.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Tier]],
        log_dir: Path,
        *,
        on_line: Callable[[str, str], None] = lambda _tier, _line: None,
        on_note: Callable[[str], None] = lambda _text: None,
        patience: Patience | None = None,
    ) -> None:
        self._stages = [list(stage) for stage in stages]
        self._log_dir = log_dir
        self._on_line = on_line
        self._on_note = on_note
        self._patience = patience or Patience()
        self._processes: dict[str, ManagedProcess] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[TierFailed] | None = None

    def pid(self, name: str) -> int:
        """Process id of a tier; 0 when it does not run."""
        process = self._processes.get(name)
        return process.pid if process and process.running else 0

    async def start(self, on_stage: Callable[[int], Awaitable[None]] | None = None) -> None:
        """Starts every stage and waits until it is ready. Raises TierFailed, with everything stopped again.

        `on_stage` is called when a stage (counted from 0) is ready, before the next one starts.
        """
        self._failed = asyncio.get_running_loop().create_future()
        try:
            for index, stage in enumerate(self._stages):
                await asyncio.gather(*(self._launch(tier) for tier in stage))
                if on_stage:
                    await on_stage(index)
        except BaseException:
            await self.stop()
            raise
        tiers = [tier for stage in self._stages for tier in stage]
        self._keepers = [asyncio.create_task(self._keep(tier), name=f"keeper of {tier.name}") for tier in tiers]

    async def wait_failed(self) -> TierFailed:
        """Waits until a tier cannot be kept running."""
        assert self._failed, "start() comes first"
        return await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """Stops everything in reverse order of stages. Safe to call twice."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers = []
        for stage in reversed(self._stages):
            running = [(self._processes.get(tier.name), tier.stop_seconds) for tier in stage]
            await asyncio.gather(*(process.stop(seconds) for process, seconds in running if process))

    def hurry(self) -> None:
        """Stops waiting for tiers that finish their work: a stop in progress, or the next one, is immediate."""
        for stage in self._stages:
            for tier in stage:
                # The store has nothing to finish, and ends cleanly within its own second.
                if tier.patient and (process := self._processes.get(tier.name)):
                    process.signal(signal.SIGKILL)
        for keeper in self._keepers:
            keeper.cancel()

    async def _launch(self, tier: Tier) -> None:
        """Starts a tier and waits until it is ready. Raises TierFailed."""
        process = ManagedProcess(
            tier.name,
            tier.argv,
            env=tier.env,
            log_path=self._log_dir / f"{tier.name}.log",
            on_line=lambda line: self._on_line(tier.name, line),
        )
        self._processes[tier.name] = process
        await process.start()
        deadline = time.monotonic() + self._patience.start
        why = "it did not answer"
        while time.monotonic() < deadline:
            if not process.running:
                await process.wait()
                raise TierFailed(
                    self._about(process, f"{tier.name} ended with status {process.returncode} at its start")
                )
            if not (why := await tier.ready()):
                return
            await asyncio.sleep(self._patience.poll)
        raise TierFailed(
            self._about(process, f"{tier.name} was not ready within {self._patience.start:.0f} seconds: {why}")
        )

    def _about(self, process: ManagedProcess, what: str) -> str:
        lines = process.tail(15)
        output = "; its last output:\n" + "\n".join(f"  {line}" for line in lines) if lines else "; it wrote nothing."
        return f"{what} (log: {self._log_dir / process.name}.log){output}"

    async def _keep(self, tier: Tier) -> None:
        """Starts a tier again whenever it dies, until that happens too often."""
        patience, deaths, ready_at = self._patience, 0, time.monotonic()
        while True:
            process = self._processes[tier.name]
            status = await process.wait()
            deaths = 1 if time.monotonic() - ready_at >= patience.stable else deaths + 1
            if deaths > patience.restarts:
                self._give_up(self._about(process, f"{tier.name} died {deaths} times in a row"))
                return
            pause = min(patience.longest_pause, patience.first_pause * 2 ** (deaths - 2)) if deaths > 1 else 0.0
            self._on_note(
                f"{tier.name} ended ({_status(status)}); starting it again{f' in {pause:.1f} s' if pause else ''}."
            )
            await process.stop(0)  # whatever it left behind in its group
            await asyncio.sleep(pause)
            ready_at = math.inf  # a failed start is one more death
            with contextlib.suppress(TierFailed):
                await self._launch(tier)
                ready_at = time.monotonic()
                self._on_note(f"{tier.name} is back.")
                continue
            await self._processes[tier.name].stop(0)

    def _give_up(self, why: str) -> None:
        if self._failed and not self._failed.done():
            self._failed.set_result(TierFailed(why))


def _status(number: int) -> str:
    return f"signal {-number}" if number < 0 else f"status {number}"
