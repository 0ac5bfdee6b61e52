"""The engine's side of a weight update: Prepare, Transfer, Commit or Abort.

Knows engines through their port and nothing of gRPC. Invariants:
- An epoch older than the newest one an engine has seen is refused (FENCED); an epoch prepares an engine once.
- An engine that stages serves its version until Commit; what fails before leaves it as it was. Once its weights are
  touched, it is READY again only after its checksums matched; else it is STALE, out of the router and paused.
- An update that the trainer forgets is given up after `settings.update_timeout` seconds without a message.
- An engine is in one weight group at most. It stays in it after Commit, and a later Prepare that names it joins
  nothing; an update that ends in any other way ends the group too, and its name is refused from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from services.common.errors import ServiceError
from services.common.fault_points import reach_async
from services.common.telemetry import get_logger
from services.common.weight_files.manifest import Expected
from services.rollout.core.compatibility import TrainerSide, check_compatible
from services.rollout.core.counters import Counters
from services.rollout.core.engine_port import Buckets, ChecksumRule, Engine, TensorSpec
from services.rollout.core.engine_state import EngineEvent, EngineState
from services.rollout.core.fleet import EngineSlot, Fleet
from services.rollout.core.update_errors import (
    checksum_unknown,
    fenced,
    group_left,
    not_prepared,
    transfer_failed,
    unavailable,
    update_aborted,
)
from services.rollout.core.update_state import (
    CommitResult,
    Lane,
    PrepareResult,
    TransferResult,
    Update,
    UpdateRequest,
)
from services.rollout.core.update_steps import UpdateSteps, call
from services.rollout.core.weight_files import REASONS, VersionFiles, expected_of

log = get_logger(__name__)

ALONE = -1
"""Epoch of an update without a trainer; none of a trainer's is below 0."""
_LEAVE_SECONDS = 10.0
"""An engine that does not leave a group in this time (its peers may be dead, or never have come) is replaced."""


class WeightUpdates:
    """Update sessions of all engines of a fleet.

    Args:
        fleet: the engines.
        counters: pauses are added here.
        pause_mode: what happens to requests in flight; see the run's `pause_mode`.
        update_timeout: longest silence of the trainer within an update, and of an engine within a call.
        files: versions as files, where a run has them.
    """

    def __init__(
        self,
        fleet: Fleet,
        counters: Counters,
        pause_mode: str,
        update_timeout: float,
        files: VersionFiles | None = None,
    ) -> None:
        self._fleet = fleet
        self._counters = counters
        self._steps = UpdateSteps(fleet, pause_mode, update_timeout, files)
        self._timeout = update_timeout
        self._lanes = {slot.engine_id: Lane() for slot in fleet.slots}
        self._background: set[asyncio.Task] = set()
        self._closed = False

    async def prepare(self, request: UpdateRequest, timeout: float) -> PrepareResult:
        """Fences older epochs, joins the weight group unless the engine is in it, returns how held tensors are made
        from sent ones and the algorithm of their checksums (empty without rules)."""
        slot = self._fleet.slot(request.engine_id)
        lane = self._lanes[slot.engine_id]
        if request.epoch <= slot.fence:
            raise fenced(slot, request.epoch)
        lane.heard = time.monotonic()
        engine = slot.alive
        if slot.info is None or request.incarnation != slot.incarnation:
            raise unavailable(slot, "was restarted since it was listed; list the engines again")
        if request.group is not None:
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
        lane.update = Update(request, slot.incarnation, rules, slot.state)
        async with self._step(slot, lane, request.epoch, "the weight group was not joined") as update:
            await self._steps.stage(slot, update, timeout)
            await self._enter(slot, update, timeout)
            staged = update.staging is not None
        return PrepareResult(rules, engine.checksum_algorithm if rules else "", staged)

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

    async def _enter(self, slot: EngineSlot, update: Update, timeout: float) -> None:
        """Into the group that Prepare names; out of the one before, whose trainer may be dead."""
        group, engine = update.request.group, slot.alive
        member = update.staging or engine
        if slot.group == group and slot.member is member:
            return
        if not await self._leave(slot):
            raise unavailable(slot, "did not leave its weight group before this one and is brought up again")
        if group is None:
            return
        if group.name in slot.groups_left:  # also this very group, of which another part of the process was a member
            raise group_left(slot, group.name)
        slot.group, slot.member = group, member
        await call(update, member.join_group(group, timeout), timeout + 2.0)

    async def transfer(self, engine_id: str, epoch: int, timeout: float) -> TransferResult:
        """Receives every bucket of the plan. Raises TRANSFER_FAILED: an engine that stages keeps its version, any other
        is STALE then."""
        slot = self._fleet.slot(engine_id)
        async with self._step(slot, self._lanes[engine_id], epoch, "the weights did not arrive") as update:
            if update.received:
                raise not_prepared(slot, epoch, f"has the weights of update {epoch} already: call CommitUpdate.")
            try:
                result = await self._steps.receive(slot, update, timeout)
            except ServiceError as error:
                if error.reason in REASONS:
                    raise
                raise transfer_failed(slot, str(error), staged=update.staging is not None) from error
            self._counters.transfer_seconds += result.seconds
            self._counters.received_bytes += result.received_bytes
            return result

    async def commit(
        self, engine_id: str, epoch: int, version: int, expected: Mapping[str, str], timeout: float
    ) -> CommitResult:
        """Verifies checksums by engine tensor name; on a match the version serves. CHECKSUM_MISMATCH names tensors."""
        slot = self._fleet.slot(engine_id)
        lane = self._lanes[engine_id]
        await reach_async("node.before_commit", engine=engine_id)
        if lane.last_commit and lane.last_commit[:2] == (epoch, version) and slot.version == version:
            return lane.last_commit[2]
        async with self._step(slot, lane, epoch, "it could not be committed") as update:
            if not update.received:
                why = f"got no weights in update {epoch}: call TransferWeights before CommitUpdate."
                raise not_prepared(slot, epoch, why)
            await self._steps.install(slot, update, version, expected, timeout)
            result = self._committed(slot, lane, update, version, len(expected))
        await self._route(slot)
        await reach_async("node.after_commit", engine=engine_id)
        return result

    def heard(self, engine_id: str) -> float:
        """When a trainer spoke of an engine last, by `time.monotonic`."""
        return self._lanes[engine_id].heard

    async def take_alone(self, engine_id: str, path: str, buckets: Buckets, expected: Expected) -> None:
        """Brings a STALE engine to a version in files without a trainer; a Prepare ends it. Raises what the steps of an
        update raise, and CHECKSUM_UNKNOWN when nobody said what this engine must hold."""
        slot = self._fleet.slot(engine_id)
        lane, engine = self._lanes[engine_id], slot.alive
        request = UpdateRequest(
            engine_id, slot.incarnation, ALONE, expected.version, None, TrainerSide("", ""), buckets, path
        )
        rules = await self._rules(slot, engine, request.tensors)
        values = expected_of(expected, engine.checksum_algorithm, rules) if rules else {}
        if values is None:
            raise checksum_unknown(slot, path)
        if self._closed or lane.update is not None or slot.state is not EngineState.STALE:
            return
        own = lane.update = Update(request, slot.incarnation, rules, slot.state)
        async with self._step(slot, lane, ALONE, "it did not come up from files", own) as update:
            await self._steps.stage(slot, update, self._timeout)
            await self._enter(slot, update, self._timeout)
            await self._steps.receive(slot, update, self._timeout)
            await self._steps.install(slot, update, expected.version, values, self._timeout)
            self._committed(slot, lane, update, expected.version, len(values))
        await self._route(slot)

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

    async def _route(self, slot: EngineSlot) -> None:
        try:
            await self._fleet.route(slot)
        except ServiceError as error:  # the supervisor tries again at its next health check
            log.warning("router did not take an engine", engine=slot.engine_id, error=str(error))

    @contextlib.asynccontextmanager
    async def _step(
        self, slot: EngineSlot, lane: Lane, epoch: int, what: str, own: Update | None = None
    ) -> AsyncIterator[Update]:
        """One call of an update, alone on its engine. If the body fails, the update is given up before the
        caller learns of it; if the caller itself was cancelled, right after."""
        update: Update | None = None
        try:
            async with lane.lock:
                update = self._update_of(slot, lane, epoch, own)
                update.rest()
                yield update
                if lane.update is update:
                    self._watch(slot, lane, update)
        except BaseException as error:
            if update is not None:
                update.over = True  # for a call that waits its turn, and comes before the cleanup
                ending = self._ended(slot, lane, update, f"{what}: {str(error) or type(error).__name__}")
                if isinstance(error, Exception):
                    await ending
            raise

    def _committed(self, slot: EngineSlot, lane: Lane, update: Update, version: int, tensor_count: int) -> CommitResult:
        """The engine serves `version` from now on."""
        paused = time.monotonic() - (update.paused_at or time.monotonic())
        slot.version = version
        slot.see(EngineEvent.COMMITTED)
        result = CommitResult(tensor_count, paused if update.came_from is EngineState.READY else 0.0)
        lane.last_commit = (update.request.epoch, version, result)
        lane.drop(update)
        self._counters.update_count += 1
        self._counters.pause_seconds += result.pause_seconds
        log.info("weights committed", engine=slot.engine_id, version=version, stood_still=round(paused, 3))
        return result

    def _ended(self, slot: EngineSlot, lane: Lane, update: Update, why: str) -> asyncio.Future[object]:
        """Gives an update up, to the end also when the caller does not wait for it."""
        return asyncio.shield(self._later(self._give_up(slot, lane, update, why)))

    async def _give_up(self, slot: EngineSlot, lane: Lane, update: Update, why: str) -> None:
        """Ends the call in progress, then leaves the group in the state that is true."""
        update.over = True
        if update.running is not None:
            update.running.cancel()
        async with lane.lock:
            if lane.update is not update:
                return
            lane.drop(update)
            log.warning("weight update given up", engine=slot.engine_id, epoch=update.request.epoch, why=why)
            if slot.engine is None or slot.incarnation != update.incarnation or slot.state is EngineState.DEAD:
                return
            await self._leave(slot)
            if slot.state is EngineState.UPDATING:
                await self._steps.close(slot, slot.engine, update)

    async def _leave(self, slot: EngineSlot) -> bool:
        """Out of the engine's group, for good; an engine that does not come out in time is replaced."""
        engine, group, member = slot.engine, slot.group, slot.member
        slot.group = slot.member = None
        if group is None or member is None:
            return True
        slot.groups_left.add(group.name)
        try:
            await asyncio.wait_for(member.leave_group(group.name, _LEAVE_SECONDS), _LEAVE_SECONDS + 1)
        except (ServiceError, TimeoutError) as error:
            log.warning("engine did not leave its group", engine=slot.engine_id, group=group.name, error=str(error))
            if slot.engine is engine:
                slot.condemn("it did not leave a weight group that is given up")
            return False
        return True

    def _update_of(self, slot: EngineSlot, lane: Lane, epoch: int, own: Update | None = None) -> Update:
        """The update under way with this epoch, a trainer's or our `own`. Raises FENCED, EPOCH_NOT_PREPARED,
        UPDATE_ABORTED or ENGINE_UNAVAILABLE."""
        if own is None:
            if epoch < max(slot.fence, 0):
                raise fenced(slot, epoch)
            lane.heard = time.monotonic()
        elif lane.update is not own:
            raise update_aborted(slot.engine_id, epoch)
        update = lane.update
        if update is None or update.over or update.request.epoch != epoch:
            why = f"has no update {epoch} under way: call PrepareUpdate with a newer epoch."
            raise not_prepared(slot, epoch, why)
        if update.incarnation != slot.incarnation or slot.state in (EngineState.DEAD, EngineState.STARTING):
            lane.drop(update)
            raise unavailable(slot, f"died during update {epoch}; it is brought up again and needs a new update")
        return update

    def _watch(self, slot: EngineSlot, lane: Lane, update: Update) -> None:
        """(Re)starts the timer that ends an update whose trainer fell silent."""
        update.rest()

        def expire() -> None:
            if lane.update is update:
                self._later(self._give_up(slot, lane, update, f"the trainer was silent for {self._timeout:.0f} s"))

        update.watchdog = asyncio.get_running_loop().call_later(self._timeout, expire)

    def _later(self, work: Coroutine[Any, Any, object]) -> asyncio.Task:
        """A task that this object keeps until its end."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
