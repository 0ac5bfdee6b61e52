"""Keeps the engines of a run at the published version: full pushes of a new one, and late joiners in between.

Knows nothing of how bytes travel (`weights`). Invariants: a version is published only when an engine serves it; a
late joiner gets the published version, in a group that holds no other engine and beside whatever the ranks do: only
`stage` needs them. A full push ends what late joiners are at before it stages; engines refuse what is left of that by
its epoch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.common.backoff import Backoff
from services.common.errors import Code, ServiceError
from services.common.fault_points import reach_async
from services.common.telemetry import get_logger
from services.trainer.core.ports import Journal, Rollout
from services.trainer.core.records import EngineView, NodeView
from services.trainer.core.weights import UpdateReport, WeightUpdater

log = get_logger(__name__)

_POLL_SECONDS = 1.0
_LONGEST_PAUSE = 10.0
"""Between pushes that engines refuse or do not answer."""
_FIRST_BACKOFF = 2.0
_LONGEST_BACKOFF = 60.0
_ROSTER_PATIENCE = 30.0
"""Seconds after the first engine for the others to come up; later ones are late joiners."""

_LATE_JOIN_SECONDS = 10.0
"""For a late joiner to join its group; it is asked again."""


@dataclass(frozen=True)
class FleetSettings:
    """`engine_count`: engines the run asks for; `engines_timeout`: longest wait for any engine to take weights."""

    run_id: str
    engine_count: int
    engines_timeout: float


class EngineFleet:
    """The engines of one run, as the trainer sees them.

    Args:
        rollout: nodes and engines.
        updater: moves the bytes.
        ranks_lock: held by whoever uses the ranks for themselves.
        journal: late joiners and engines that were left out are written here.
        settings: run and deadlines.
    """

    def __init__(
        self,
        rollout: Rollout,
        updater: WeightUpdater,
        ranks_lock: asyncio.Lock,
        journal: Journal,
        settings: FleetSettings,
    ) -> None:
        self._rollout = rollout
        self._updater = updater
        self._lock = ranks_lock
        self._journal = journal
        self._settings = settings
        self._version = 0
        self._step = -1
        self._pushing = False
        self._joining: dict[str, asyncio.Task[UpdateReport]] = {}
        self._backoff = Backoff(_FIRST_BACKOFF, _LONGEST_BACKOFF)
        self._problems: dict[str, str] = {}
        self._unverified: set[str] = set()

    async def nodes(self) -> list[NodeView]:
        """Live nodes that serve this run."""
        return [node for node in await self._rollout.nodes() if node.run_id == self._settings.run_id]

    async def tell_problems(self) -> None:
        """Writes what nodes say of themselves into the history, once each time it changes."""
        for node in await self._rollout.nodes():
            if node.problem != self._problems.get(node.node_id, ""):
                text = f"has a problem: {node.problem}" if node.problem else "has no problem any more"
                self._journal.write("notice", self._step, {}, f"rollout node {node.node_id} {text}")
            self._problems[node.node_id] = node.problem

    async def engines(self) -> list[EngineView]:
        """Engines that can take part in an update."""
        return [engine for node in await self.nodes() for engine in node.engines if engine.joinable]

    async def wait_for_engines(self, check: Callable[[], None]) -> list[EngineView]:
        """Engines as soon as all are up, or one that served an earlier trainer, or some of them for long enough.
        `check` may raise to end the wait.

        Raises:
            ServiceError: NO_ENGINE with what the nodes say of themselves.
        """
        began, first = time.monotonic(), None
        while True:
            check()
            engines = await self.engines()
            now = time.monotonic()
            if engines:
                first = first or now
                served = any(engine.weight_version for engine in engines)
                if served or len(engines) >= self._settings.engine_count or now - first > _ROSTER_PATIENCE:
                    return engines
            elif now - began > self._settings.engines_timeout:
                raise await self._no_engine(now - began)
            await self.tell_problems()
            await asyncio.sleep(_POLL_SECONDS)

    async def _no_engine(self, waited: float, failures: dict[str, str] | None = None) -> ServiceError:
        nodes = await self._rollout.nodes()
        said = "; ".join(describe_node(node) for node in nodes) or "no rollout node is registered"
        why = "".join(f" Engine {engine}: {text}" for engine, text in (failures or {}).items())
        return ServiceError(
            Code.DEADLINE_EXCEEDED,
            "NO_ENGINE",
            f"No engine of run {self._settings.run_id} took the weights within {waited:.0f} s: {said}.{why}"
            " Start a rollout node, or see its log.",
            run_id=self._settings.run_id,
        )

    async def push(
        self, version: int, step: int, publish: Callable[[int], Awaitable[None]], check: Callable[[], None]
    ) -> UpdateReport:
        """Stages the ranks' weights, brings every engine to them and publishes; retries until one has them.
        `check` may raise to end the retries.

        Raises:
            ServiceError: NO_ENGINE when no engine took the weights in `engines_timeout`.
        """
        began = time.monotonic()
        self._pushing = True
        try:
            await self._stop_late_joiners()
            self._version = 0  # nobody joins at what is staged from here on before it is published
            async with self._lock:
                staged = await self._updater.stage(version)
            report = await self._push_until_one_has_it(version, step, check)
            pushed = time.monotonic()
            await reach_async("trainer.after_commit")
            await publish(version)
            self._version, self._step = version, step
            self._updater.published(version, step)
        finally:
            self._pushing = False
        report.seconds |= {"stage": staged, "publish": time.monotonic() - pushed}
        report.total_seconds = time.monotonic() - began
        for engine_id, why in report.failed.items():
            self._journal.write("notice", step, {}, f"engine {engine_id} was left out of version {version}: {why}")
        self._tell_unverified(report)
        return report

    async def _push_until_one_has_it(self, version: int, step: int, check: Callable[[], None]) -> UpdateReport:
        began, pause, told = time.monotonic(), _POLL_SECONDS / 2, ""
        while True:
            engines = await self.engines()
            await self._updater.keep(engines)
            report = await self._updater.push(version, engines)
            if report.committed:
                return report
            check()
            why = "; ".join(f"{engine}: {text}" for engine, text in report.failed.items())
            if why and why != told:
                told = why
                text = f"no engine took version {version} yet, trying again ({why})"
                self._journal.write("notice", step, {}, text)
            if time.monotonic() - began > self._settings.engines_timeout:
                raise await self._no_engine(time.monotonic() - began, report.failed)
            # Where there is no engine, nobody is bothered by a look.
            pause = min(2 * pause, _LONGEST_PAUSE) if engines else _POLL_SECONDS
            await asyncio.sleep(pause)

    async def catch_up_forever(self) -> None:
        """Brings late joiners up until cancelled."""
        try:
            while True:
                await asyncio.sleep(_POLL_SECONDS)
                try:
                    await self._begin_late_joiners()
                except ServiceError as error:
                    log.warning("late joiners could not be looked for", error=error.message)
        finally:
            await self._stop_late_joiners()
            await self._updater.close()

    async def catch_up(self) -> list[UpdateReport]:
        """Brings the engines that are behind to the published version, and waits until that is over. Raises
        RanksFailed."""
        return list(await asyncio.gather(*await self._begin_late_joiners()))

    async def _begin_late_joiners(self) -> list[asyncio.Task[UpdateReport]]:
        """One task for each engine that is behind and has none."""
        if not self._version or self._pushing:
            return []
        late = await self._late()
        if self._pushing:
            return []  # meanwhile; it takes them along
        return [self._begin_one(engine) for engine in late if engine.engine_id not in self._joining]

    def _begin_one(self, engine: EngineView) -> asyncio.Task[UpdateReport]:
        engine_id = engine.engine_id
        task = asyncio.create_task(self._bring_up(engine), name=f"late joiner {engine_id}")
        self._joining[engine_id] = task

        def ended(task: asyncio.Task) -> None:
            self._joining.pop(engine_id, None)
            if not task.cancelled():
                task.exception()  # ranks that failed are met by whoever uses them next, who acts on it

        task.add_done_callback(ended)
        return task

    async def _bring_up(self, engine: EngineView) -> UpdateReport:
        engine_id, version = engine.engine_id, self._version
        report = await self._updater.push(version, [engine], _LATE_JOIN_SECONDS)
        if report.committed:
            self._backoff.succeeded(engine_id)
            text = f"engine {engine_id} joined at version {version} in {report.total_seconds:.2f} s"
            metrics = {"late_join_seconds": report.total_seconds, "late_join_pause_seconds": report.pause_seconds}
            self._journal.write("notice", self._step, metrics, text)
        for why in report.failed.values():
            self._backoff.failed(engine_id)
            text = f"engine {engine_id} could not be brought to version {version}: {why}"
            self._journal.write("notice", self._step, {}, text)
        self._tell_unverified(report)
        return report

    def _tell_unverified(self, report: UpdateReport) -> None:
        """Once of each engine."""
        for engine_id in set(report.unverified) - self._unverified:
            self._unverified.add(engine_id)
            why = "it has several ranks, or its release makes no checksums on this device"
            text = f"engine {engine_id} cannot say what it holds ({why}): what it serves is not verified"
            self._journal.write("notice", self._step, {}, text)

    async def _stop_late_joiners(self) -> None:
        tasks = list(self._joining.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _late(self) -> list[EngineView]:
        engines = await self.engines()
        return [one for one in engines if one.behind(self._version) and self._backoff.due(one.engine_id)]


def describe_node(node: NodeView) -> str:
    """One clause on what a node is doing, for messages about waiting."""
    engines = ", ".join(
        f"{engine.engine_id} {engine.state.name} at version {engine.weight_version}" for engine in node.engines
    )
    text = f"node {node.node_id} serves run {node.run_id or 'none'} with {engines or 'no engine'}"
    text += f", {node.running_group_count} groups in flight"
    return f"{text}, and says: {node.problem.rstrip('.')}" if node.problem else text
