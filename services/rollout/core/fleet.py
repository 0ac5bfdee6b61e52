"""The engines of a node: their records, and who of them is behind the router.

Knows engines and the router through their ports only. Invariants: the router holds an engine only while it is
READY, or while it is paused in an update that began when it was READY; a slot's `version` is 0 unless the
engine holds exactly that verified version.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import dataclass, field

from services.common.errors import Code, ServiceError
from services.common.process import ManagedProcess
from services.common.telemetry import get_logger
from services.rollout.core.engine_port import (
    ChecksumRule,
    Engine,
    EngineInfo,
    GroupSpec,
    RequestLimits,
    Router,
    Staging,
    TensorSpec,
)
from services.rollout.core.engine_state import EngineEvent, EngineState, next_state

log = get_logger(__name__)


@dataclass
class EngineSlot:
    """One place for an engine process; it survives the processes that fill it."""

    engine_id: str
    index: int
    state: EngineState = EngineState.DEAD
    incarnation: str = ""
    restart_count: int = -1
    version: int = 0
    incoming: int = 0
    """Version of the update of which it began to receive bytes last."""
    fence: int = 0
    """Highest update epoch seen."""
    group: GroupSpec | None = None
    """Weight group that this process is a member of, from update to update."""
    member: Engine | Staging | None = None
    """The part of the process that is in it."""
    groups_left: set[str] = field(default_factory=set)
    """Names of groups that this process joined or tried to, and may not join again."""
    rules: tuple[tuple[TensorSpec, ...], list[ChecksumRule]] | None = None
    """Tensors of the last Prepare, and how this process makes its own from them."""
    engine: Engine | None = None
    info: EngineInfo | None = None
    process: ManagedProcess | None = None
    problem: str = ""
    served: bool = False
    """This process has served a verified version."""
    condemned: str = ""
    """Why the process is to be replaced although it runs."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to make the supervisor look at once."""

    def see(self, event: EngineEvent) -> None:
        """Moves the state machine."""
        before, self.state = self.state, next_state(self.state, event)
        self.served |= event is EngineEvent.COMMITTED
        if before is not self.state:
            log.info("engine state", engine=self.engine_id, before=before.name, now=self.state.name, why=event.value)

    def reborn(self, incarnation: str) -> None:
        """Forgets what only the process knew that filled this place before."""
        self.restart_count += 1
        self.incarnation = incarnation
        self.version, self.served, self.condemned, self.info = 0, False, "", None
        self.group, self.member, self.groups_left, self.rules = None, None, set(), None
        self.wake.clear()

    def condemn(self, why: str) -> None:
        """Asks the supervisor to replace the process."""
        self.condemned = why
        self.wake.set()

    @property
    def alive(self) -> Engine:
        """The engine client. Raises ENGINE_UNAVAILABLE when no process is up."""
        if self.engine is None or self.info is None or self.state in (EngineState.STARTING, EngineState.DEAD):
            raise ServiceError(
                Code.UNAVAILABLE,
                "ENGINE_UNAVAILABLE",
                f"Engine {self.engine_id} is {self.state.name}: wait until it is listed as STALE or READY.",
                engine_id=self.engine_id,
                state=self.state.name,
            )
        return self.engine


class Fleet:
    """All engine slots of a node and the router in front of them.

    Args:
        node_id: prefix of the engine ids.
        engine_count: number of slots.
        router: not started here; see `services.rollout.core.supervisor`.
    """

    def __init__(self, node_id: str, engine_count: int, router: Router) -> None:
        self.router = router
        self.slots = [EngineSlot(f"{node_id}-{index}", index) for index in range(engine_count)]
        self.problem = ""
        self._run = ("", "")
        self._routed: set[str] = set()
        self._serving = asyncio.Event()

    def slot(self, engine_id: str) -> EngineSlot:
        """Slot by engine id. Raises ENGINE_NOT_FOUND."""
        for slot in self.slots:
            if slot.engine_id == engine_id:
                return slot
        known = ", ".join(slot.engine_id for slot in self.slots) or "none"
        raise ServiceError(
            Code.NOT_FOUND,
            "ENGINE_NOT_FOUND",
            f"This node has no engine {engine_id!r}; it has: {known}.",
            engine_id=engine_id,
        )

    def engine_id_of(self, url: str | None) -> str:
        """Id of the engine at `url`; the URL itself for one that has gone, "" without one."""
        for slot in self.slots:
            if slot.engine and url and slot.engine.url.rstrip("/") == url.rstrip("/"):
                return slot.engine_id
        return url or ""

    def limits(self) -> RequestLimits | None:
        """Bounds of a request that every engine accepts; None before any engine was up."""
        infos = [slot.info for slot in self.slots if slot.info]
        if not infos:
            return None
        return RequestLimits(min(i.vocab_size for i in infos), min(i.context_length for i in infos))

    def routed_versions(self) -> list[int]:
        """Weight versions of the engines behind the router."""
        return [slot.version for slot in self.slots if slot.engine_id in self._routed]

    def oldest_version(self) -> int | None:
        """Oldest version that can make a token of a request sent now; None when no engine is behind the router.

        An engine that receives weights is paused until the incoming version serves or it leaves the router."""
        routed = [slot for slot in self.slots if slot.engine_id in self._routed]
        return min((slot.version or slot.incoming for slot in routed), default=None)

    @property
    def serving(self) -> bool:
        """True when the router holds an engine."""
        return self._serving.is_set()

    async def wait_serving(self, timeout: float) -> bool:
        """Waits until the router holds an engine; False when it does not in time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._serving.wait(), timeout)
        return self._serving.is_set()

    async def route(self, slot: EngineSlot) -> None:
        """Puts a READY engine behind the router."""
        engine, info = slot.alive, slot.info
        if slot.state is not EngineState.READY or slot.engine_id in self._routed or info is None:
            return
        await self.router.add_worker(engine.url, info.limits)
        if slot.engine is not engine or slot.state is not EngineState.READY:
            # It died or lost its weights meanwhile; who saw that found nothing to take from the router.
            await self.router.remove_worker(engine.url)
            return
        self._routed.add(slot.engine_id)
        self._serving.set()

    async def unroute(self, slot: EngineSlot) -> None:
        """Takes an engine from the router. Never raises: a router that does not answer has no engine either."""
        if slot.engine_id not in self._routed:
            return
        self._routed.discard(slot.engine_id)
        if not self._routed:
            self._serving.clear()
        if slot.engine is not None:
            try:
                await self.router.remove_worker(slot.engine.url)
            except ServiceError as error:
                log.warning("router did not remove an engine", engine=slot.engine_id, error=str(error))

    async def invalidate(self, slot: EngineSlot) -> None:
        """The engine's weights are no verified version any more: out of the router, its requests ended."""
        slot.version = 0
        slot.see(EngineEvent.INVALIDATED)
        await self.unroute(slot)
        if slot.engine is not None:
            try:
                await slot.engine.abort_all()
            except ServiceError as error:
                log.warning("engine did not abort its requests", engine=slot.engine_id, error=str(error))

    async def abort_requests(self) -> None:
        """Ends every request of every engine where it is; the engines serve on. Never raises."""
        for slot in self.slots:
            if slot.engine is None or slot.engine_id not in self._routed:
                continue
            try:
                await slot.engine.abort_all()
            except ServiceError as error:
                log.warning("engine did not abort its requests", engine=slot.engine_id, error=str(error))

    async def begin_run(self, run_id: str, birth: str) -> None:
        """A run is taken: what the engines hold is no version of it. Update epochs of another run start over, with the
        group names made of them; those of a run that is taken again go on, and with them the fences."""
        another, self._run = (run_id, birth) != self._run, (run_id, birth)
        for slot in self.slots:
            if another:
                slot.fence = 0
                slot.groups_left.clear()
            if slot.state in (EngineState.READY, EngineState.UPDATING):
                await self.invalidate(slot)

    @staticmethod
    def new_incarnation() -> str:
        """Name of one life of an engine process."""
        return uuid.uuid4().hex[:12]
