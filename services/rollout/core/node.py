"""A rollout node: serves the newest active run of the buffer, one after the other.

It polls for runs, brings up engines for a run, keeps them for a next run with the same engine settings, and
says what it does to the registry. Invariants: at most one run is served at a time; the engines of one run never
answer for another before new weights were verified; the loop outlives every failure, which `problem` names.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.errors import Code, ServiceError
from services.common.telemetry import get_logger
from services.rollout.core.counters import Counters
from services.rollout.core.engine_port import EngineFactory, Router
from services.rollout.core.filters import make_filter
from services.rollout.core.fleet import EngineSlot, Fleet
from services.rollout.core.generate import check_function
from services.rollout.core.ports import ActiveRun, PromptBuffer, Scorer, Teacher, Tokenizer
from services.rollout.core.replay import check_replay
from services.rollout.core.run_settings import FleetSettings, RunSettings
from services.rollout.core.session import RunSession, Services
from services.rollout.core.supervisor import Supervisor
from services.rollout.core.weight_files import VersionFiles

log = get_logger(__name__)

_FINAL = (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.NOT_FOUND)
"""Codes of failures that trying again cannot mend."""


@dataclass(frozen=True)
class Outside:
    """How a node reaches the world; the composition root fills it."""

    buffer: PromptBuffer
    scorer: Scorer
    read_run: Callable[[ActiveRun], RunSettings]
    load_tokenizer: Callable[[str], Tokenizer]
    make_factory: Callable[[FleetSettings], EngineFactory]
    make_router: Callable[[FleetSettings], Router]
    open_files: Callable[[RunSettings], VersionFiles | None] = lambda run: None
    """A run's weights as files."""
    open_teacher: Callable[[RunSettings], Teacher | None] = lambda run: None
    """Of a run that distils one behind a URL."""


@dataclass(frozen=True)
class NodeSettings:
    """Times in seconds."""

    node_id: str
    poll_seconds: float = 1.0
    linger_seconds: float = 30.0
    """How long engines outlive their run, for a next run with the same engine settings."""
    drain_seconds: float = 5.0
    engine_count: int | None = None
    """Engines of this node; None takes the run's number."""
    log_dir: Path | None = None


@dataclass
class _Engines:
    settings: FleetSettings
    fleet: Fleet
    supervisor: Supervisor


class Node:
    """The node.

    Args:
        settings: of the node.
        outside: buffer, reward service and engines.
    """

    def __init__(self, settings: NodeSettings, outside: Outside) -> None:
        self.node_id = settings.node_id
        self.incarnation = uuid.uuid4().hex[:12]
        self.counters = Counters()
        self.session: RunSession | None = None
        self._settings = settings
        self._outside = outside
        self._engines: _Engines | None = None
        self._ended_at: float | None = None
        self._problem = ""
        self._refused: str | None = None
        """Run that cannot be served as it is; not tried again every second."""
        self._draining = False

    @property
    def run_id(self) -> str:
        """Run it serves; empty when idle."""
        return self.session.run.run_id if self.session else ""

    @property
    def draining(self) -> bool:
        """It takes no more prompts of its run."""
        return self._draining or (self.session is not None and self.session.draining)

    @property
    def router_url(self) -> str:
        """Base URL of the router; empty without one."""
        return self._engines.fleet.router.url if self._engines else ""

    @property
    def slots(self) -> list[EngineSlot]:
        """Engines of the node."""
        return self._engines.fleet.slots if self._engines else []

    @property
    def problem(self) -> str:
        """One sentence when the node cannot serve its run, or not fully; empty otherwise."""
        if self._problem:
            return self._problem
        if self.session and self.session.problem:
            return self.session.problem
        return next((slot.problem for slot in self.slots if slot.problem), "")

    def served(self, run_id: str) -> RunSession:
        """The session of a run ("" is the current one). Raises RUN_NOT_SERVED."""
        if self.session is None or run_id not in ("", self.session.run.run_id):
            current = f"serves run {self.run_id!r}" if self.session else "serves no run"
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "RUN_NOT_SERVED",
                f"Node {self.node_id} {current}, not {run_id!r}: it takes the newest active run."
                + (f" Its problem: {self.problem}" if self.problem else ""),
                run_id=run_id,
                node_id=self.node_id,
            )
        return self.session

    async def serve(self) -> None:
        """Follows the buffer's runs until cancelled."""
        while not self._draining:
            try:
                # Looked at before the buffer is asked: a run that had ended and is active now was opened again.
                ended = self.session is not None and self.session.run_ended
                await self._follow(await self._outside.buffer.newest_active_run(), reopened=ended)
            except ServiceError as error:
                self._problem = f"The buffer does not answer: {error}"
                log.warning("runs cannot be listed", error=str(error))
            except Exception as error:
                self._problem = f"{type(error).__name__}: {error}"
                log.exception("the node failed to follow its run")
            await asyncio.sleep(self._settings.poll_seconds)

    async def _follow(self, run: ActiveRun | None, *, reopened: bool) -> None:
        if run is not None and run.run_id == self._refused:
            return
        self._refused, self._problem = None, ""
        if run is None:
            await self._linger()
            return
        if self.session is not None and run.run_id == self.run_id and self._ended_at is None and not reopened:
            self.session.policy_version = run.policy_version
            return
        await self._leave_run()
        try:
            await self._take(self._outside.read_run(run), run.birth)
        except ServiceError as error:
            await self._stop_engines()
            if error.code in _FINAL:
                self._refused = run.run_id
            self._problem = f"Run {run.run_id} cannot be served: {error}"
            log.warning("run cannot be served", run=run.run_id, error=str(error))

    async def _take(self, run: RunSettings, birth: str) -> None:
        check_function(run)
        make_filter(run)
        await asyncio.to_thread(check_replay, run)
        tokenizer = await asyncio.to_thread(self._outside.load_tokenizer, run.checkpoint)
        fleet = None
        if run.sft:
            await self._stop_engines()
        else:
            fleet = await self._engines_for(run.fleet)
            await fleet.begin_run(run.run_id, birth)
        files = self._outside.open_files(run) if run.files else None
        teacher = self._outside.open_teacher(run)
        services = Services(self._outside.buffer, self._outside.scorer, self.counters, files, teacher)
        self.session = RunSession(run, services, tokenizer, fleet)
        self.session.start()
        log.info("run taken", run=run.run_id, engines=len(self.slots), supervised=run.sft)

    async def _engines_for(self, settings: FleetSettings) -> Fleet:
        """Running engines with equal settings; else new ones."""
        if self._engines is not None and self._engines.settings == settings:
            return self._engines.fleet
        await self._stop_engines()
        count = self._settings.engine_count or settings.engine_count
        fleet = Fleet(self.node_id, count, self._outside.make_router(settings))
        ours = replace(settings, launch=replace(settings.launch, engine_count=count))
        supervisor = Supervisor(fleet, self._outside.make_factory(settings), ours, self._settings.log_dir)
        self._engines = _Engines(settings, fleet, supervisor)
        try:
            await supervisor.start()
        except BaseException:
            await self._stop_engines()
            raise
        return fleet

    async def _linger(self) -> None:
        """No active run: leasing stops at once, the engines a while later."""
        if self.session is None:
            await self._stop_engines()
            return
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            log.info("run ended", run=self.run_id)
            await self.session.drain(0.0, keep=False)
        if self.session.run.sft or time.monotonic() - self._ended_at > self._settings.linger_seconds:
            await self._leave_run()
            await self._stop_engines()

    async def _leave_run(self) -> None:
        session, self.session, self._ended_at = self.session, None, None
        if session is not None:
            await session.stop(0.0)

    async def _stop_engines(self) -> None:
        engines, self._engines = self._engines, None
        if engines is not None:
            await engines.supervisor.stop()

    async def drain(self, max_wait: float) -> int:
        """Stops leasing in the current run; returns the groups that were given back."""
        return await self.session.drain(max_wait) if self.session else 0

    async def stop(self) -> None:
        """Gives leases back, leaves the registry, stops the engines. The caller ends `serve` first."""
        self._draining = True
        await self.drain(self._settings.drain_seconds)
        with contextlib.suppress(ServiceError):
            await self._outside.buffer.unregister(self.node_id)
        await self._leave_run()
        await self._stop_engines()
