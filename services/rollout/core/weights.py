"""The engine's side of a weight update: Prepare, Transfer, Commit or Abort.

Knows engines through their port and nothing of gRPC. Invariants:
- An epoch older than the newest one an engine has seen is refused (FENCED); an epoch prepares an engine once.
- Once a bucket was asked for, the engine is READY again only after its checksums matched; else it is STALE,
  out of the router and paused.
- An update that the trainer forgets is given up after `settings.update_timeout` seconds without a message.
- An engine is in one weight group at most. It stays in it after Commit, and a later Prepare that names it joins
  nothing; an update that ends in any other way ends the group too, and its name is refused from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.common.errors import Code, ServiceError
from services.common.telemetry import get_logger
from services.rollout.core.compatibility import TrainerSide, check_compatible
from services.rollout.core.counters import Counters
from services.rollout.core.engine_port import ChecksumRule, Engine, GroupSpec, TensorSpec
from services.rollout.core.engine_state import EngineEvent, EngineState
from services.rollout.core.fleet import EngineSlot, Fleet
from services.rollout.core.update_errors import fenced, group_left, transfer_failed, unavailable

log = get_logger(__name__)
ResultT = TypeVar("ResultT")

_LEAVE_SECONDS = 10.0
"""An engine that does not leave a group in this time (its peers may be dead, or never have come) is replaced."""


@dataclass(frozen=True)
class UpdateRequest:
    """What Prepare says. `epoch` grows with every update; `version` is the one to install."""

    engine_id: str
    incarnation: str
    epoch: int
    version: int
    group: GroupSpec
    trainer: TrainerSide
    buckets: tuple[tuple[TensorSpec, ...], ...]
    """The plan: the tensors of each flat byte tensor that is sent, in order."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors in order."""
        return tuple(spec for bucket in self.buckets for spec in bucket)


@dataclass(frozen=True)
class TransferResult:
    """`seconds`: from the first byte that was asked for to the last that was there."""

    received_bytes: int
    seconds: float


@dataclass(frozen=True)
class CommitResult:
    """`pause_seconds`: how long generation stood still."""

    verified_tensor_count: int
    pause_seconds: float


@dataclass
class _Update:
    """An update under way on one engine."""

    request: UpdateRequest
    incarnation: str
    rules: list[ChecksumRule]
    came_from: EngineState
    opened: bool = False
    """begin_update was sent."""
    touched: bool = False
    paused_at: float | None = None
    running: asyncio.Task | None = None
    """The engine call in progress, so that Abort can end it."""
    watchdog: asyncio.TimerHandle | None = None


@dataclass
class _Lane:
    """Serialises the update calls of one engine."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    update: _Update | None = None
    last_commit: tuple[int, int, CommitResult] | None = None


class WeightUpdates:
    """Update sessions of all engines of a fleet.

    Args:
        fleet: the engines.
        counters: pauses are added here.
        pause_mode: what happens to requests in flight; see the run's `pause_mode`.
        update_timeout: longest silence of the trainer within an update, and of an engine within a call.
    """

    def __init__(self, fleet: Fleet, counters: Counters, pause_mode: str, update_timeout: float) -> None:
        self._fleet = fleet
        self._counters = counters
        self._pause_mode = pause_mode
        self._timeout = update_timeout
        self._lanes = {slot.engine_id: _Lane() for slot in fleet.slots}
        self._background: set[asyncio.Task] = set()
        self._closed = False

    async def prepare(self, request: UpdateRequest, timeout: float) -> tuple[list[ChecksumRule], str]:
        """Fences older epochs, joins the weight group unless the engine is in it, returns how held tensors are made
        from sent ones and the algorithm of their checksums (empty without rules)."""
        slot = self._fleet.slot(request.engine_id)
        lane = self._lanes[slot.engine_id]
        if request.epoch <= slot.fence:
            raise fenced(slot, request.epoch)
        engine = slot.alive
        if slot.info is None or request.incarnation != slot.incarnation:
            raise unavailable(slot, "was restarted since it was listed; list the engines again")
        check_compatible(slot.engine_id, slot.info, request.trainer)
        rules = await self._rules(slot, engine, request.tensors)
        if request.epoch <= slot.fence:  # a newer one came meanwhile, or the same again
            raise fenced(slot, request.epoch)
        slot.fence = request.epoch
        if lane.update is not None:
            await self._ended(slot, lane, lane.update, f"epoch {request.epoch} replaces it")
        if request.epoch < slot.fence or lane.update is not None:
            raise fenced(slot, request.epoch)
        if self._closed:
            raise unavailable(slot, "belongs to no run any more; list the engines again")
        lane.update = _Update(request, slot.incarnation, rules, slot.state)
        async with self._step(slot, lane, request.epoch, "the weight group was not joined") as update:
            await self._enter(slot, update, timeout)
        return rules, engine.checksum_algorithm if rules else ""

    async def _rules(self, slot: EngineSlot, engine: Engine, tensors: tuple[TensorSpec, ...]) -> list[ChecksumRule]:
        """Asked once for the same tensors: an engine goes through all it holds to answer."""
        if not engine.checksum_algorithm:
            return []
        if slot.rules is None or slot.rules[0] != tensors:
            incarnation, rules = slot.incarnation, await engine.checksum_rules(tensors)
            if slot.incarnation != incarnation:
                raise unavailable(slot, "was restarted since it was listed; list the engines again")
            slot.rules = (tensors, rules)
        return slot.rules[1]

    async def _enter(self, slot: EngineSlot, update: _Update, timeout: float) -> None:
        """Into the group that Prepare names; out of the one before, whose trainer may be dead."""
        group = update.request.group
        if slot.group == group:
            return
        if group.name in slot.groups_left:
            raise group_left(slot, group.name)
        if not await self._leave(slot, slot.alive):
            raise unavailable(slot, "did not leave its weight group before this one and is brought up again")
        slot.group = group
        await self._call(update, slot.alive.join_group(group, timeout), timeout)

    async def transfer(self, engine_id: str, epoch: int, timeout: float) -> TransferResult:
        """Receives every bucket of the plan. On any failure the engine is STALE and TRANSFER_FAILED is raised."""
        slot = self._fleet.slot(engine_id)
        async with self._step(slot, self._lanes[engine_id], epoch, "a bucket did not arrive") as update:
            try:
                return await self._receive_all(slot, update, timeout)
            except ServiceError as error:
                raise transfer_failed(slot, str(error)) from error

    async def _receive_all(self, slot: EngineSlot, update: _Update, timeout: float) -> TransferResult:
        engine, request = slot.alive, update.request
        if not update.opened:
            await self._open(slot, update)
        update.touched = True
        slot.version, slot.incoming = 0, request.version
        begun = time.monotonic()
        for bucket in request.buckets:
            left = max(0.1, timeout - (time.monotonic() - begun))
            await self._call(update, engine.receive_bucket(bucket, request.group.name, left), left)
        return TransferResult(sum(spec.byte_count for spec in request.tensors), time.monotonic() - begun)

    async def commit(
        self, engine_id: str, epoch: int, version: int, expected: Mapping[str, str], timeout: float
    ) -> CommitResult:
        """Verifies checksums by engine tensor name; on a match the version serves. CHECKSUM_MISMATCH names tensors."""
        slot = self._fleet.slot(engine_id)
        lane = self._lanes[engine_id]
        if lane.last_commit and lane.last_commit[:2] == (epoch, version) and slot.version == version:
            return lane.last_commit[2]
        async with self._step(slot, lane, epoch, "it could not be committed") as update:
            if not update.touched:
                raise ServiceError(
                    Code.FAILED_PRECONDITION,
                    "EPOCH_NOT_PREPARED",
                    f"Engine {engine_id} got no weights in update {epoch}: call TransferWeights before CommitUpdate.",
                    engine_id=engine_id,
                    update_epoch=epoch,
                )
            await self._call(update, self._verify(slot, update, version, expected), timeout)
            await self._call(update, slot.alive.resume(), self._timeout)
            result = self._committed(slot, lane, update, version, len(expected))
        try:
            await self._fleet.route(slot)
        except ServiceError as error:  # the supervisor tries again at its next health check
            log.warning("router did not take an engine", engine=slot.engine_id, error=str(error))
        return result

    async def abort(self, engine_id: str, epoch: int, reason: str) -> None:
        """Gives an update up. Unknown and older epochs are not an error."""
        slot = self._fleet.slot(engine_id)
        lane = self._lanes[engine_id]
        if lane.update is not None and lane.update.request.epoch == epoch:
            await self._ended(slot, lane, lane.update, reason or "the trainer aborted it")

    async def close(self) -> None:
        """Gives up what is under way; nothing begins after it."""
        self._closed = True
        for engine_id, lane in self._lanes.items():
            if lane.update is not None:
                await self._give_up(self._fleet.slot(engine_id), lane, lane.update, "the node leaves the run")
        if self._background:
            await asyncio.wait(self._background, timeout=_LEAVE_SECONDS)

    @contextlib.asynccontextmanager
    async def _step(self, slot: EngineSlot, lane: _Lane, epoch: int, what: str) -> AsyncIterator[_Update]:
        """One call of an update, alone on its engine. If the body fails, the update is given up before the
        caller learns of it; if the caller itself was cancelled, right after."""
        update: _Update | None = None
        try:
            async with lane.lock:
                update = self._update_of(slot, lane, epoch)
                if update.watchdog is not None:
                    update.watchdog.cancel()  # it is here
                yield update
                if lane.update is update:
                    self._watch(slot, lane, update)
        except BaseException as error:
            if update is not None:
                ending = self._ended(slot, lane, update, f"{what}: {error or type(error).__name__}")
                if isinstance(error, Exception):
                    await ending
            raise

    async def _open(self, slot: EngineSlot, update: _Update) -> None:
        """Pauses the engine and opens the update; no byte has arrived yet."""
        engine = slot.alive
        slot.see(EngineEvent.UPDATE_BEGAN)
        update.paused_at = time.monotonic()
        await self._call(update, engine.pause(self._pause_mode), self._timeout)
        # Requests paused in place hold their cache, so it cannot be dropped: that is the meaning of that mode.
        flushed = await self._call(update, engine.flush_cache(), self._timeout)
        if not flushed and self._pause_mode != "in_place":
            log.warning("prefix cache was not flushed before an update", engine=slot.engine_id)
        update.opened = True  # also when the answer is lost: an engine begins no second one before an end
        await self._call(update, engine.begin_update(), self._timeout)

    async def _verify(self, slot: EngineSlot, update: _Update, version: int, expected: Mapping[str, str]) -> None:
        engine = slot.alive
        await engine.end_update()
        update.opened = False
        held = await engine.checksums() if update.rules else {}
        names = {rule.engine_name for rule in update.rules} | set(expected)
        wrong = sorted(name for name in names if held.get(name) != expected.get(name))
        if wrong:
            shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "CHECKSUM_MISMATCH",
                f"Engine {slot.engine_id} holds other bytes than were sent in {len(wrong)} of {len(names)} tensors"
                f" ({shown}): it is STALE; send the weights again.",
                engine_id=slot.engine_id,
                tensors=",".join(wrong[:100]),
                count=len(wrong),
            )
        await engine.set_version(version)

    def _committed(
        self, slot: EngineSlot, lane: _Lane, update: _Update, version: int, tensor_count: int
    ) -> CommitResult:
        """The engine serves `version` from now on."""
        paused = time.monotonic() - (update.paused_at or time.monotonic())
        slot.version = version
        slot.see(EngineEvent.COMMITTED)
        result = CommitResult(tensor_count, paused if update.came_from is EngineState.READY else 0.0)
        lane.last_commit = (update.request.epoch, version, result)
        self._drop(lane, update)
        self._counters.update_count += 1
        self._counters.pause_seconds += result.pause_seconds
        log.info("weights committed", engine=slot.engine_id, version=version, stood_still=round(paused, 3))
        return result

    def _ended(self, slot: EngineSlot, lane: _Lane, update: _Update, why: str) -> asyncio.Future[object]:
        """Gives an update up, to the end also when the caller does not wait for it."""
        return asyncio.shield(self._later(self._give_up(slot, lane, update, why)))

    async def _give_up(self, slot: EngineSlot, lane: _Lane, update: _Update, why: str) -> None:
        """Ends the call in progress, then leaves the group in the state that is true."""
        if update.running is not None:
            update.running.cancel()
        async with lane.lock:
            if lane.update is not update:
                return
            self._drop(lane, update)
            log.warning("weight update given up", engine=slot.engine_id, epoch=update.request.epoch, why=why)
            if slot.engine is None or slot.incarnation != update.incarnation or slot.state is EngineState.DEAD:
                return
            await self._leave(slot, slot.engine)
            if slot.state is EngineState.UPDATING:
                await self._close_update(slot, slot.engine, update)

    async def _close_update(self, slot: EngineSlot, engine: Engine, update: _Update) -> None:
        """Back to READY when no byte had arrived, else STALE: paused and out of the router."""
        try:
            if update.opened:
                await self._bounded(engine.end_update())
            if not update.touched and update.came_from is EngineState.READY:
                await self._bounded(engine.resume())
                slot.see(EngineEvent.UNTOUCHED)
                return
        except ServiceError as error:
            log.warning("engine did not close an update", engine=slot.engine_id, error=str(error))
        if slot.state is EngineState.UPDATING:
            await self._fleet.invalidate(slot)

    async def _leave(self, slot: EngineSlot, engine: Engine) -> bool:
        """Out of the engine's group, for good; an engine that does not come out in time is replaced."""
        group, slot.group = slot.group, None
        if group is None:
            return True
        slot.groups_left.add(group.name)
        try:
            await asyncio.wait_for(engine.leave_group(group.name, _LEAVE_SECONDS), _LEAVE_SECONDS + 1)
        except (ServiceError, TimeoutError) as error:
            log.warning("engine did not leave its group", engine=slot.engine_id, group=group.name, error=str(error))
            if slot.engine is engine:
                slot.condemn("it did not leave a weight group that is given up")
            return False
        return True

    def _update_of(self, slot: EngineSlot, lane: _Lane, epoch: int) -> _Update:
        """The update under way with this epoch. Raises FENCED, EPOCH_NOT_PREPARED or ENGINE_UNAVAILABLE."""
        if epoch < slot.fence:
            raise fenced(slot, epoch)
        update = lane.update
        if update is None or update.request.epoch != epoch:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "EPOCH_NOT_PREPARED",
                f"Engine {slot.engine_id} has no update {epoch} under way: call PrepareUpdate with a newer epoch.",
                engine_id=slot.engine_id,
                update_epoch=epoch,
            )
        if update.incarnation != slot.incarnation or slot.state in (EngineState.DEAD, EngineState.STARTING):
            self._drop(lane, update)
            raise unavailable(slot, f"died during update {epoch}; it is brought up again and needs a new update")
        return update

    async def _call(self, update: _Update, call: Awaitable[ResultT], timeout: float) -> ResultT:
        """An engine call that Abort can end, with a deadline."""
        task = asyncio.ensure_future(call)
        update.running = task
        try:
            return await asyncio.wait_for(task, timeout)
        except TimeoutError:
            raise ServiceError(
                Code.DEADLINE_EXCEEDED,
                "ENGINE_TIMEOUT",
                f"Engine {update.request.engine_id} did not answer within {timeout:.0f} s"
                f" in update {update.request.epoch}.",
                engine_id=update.request.engine_id,
            ) from None
        except asyncio.CancelledError:
            if task.cancelled() and not _self_cancelled():
                raise ServiceError(
                    Code.ABORTED,
                    "UPDATE_ABORTED",
                    f"Update {update.request.epoch} of engine {update.request.engine_id} was aborted.",
                    engine_id=update.request.engine_id,
                ) from None
            raise
        finally:
            update.running = None

    async def _bounded(self, call: Awaitable[ResultT]) -> ResultT:
        try:
            return await asyncio.wait_for(call, _LEAVE_SECONDS)
        except TimeoutError:
            raise ServiceError(Code.DEADLINE_EXCEEDED, "ENGINE_TIMEOUT", "An engine did not answer.") from None

    def _watch(self, slot: EngineSlot, lane: _Lane, update: _Update) -> None:
        """(Re)starts the timer that ends an update whose trainer fell silent."""
        if update.watchdog is not None:
            update.watchdog.cancel()

        def expire() -> None:
            if lane.update is update:
                self._later(self._give_up(slot, lane, update, f"the trainer was silent for {self._timeout:.0f} s"))

        update.watchdog = asyncio.get_running_loop().call_later(self._timeout, expire)

    @staticmethod
    def _drop(lane: _Lane, update: _Update) -> None:
        if update.watchdog is not None:
            update.watchdog.cancel()
        if lane.update is update:
            lane.update = None

    def _later(self, work: Coroutine[Any, Any, object]) -> asyncio.Task:
        """A task that this object keeps until its end."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _self_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
