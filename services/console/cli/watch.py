"""Follows a run until it ends, on a terminal or line by line; a trainer that restarts is followed through it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import termios
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from tetrarch.rollout.v1 import engine_pb2
from tetrarch.trainer.v1 import trainer_service_pb2 as trainer_pb

from services.common.errors import ServiceError
from services.console.adapters.clients import Clients
from services.console.cli.places import Place
from services.console.cli.view import render, step_line
from services.console.core.history import Event
from services.console.core.watched import Engine, Watched

_ENDED = 9
_POLL_SECONDS = 2.0
_REFRESH_SECONDS = 0.5
_SILENCE_SECONDS = 180.0
"""Longest time without a word of the trainer."""
_STOP_SECONDS = 600.0
_QUIET_KINDS = ("step", "update_weights", "checkpoint")


class Interrupted(Exception):
    """The user asked twice, or what was asked for could not be waited for."""


class Watcher:
    """Follows one run.

    Args:
        clients: of the services.
        watched: what is shown; history from earlier sessions may be in it.
        console: where to show it.
        plain: one line per step instead of a panel.
        place: where the tiers are.
    """

    def __init__(self, clients: Clients, watched: Watched, console: Console, *, plain: bool, place: Place) -> None:
        self._clients = clients
        self._watched = watched
        self._console = console
        self._plain = plain
        self._place = place
        self._heard = time.monotonic()
        self._interrupts = asyncio.Event()
        self.stop_requested = False

    async def follow(self) -> trainer_pb.Progress:
        """Returns the progress at the end of the run. Raises ServiceError, TierFailed, Interrupted."""
        with self._signals(), self._display() as live:
            watching = asyncio.create_task(self._watch())
            helpers = [asyncio.create_task(self._poll()), asyncio.create_task(self._stop_when_asked(watching))]
            if live:
                helpers.append(asyncio.create_task(self._refresh(live)))
            if self._place.supervisor:
                helpers.append(asyncio.create_task(self._end_with_tiers(watching)))
            try:
                return await self._result(watching, helpers)
            finally:
                for task in (watching, *helpers):
                    task.cancel()
                await asyncio.gather(watching, *helpers, return_exceptions=True)
                if live:
                    live.update(render(self._watched), refresh=True)

    async def _result(self, watching: asyncio.Task, helpers: list[asyncio.Task]) -> trainer_pb.Progress:
        """The run's end, or the first helper's error: helpers never end otherwise."""
        done, _ = await asyncio.wait([watching, *helpers], return_when=asyncio.FIRST_COMPLETED)
        for task in helpers:
            if task in done:
                task.result()
        return await watching

    def say(self, text: str) -> None:
        """A sentence for the user, in the panel or on a line of its own."""
        if self._plain:
            self._console.print(text, markup=False, highlight=False)
        else:
            self._watched.notes.append(text)

    # -- what happens in the run

    async def _watch(self) -> trainer_pb.Progress:
        while True:
            try:
                after = self._watched.history.last_event
                async for message in self._clients.watch(self._watched.run_id, after):
                    self._heard = time.monotonic()
                    self._take(message)
                    if message.progress.phase == _ENDED:
                        return message.progress
            except ServiceError as error:
                await self._reconnect(error)
            await asyncio.sleep(1.0)

    async def _reconnect(self, error: ServiceError) -> None:
        """The trainer is gone: its supervisor starts it again; asking to start the run again does no harm."""
        if time.monotonic() - self._heard > _SILENCE_SECONDS:
            raise error
        self.say(f"the trainer does not answer ({error.message}); trying again")
        try:
            await self._clients.start_run(self._watched.run_id)
        except ServiceError as again:
            if again.reason == "RUN_FINISHED":
                raise
            await asyncio.sleep(1.0)

    def _take(self, message: trainer_pb.WatchProgressResponse) -> None:
        watched, progress = self._watched, message.progress
        before = watched.phase
        watched.advance(progress.phase, progress.step_count, progress.total_step_count, progress.policy_version)
        changed = watched.phase != before and progress.phase != _ENDED
        if self._plain and changed and not watched.history.steps:
            self._console.print(f"{watched.phase} …", markup=False)
        for event in message.events:
            watched.add(Event(event.event, event.kind, event.step, dict(event.metrics), event.message))
            if event.kind == "step" and self._plain:
                line = step_line(event.step, watched.total_steps, event.metrics)
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            elif event.kind == "restore" and event.step < 0:
                continue  # a run that begins is no news
            elif event.kind not in _QUIET_KINDS and event.message and (self._plain or event.kind != "eval"):
                self.say(event.message)

    # -- what the others report

    async def _poll(self) -> None:
        """Engines and groups, for the panel."""
        while True:
            with contextlib.suppress(ServiceError):
                nodes = await self._clients.nodes()
                self._watched.engines = tuple(_engine(engine) for node in nodes for engine in node.engines)
                self._watched.problems = tuple(f"{node.node_id}: {node.problem}" for node in nodes if node.problem)
                stats = await self._clients.stats(self._watched.run_id)
                counts = {name: getattr(stats, f"{name}_count") for name in GROUP_STATES}
                self._watched.groups = {name: count for name, count in counts.items() if count}
            await asyncio.sleep(_POLL_SECONDS)

    async def _end_with_tiers(self, watching: asyncio.Task) -> None:
        assert self._place.supervisor
        failure = await self._place.supervisor.wait_failed()
        watching.cancel()
        raise failure

    # -- the terminal

    @contextlib.contextmanager
    def _display(self) -> Iterator[Live | None]:
        if self._plain:
            yield None
            return
        live = Live(render(self._watched), console=self._console, auto_refresh=False, vertical_overflow="ellipsis")
        with _no_control_echo(), live:
            yield live

    async def _refresh(self, live: Live) -> None:
        while True:
            live.update(render(self._watched), refresh=True)
            await asyncio.sleep(_REFRESH_SECONDS)

    # -- stopping

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupts.set)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _stop_when_asked(self, watching: asyncio.Task) -> None:
        """First signal: stop after the step, with a checkpoint. Second: leave at once."""
        await self._interrupts.wait()
        self._interrupts.clear()
        self.stop_requested = True
        self.say("Stopping after this step, with a checkpoint; press Ctrl-C again to leave at once.")
        stopping = asyncio.create_task(self._clients.stop_run(self._watched.run_id, _STOP_SECONDS))
        again = asyncio.create_task(self._interrupts.wait())
        try:
            await asyncio.wait([stopping, again], return_when=asyncio.FIRST_COMPLETED)
            if again.done():
                raise Interrupted(
                    "left before the step was done; what was trained after the last checkpoint is repeated"
                )
            await stopping
            # The stream tells the end; without it the trainer is gone and so is the run.
            await asyncio.wait([watching, again], timeout=10.0, return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():
                raise Interrupted("the trainer did not say that the run ended")
            await asyncio.Event().wait()
        finally:
            for task in (stopping, again):
                task.cancel()
            await asyncio.gather(stopping, again, return_exceptions=True)


@contextlib.contextmanager
def _no_control_echo() -> Iterator[None]:
    """The terminal's own "^C" would move the cursor away from the panel."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):  # no terminal at the input
        yield
        return
    quiet = [*before[:3], before[3] & ~termios.ECHOCTL, *before[4:]]
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


GROUP_STATES = ("pending", "leased", "ready", "reserved", "consumed", "evicted")


def _engine(engine: engine_pb2.Engine) -> Engine:
    state = engine_pb2.EngineState.Name(engine.state).removeprefix("ENGINE_STATE_").lower()
    return Engine(engine.engine_id, state, engine.weight_version, engine.restart_count)
