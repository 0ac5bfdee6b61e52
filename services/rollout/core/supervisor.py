"""Keeps the engines of a fleet alive: starts, watches, buries and restarts each on its own.

One task per slot; a dead engine never stops the others. Invariants: an engine that exits leaves the router at
once, one that hangs or was stopped at its first failed check; a restart is preceded by a pause that doubles up to
`_MAX_BACKOFF` seconds; after a failure that a restart cannot mend the slot stays DEAD with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from services.common.errors import Code, ServiceError
from services.common.process import ManagedProcess, free_port
from services.common.process_group import any_stopped, members
from services.common.telemetry import get_logger
from services.rollout.core.engine_port import HIGHEST_PORT, EngineFactory
from services.rollout.core.engine_state import EngineEvent, EngineState
from services.rollout.core.fleet import EngineSlot, Fleet
from services.rollout.core.run_settings import FleetSettings

log = get_logger(__name__)

ENGINE_ID = "TETRARCH_ENGINE_ID"
"""Variable that tells an engine's process its id."""
_FIRST_BACKOFF, _MAX_BACKOFF = 0.5, 30.0
"""An engine that has served starts over with the shortest pause, however often something strikes it."""
_START_POLL = 0.25
_LAST_WORDS_SECONDS = 0.2
_RECHECK_SECONDS = 0.2
_SILENT_SECONDS = 30.0
"""An engine that fails every check for so long is replaced; it is out of the router from the first. Not sooner: one
that starves on a busy machine answers late, and its successor would starve as well. An engine whose process ended, or
was stopped, is noticed without any check."""
_STOPPED_SECONDS = 1.0
"""A process that was stopped by a signal does not come back by itself. Its requests go on elsewhere once it is dead."""
_PERMANENT = (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION)


class Supervisor:
    """Runs the processes of a fleet.

    Args:
        fleet: slots to fill.
        factory: builds command and client of an engine.
        settings: what each engine is started with.
        log_dir: one log file per engine is written here; None writes none.
    """

    def __init__(self, fleet: Fleet, factory: EngineFactory, settings: FleetSettings, log_dir: Path | None) -> None:
        self._fleet = fleet
        self._factory = factory
        self._settings = settings
        self._log_dir = log_dir
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts the router, then all engines; returns before the engines are up."""
        await self._fleet.router.start()
        self._tasks = [asyncio.create_task(self._keep(slot), name=slot.engine_id) for slot in self._fleet.slots]

    async def stop(self) -> None:
        """Stops engines and router."""
        for slot in self._fleet.slots:
            if slot.state is not EngineState.DEAD:
                slot.see(EngineEvent.DRAINED)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fleet.router.stop()

    async def _keep(self, slot: EngineSlot) -> None:
        backoff = _FIRST_BACKOFF
        while True:
            permanent = False
            try:
                await self._launch(slot)
                why = await self._watch(slot)
            except ServiceError as error:
                why, permanent = str(error), error.code in _PERMANENT
            except asyncio.CancelledError:
                await self._bury(slot, "the node stops")
                raise
            except Exception as error:
                log.exception("engine supervision failed", engine=slot.engine_id)
                why = f"{type(error).__name__}: {error}"
            await self._bury(slot, why)
            if permanent or not self._settings.restart:
                remedy = "" if permanent else " It is not restarted because use_fault_tolerance is off."
                slot.problem = f"Engine {slot.engine_id} is dead: {why}{remedy}"
                log.error("engine stays dead", engine=slot.engine_id, why=why)
                return
            backoff = _FIRST_BACKOFF if slot.served else backoff
            log.warning("engine restarts", engine=slot.engine_id, why=why, after_seconds=backoff)
            slot.problem = f"Engine {slot.engine_id} restarts: {why}"
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF)

    async def _launch(self, slot: EngineSlot) -> None:
        """STARTING to STALE, or raises with the reason and the last lines of output."""
        slot.see(EngineEvent.STARTED)
        slot.reborn(self._fleet.new_incarnation())
        launch = self._factory.build(slot.index, free_port(highest=HIGHEST_PORT), self._settings.launch)
        log_path = self._log_dir / f"{slot.engine_id}.log" if self._log_dir else None
        env = {**launch.env, ENGINE_ID: slot.engine_id}
        slot.process = ManagedProcess(slot.engine_id, launch.argv, env=env, log_path=log_path)
        slot.engine = launch.engine
        await slot.process.start()
        deadline = time.monotonic() + launch.start_seconds
        while not await launch.engine.health(self._settings.health_timeout):
            if not slot.process.running:
                raise self._failed(slot, f"its process ended with status {await slot.process.wait()} while starting")
            if time.monotonic() > deadline:
                raise self._failed(slot, f"it was not healthy within {launch.start_seconds:.0f} s")
            await asyncio.sleep(_START_POLL)
        slot.info = await launch.engine.info()
        slot.problem = ""
        slot.see(EngineEvent.CAME_UP)

    async def _watch(self, slot: EngineSlot) -> str:
        """Returns why the engine must be buried."""
        assert slot.process is not None
        assert slot.engine is not None
        ended = asyncio.create_task(slot.process.wait())
        broken = asyncio.create_task(slot.engine.ended())
        patience = _Patience(members(slot.process.pid) if slot.process.pid else [], self._settings.health_timeout)
        try:
            while True:
                pause = min(_RECHECK_SECONDS, self._settings.health_interval)
                pause = pause if patience.tried else self._settings.health_interval
                woken = asyncio.create_task(slot.wake.wait())
                done, _ = await asyncio.wait({ended, broken, woken}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                if ended in done:
                    return f"its process ended with status {ended.result()}{_tail(slot)}"
                if broken in done:  # the one that was started notices a little later, if at all
                    await asyncio.wait({ended}, timeout=_LAST_WORDS_SECONDS)
                    return f"a process of it ended{_tail(slot)}"
                if slot.condemned:
                    return slot.condemned
                stopped = any_stopped(patience.pids)
                if not stopped and await slot.engine.health(self._settings.health_timeout):
                    patience.renew()
                    await self._route_again(slot)
                    continue
                await self._fleet.unroute(slot)
                why = patience.try_once(stopped)
                if why:
                    return why
        finally:
            ended.cancel()
            broken.cancel()

    async def _route_again(self, slot: EngineSlot) -> None:
        """A READY engine that had left the router (a failed check, a busy router) goes back."""
        try:
            await self._fleet.route(slot)
        except ServiceError as error:
            log.warning("router did not take an engine", engine=slot.engine_id, error=str(error))

    async def _bury(self, slot: EngineSlot, why: str) -> None:
        # The process first: its death ends the requests inside it, so the router can retry them elsewhere.
        if slot.process is not None:
            with contextlib.suppress(ProcessLookupError):
                await slot.process.stop(2.0 if slot.state is EngineState.DRAINING else 0.0)
        await self._fleet.unroute(slot)
        if slot.state is not EngineState.DEAD:
            slot.see(EngineEvent.DIED)
        slot.version = 0
        if slot.engine is not None:
            await slot.engine.close()
        log.info("engine buried", engine=slot.engine_id, why=why)

    def _failed(self, slot: EngineSlot, why: str) -> ServiceError:
        return ServiceError(
            Code.UNAVAILABLE,
            "ENGINE_UNAVAILABLE",
            f"Engine {slot.engine_id} did not come up: {why}{_tail(slot)}",
            engine_id=slot.engine_id,
        )


class _Patience:
    """How long an engine that fails its checks is waited for. `pids`: its processes."""

    def __init__(self, pids: Sequence[int], check_seconds: float) -> None:
        self.pids = pids
        self._check_seconds = check_seconds
        self._silent_since: float | None = None
        self._stopped_since: float | None = None

    @property
    def tried(self) -> bool:
        """The last check failed."""
        return self._silent_since is not None or self._stopped_since is not None

    def renew(self) -> None:
        """It is well."""
        self._silent_since = self._stopped_since = None

    def try_once(self, stopped: bool) -> str:
        """Notes a failed check; → why no other follows, or nothing."""
        if stopped:
            self._stopped_since = self._stopped_since or time.monotonic()
            if time.monotonic() - self._stopped_since >= _STOPPED_SECONDS:
                return "a process of it was stopped by a signal"
            return ""
        self._stopped_since = None
        # A failed check has itself lasted as long as it may.
        self._silent_since = self._silent_since or time.monotonic() - self._check_seconds
        if time.monotonic() - self._silent_since < _SILENT_SECONDS:
            return ""
        return f"it failed every health check for {_SILENT_SECONDS:g} s"


def _tail(slot: EngineSlot) -> str:
    """The last lines of the engine's output, for the sentence that reports its end."""
    lines = [line.strip() for line in (slot.process.tail(3) if slot.process else []) if line.strip()]
    return f"; its last output: {' | '.join(lines)[-400:]}" if lines else "."
