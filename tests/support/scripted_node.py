"""A rollout node whose engines are `scripted_engines`: the real fleet, supervisor, weight updates and servicer.

`look` is called at every turn of the loop and holds the protocol to its promises; `calls` reach the servicer as over a
network that delays, loses and cuts. Runs on `virtual_time`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from services.common.errors import Code, ServiceError
from services.rollout.core import supervisor as supervisors
from services.rollout.core.counters import Counters
from services.rollout.core.engine_port import LaunchSpec
from services.rollout.core.engine_state import EngineState
from services.rollout.core.fleet import EngineSlot, Fleet
from services.rollout.core.run_settings import FleetSettings
from services.rollout.core.weights import WeightUpdates
from services.rollout.servicer_weights import WeightServicer
from tests.support.scripted_engines import Process, ScriptedFactory
from tests.support.scripted_wires import Wires, contents

RUN = "r"


class ScriptedRouter:
    """Who is routed to."""

    url = "http://router"

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self.urls: set[str] = set()

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    async def add_worker(self, url: str, _limits: Any) -> None:
        await asyncio.sleep(self._wires.moment())
        if self._wires.strike(0.05):
            raise ServiceError(Code.UNAVAILABLE, "ROUTER_UNAVAILABLE", "The router is busy.")
        self.urls.add(url)

    async def remove_worker(self, url: str) -> None:
        await asyncio.sleep(self._wires.moment())
        self.urls.discard(url)


@dataclass
class _Seen:
    """What a process was when `look` saw it last."""

    fence: int = 0
    held: dict[str, str] | None = None


class ScriptedNode:
    """One node of `count` engines in run RUN.

    Args:
        wires: chance and groups.
        count: engines.
        update_timeout: of the run.
        staging: whether its engines can stage.
    """

    def __init__(self, wires: Wires, count: int, update_timeout: float, *, staging: bool) -> None:
        self.wires = wires
        self.router = ScriptedRouter(wires)
        self.fleet = Fleet("n", count, self.router)
        self._factory = ScriptedFactory(wires, update_timeout, stages=staging)
        launch = LaunchSpec(Path("/nowhere"), group_timeout=update_timeout)
        settings = FleetSettings("scripted", launch, count, "round_robin", health_interval=2.0, health_timeout=2.0)
        self._supervisor = supervisors.Supervisor(self.fleet, self._factory, settings, None)
        self._update_timeout = update_timeout
        self._seen = {slot.engine_id: _Seen() for slot in self.fleet.slots}
        self.epochs: dict[int, int] = {}
        """Epoch → version, of every update that was begun."""
        self.prepared = dict.fromkeys(self._seen, 0)
        """Engine → newest epoch whose Prepare succeeded."""
        self.senders_keep_order = False
        """A group carries the bytes of the update that was prepared for it last."""
        self.late: list[str] = []
        self.begin_session()

    def begin_session(self) -> None:
        """The node takes the run."""
        self.updates = WeightUpdates(self.fleet, Counters(), "retract", self._update_timeout)
        run = SimpleNamespace(run_id=RUN, update_timeout=self._update_timeout)
        session = SimpleNamespace(run=run, updates=self.updates)
        self.servicer = WeightServicer(SimpleNamespace(served=lambda _: session))

    async def retake(self) -> None:
        """It leaves the run and takes it again, as when the run was opened anew."""
        self.servicer = WeightServicer(SimpleNamespace(served=_serves_no_run))
        await self.updates.close()
        await self.fleet.begin_run(RUN, "")
        self.begin_session()

    async def strike_at_random(self) -> None:
        """Something happens to an engine, or to the node's run."""
        random = self.wires.random
        process, chance = self.process(random.choice(self.fleet.slots)), random.random()
        if chance < 0.15:
            await self.retake()
        elif process is None:
            return
        elif chance < 0.5:
            process.die()
        elif chance < 0.8:
            process.moving.clear()
            asyncio.get_running_loop().call_later(random.choice((0.1, 3.0, 40.0)), process.moving.set)
        else:
            process.lies = not process.lies

    def calm_down(self) -> None:
        """Nothing goes wrong any more."""
        self.wires.calm = True
        for process in filter(None, map(self.process, self.fleet.slots)):
            process.lies = False

    def assert_at_rest(self) -> None:
        """Long after the last message: READY and routed, or STALE and not; nobody waits, nobody is in the way."""
        assert not self.late, self.late
        for slot in self.fleet.slots:
            process = self.process(slot)
            assert process is not None, f"{slot.engine_id} was not brought up again: {slot.problem}"
            routed = slot.engine.url in self.router.urls
            assert (slot.state, routed) in ((EngineState.READY, True), (EngineState.STALE, False)), (slot.state, routed)
            assert not process.busy, f"{slot.engine_id} is still asked for {process.busy} things"
            if slot.state is EngineState.READY:
                assert not process.paused
                assert not process.updating

    @contextlib.asynccontextmanager
    async def running(self):
        """Its engines are kept alive meanwhile."""
        with mock.patch.object(supervisors, "ManagedProcess", self._factory.process):
            await self.fleet.begin_run(RUN, "")
            await self._supervisor.start()
            try:
                yield self
            finally:
                await self._supervisor.stop()

    def process(self, slot: EngineSlot) -> Process | None:
        """The process behind a slot, as long as it runs."""
        process = slot.process
        return process if process is not None and process.running else None

    def look(self) -> None:
        """At every turn of the loop."""
        for slot in self.fleet.slots:
            process, seen = self.process(slot), self._seen[slot.engine_id]
            assert slot.fence >= seen.fence, f"the fence of {slot.engine_id} fell from {seen.fence} to {slot.fence}"
            seen.fence = slot.fence
            if process is None:
                continue
            assert not process.broken_promises, process.broken_promises
            if slot.state is EngineState.READY:
                assert slot.version > 0
                assert process.held == contents(slot.version), (
                    f"{slot.engine_id} is READY at {slot.version}: {process.held}"
                )
                assert process.label == slot.version
            if slot.engine.url in self.router.urls and not process.paused and slot.state is not EngineState.DRAINING:
                assert process.held == contents(process.label), (
                    f"{slot.engine_id} serves {process.held} as {process.label}"
                )
            if seen.held is not None and process.held != seen.held and process.names_used:
                assert slot.state is EngineState.UPDATING or slot.condemned, (
                    f"bytes reach {slot.engine_id} in no update"
                )
                if self.senders_keep_order:
                    self._check_arrival(slot, set(process.held.values()) - set(seen.held.values()))
            seen.held = dict(process.held)

    def _check_arrival(self, slot: EngineSlot, arrived: set[str]) -> None:
        """After a newer Prepare no older epoch changes what an engine holds."""
        versions = {word.split("@")[1] for word in arrived if "@" in word}
        prepared = self.prepared[slot.engine_id]
        allowed = {str(version) for epoch, version in self.epochs.items() if epoch >= prepared}
        assert versions <= allowed, f"{slot.engine_id} takes {versions}, but is prepared for epoch {prepared}"


def _serves_no_run(_run_id: str) -> Any:
    raise ServiceError(Code.FAILED_PRECONDITION, "RUN_NOT_SERVED", "The node serves no run.")


class Network:
    """Calls from one trainer to a node, with a deadline each, as gRPC makes them: the handler ends with its caller's
    wait. `cut`: nothing comes through, in either direction."""

    def __init__(self, node: ScriptedNode) -> None:
        self.node = node
        self.cut = False
        self._handlers: set[asyncio.Task] = set()

    def __getattr__(self, method: str):
        async def call(message: Any, timeout: float) -> Any:
            return await self._call(method, message, timeout)

        return call

    async def _call(self, method: str, message: Any, timeout: float) -> Any:
        began = time.monotonic()
        handler: asyncio.Task | None = None
        if method == "PrepareUpdate":
            self.node.epochs[message.update_epoch] = message.version
        try:
            async with asyncio.timeout(timeout):
                await self._travel()
                context = SimpleNamespace(time_remaining=lambda: began + timeout - time.monotonic())
                handler = asyncio.create_task(getattr(self.node.servicer, method)(message, context))
                self._handlers.add(handler)
                handler.add_done_callback(self._handlers.discard)
                await asyncio.wait({handler})
                if method == "PrepareUpdate" and not handler.cancelled() and not handler.exception():
                    prepared = self.node.prepared
                    prepared[message.engine_id] = max(prepared[message.engine_id], message.update_epoch)
                await self._travel()
        except TimeoutError:
            raise ServiceError(
                Code.DEADLINE_EXCEEDED, "ENGINE_SILENT", f"{method}: no answer in {timeout:g} s."
            ) from None
        finally:
            if handler is not None and not handler.done():
                handler.cancel()
                handler.add_done_callback(lambda task: task.cancelled() or task.exception())
                asyncio.get_running_loop().call_later(1.0, self._must_be_done, method, handler)
        if handler.cancelled():
            raise ServiceError(Code.UNAVAILABLE, "CANCELLED", f"{method} was cancelled by the node.")
        return handler.result()

    def _must_be_done(self, method: str, handler: asyncio.Task) -> None:
        if not handler.done():
            self.node.late.append(f"{method} goes on after its deadline")

    async def _travel(self) -> None:
        await asyncio.sleep(self.node.wires.moment(0.05))
        if self.node.wires.strike(0.02):
            raise ServiceError(Code.UNAVAILABLE, "UNAVAILABLE", "The connection was reset.")
        while self.cut:
            await asyncio.sleep(0.5)
