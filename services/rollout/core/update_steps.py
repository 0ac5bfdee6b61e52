"""What is done to an engine in each step of a weight update; `services.rollout.core.weights` says when and who may.

Two ways. Staged: the bytes arrive beside the weights, the engine stands still in `install` alone. Direct: the engine
stands still from the first byte on. Invariants: once an engine's weights may be others than before, `update.touched` is
set and its version is 0; it serves again only after its checksums matched.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from services.common.errors import Code, ServiceError
from services.common.telemetry import get_logger
from services.common.weight_files.errors import files_missing
from services.rollout.core.engine_port import Activation, Engine
from services.rollout.core.engine_state import EngineEvent, EngineState
from services.rollout.core.fleet import EngineSlot, Fleet
from services.rollout.core.update_errors import checksum_mismatch, engine_timeout, update_aborted
from services.rollout.core.update_state import TransferResult, Update
from services.rollout.core.weight_files import VersionFiles

log = get_logger(__name__)
ResultT = TypeVar("ResultT")

_CLOSE_SECONDS = 10.0


class UpdateSteps:
    """Steps on the engines of a fleet.

    Args:
        fleet: the engines.
        pause_mode: what happens to requests in flight; see the run's `pause_mode`.
        update_timeout: deadline of calls that only touch an engine's memory.
        files: versions as files, where a run has them.
    """

    def __init__(self, fleet: Fleet, pause_mode: str, update_timeout: float, files: VersionFiles | None = None) -> None:
        self._fleet = fleet
        self._pause_mode = pause_mode
        self._timeout = update_timeout
        self._files = files

    async def stage(self, slot: EngineSlot, update: Update, timeout: float) -> None:
        """Decides the way: staged where the engine can and the memory suffices."""
        staging = slot.alive.staging
        if staging is None:
            return
        try:
            await call(update, staging.reserve(update.request.buckets, timeout), timeout)
        except ServiceError as error:
            if error.code is not Code.RESOURCE_EXHAUSTED:
                raise
            log.warning("engine stands still while weights arrive", engine=slot.engine_id, why=str(error))
            return
        update.staging = staging

    async def receive(self, slot: EngineSlot, update: Update, timeout: float) -> TransferResult:
        """Every bucket of the plan."""
        request = update.request
        if request.group is None:
            seconds = await self._receive_files(slot, update, timeout)
        elif update.staging is not None:
            work = update.staging.receive(request.epoch, request.group.name, timeout)
            seconds = await call(update, work, timeout + 2.0)  # it keeps the deadline itself
        else:
            seconds = await self._receive_direct(slot, update, timeout)
        update.received = True
        return TransferResult(sum(spec.byte_count for spec in update.request.tensors), seconds)

    async def _receive_files(self, slot: EngineSlot, update: Update, timeout: float) -> float:
        """The engine is touched only when the files are here and right."""
        request, begun = update.request, time.monotonic()
        if self._files is None:
            raise files_missing(request.weights_path, "this run has no update_weight_disk_dir at the rollout node")
        async with contextlib.AsyncExitStack() as stack:
            opening = stack.enter_async_context(self._files.open(request.weights_path))
            held = await call(update, opening, timeout)
            held.check(request.version, request.buckets)
            left = max(0.1, timeout - (time.monotonic() - begun))
            if update.staging is not None:
                pieces = [(str(piece.path), piece.offset, piece.size) for piece in held.pieces]
                await call(update, update.staging.fill(request.epoch, pieces, left), left + 2.0)
            else:
                await self._open(slot, update)
                self._touch(slot, update)
                await call(update, slot.alive.load_files(held.directory, left), left)
        return time.monotonic() - begun

    async def _receive_direct(self, slot: EngineSlot, update: Update, timeout: float) -> float:
        assert update.request.group
        engine, group = slot.alive, update.request.group.name
        await self._open(slot, update)
        self._touch(slot, update)
        begun = time.monotonic()
        for bucket in update.request.buckets:
            left = max(0.1, timeout - (time.monotonic() - begun))
            await call(update, engine.receive_bucket(bucket, group, left), left)
        return time.monotonic() - begun

    async def install(
        self, slot: EngineSlot, update: Update, version: int, expected: Mapping[str, str], timeout: float
    ) -> None:
        """Makes `version` what the engine serves, or raises CHECKSUM_MISMATCH."""
        activation = Activation()  # of bytes that arrived directly
        if update.staging is not None:
            await self._open(slot, update)
            self._touch(slot, update)
            activation = await call(update, _activate(update, timeout, repeat=bool(update.rules)), timeout)
        await call(update, self._verify(slot, update, expected, activation, timeout), timeout)
        await call(update, slot.alive.set_version(version), self._timeout)
        await call(update, slot.alive.resume(), self._timeout)

    async def _open(self, slot: EngineSlot, update: Update) -> None:
        """Pauses the engine and opens the update; its weights are what they were."""
        engine = slot.alive
        update.came_from = slot.state
        slot.see(EngineEvent.UPDATE_BEGAN)
        update.paused_at = time.monotonic()
        await call(update, engine.pause(self._pause_mode), self._timeout)
        # Requests paused in place hold their cache, so it cannot be dropped: that is the meaning of that mode.
        flushed = await call(update, engine.flush_cache(), self._timeout)
        if not flushed and self._pause_mode != "in_place":
            log.warning("prefix cache was not flushed before an update", engine=slot.engine_id)
        update.opened = True  # also when the answer is lost: an engine begins no second one before an end
        await call(update, engine.begin_update(), self._timeout)

    @staticmethod
    def _touch(slot: EngineSlot, update: Update) -> None:
        update.touched = True
        slot.version, slot.incoming = 0, update.request.version

    async def _verify(
        self, slot: EngineSlot, update: Update, expected: Mapping[str, str], activation: Activation, timeout: float
    ) -> None:
        wrong = await self._wrong_tensors(slot, update, expected, activation)
        if wrong and activation.how == "copied":
            # Repeated copies may have missed what the engine changed meanwhile. The model's own way cannot.
            log.warning("repeated copies did not hold, loading instead", engine=slot.engine_id, tensors=len(wrong))
            update.opened = True
            await slot.alive.begin_update()
            activation = await _activate(update, timeout, repeat=False)
            wrong = await self._wrong_tensors(slot, update, expected, activation)
        if wrong:
            if self._files is not None and update.request.group is None:
                self._files.forget()
            raise checksum_mismatch(slot, wrong, max(len(update.rules), len(expected)))

    async def _wrong_tensors(
        self, slot: EngineSlot, update: Update, expected: Mapping[str, str], activation: Activation
    ) -> list[str]:
        """Closes the update; → engine tensors whose bytes are not those that were sent."""
        engine = slot.alive
        await engine.end_update()
        update.opened = False
        held = await _held(engine, update, activation) if update.rules else {}
        names = {rule.engine_name for rule in update.rules} | set(expected)
        return sorted(name for name in names if name not in held or held[name] != expected.get(name))

    async def close(self, slot: EngineSlot, engine: Engine, update: Update) -> None:
        """After an update that failed: back to READY when the weights are what they were, else STALE, paused and out
        of the router."""
        try:
            if update.opened:
                await _bounded(engine.end_update())
            if not update.touched and update.came_from is EngineState.READY:
                await _bounded(engine.resume())
                slot.see(EngineEvent.UNTOUCHED)
                return
        except ServiceError as error:
            log.warning("engine did not close an update", engine=slot.engine_id, error=str(error))
        if slot.state is EngineState.UPDATING:
            await self._fleet.invalidate(slot)


async def _activate(update: Update, timeout: float, *, repeat: bool) -> Activation:
    assert update.staging is not None
    names = [rule.engine_name for rule in update.rules]
    return await update.staging.activate(update.request.epoch, timeout, repeat=repeat, names=names)


async def _held(engine: Engine, update: Update, activation: Activation) -> Mapping[str, str]:
    """Checksums of what the engine holds: its own, which take long, until its receiver's have once been the same; and
    again whenever the model loads. A copy writes the same tensors again."""
    staging, told = update.staging, activation.checksums
    if told and staging and staging.trusted and activation.how == "copied":
        return told
    held = await engine.checksums()
    if staging:
        staging.trusted = bool(told) and all(held.get(name) == value for name, value in told.items())
    return held


async def call(update: Update, work: Awaitable[ResultT], timeout: float) -> ResultT:
    """An engine call that Abort can end, with a deadline."""
    task = asyncio.ensure_future(work)
    update.running = task
    try:
        return await asyncio.wait_for(task, timeout)
    except TimeoutError:
        raise engine_timeout(update.request.engine_id, update.request.epoch, timeout) from None
    except asyncio.CancelledError:
        if task.cancelled() and not _self_cancelled():
            raise update_aborted(update.request.engine_id, update.request.epoch) from None
        raise
    finally:
        update.running = None


async def _bounded(work: Awaitable[ResultT]) -> ResultT:
    try:
        return await asyncio.wait_for(work, _CLOSE_SECONDS)
    except TimeoutError:
        raise ServiceError(Code.DEADLINE_EXCEEDED, "ENGINE_TIMEOUT", "An engine did not answer.") from None


def _self_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
