"""From leased prompts to stored groups, for one run on one node.

lease → generate n samples → score → put. The buffer decides how many prompts may be out; this loop only keeps
its engines full. Invariants: at most `max_inflight` groups are in flight; a lease is extended until its group
is put or given back, also while the loop drains; a group is put whole or its lease is released, with what was
made of it when the node is what ended it; every wait ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from services.common.errors import Code, ServiceError
from services.common.records import Group, Prompt, Sample
from services.common.telemetry import get_logger
from services.rollout.core.batching import Batcher
from services.rollout.core.completer import may_pass
from services.rollout.core.counters import Counters
from services.rollout.core.filters import Rejected
from services.rollout.core.makers import Interrupted
from services.rollout.core.ports import Lease, PromptBuffer, PutResult
from services.rollout.core.run_settings import RunSettings
from services.rollout.core.teaching import AWAY

log = get_logger(__name__)

_LEASE_WAIT = 2.0
"""Longest poll for prompts; also how long a drain may go unnoticed."""
_MAX_LEASE_COUNT = 128
_PUT_BYTES = 4 << 20
_PUT_SECONDS = 60.0
"""How long a finished group is offered to a buffer that does not answer."""
_FULL_SECONDS = 1800.0
"""How long a finished group is offered to a buffer whose store is full; the trainer frees it with its checkpoints."""
_INTERRUPT_SECONDS = 3.0
"""How long engines may take to hand over what they have of a group."""
_MAX_BACKOFF = 5.0


class GroupMaker(Protocol):
    """Makes a finished group of a prompt."""

    async def make(self, prompt: Prompt, partial: Group | None = None) -> Group:
        """The group, gone on with from `partial`. Raises ServiceError (INVALID_ARGUMENT when this prompt can never
        succeed), Rejected, Interrupted."""
        ...


class GenerationLoop:
    """The loop.

    Args:
        buffer: where prompts come from and groups go.
        maker: generates and scores one group.
        run: settings.
        counters: of the node.
        max_inflight: says how many groups may be in flight now.
        ready: waits at most the given seconds until work makes sense; False when it does not.
        interrupt: makes `make` end at once with Interrupted, and returns; None when there is nothing to hand over.
    """

    def __init__(
        self,
        buffer: PromptBuffer,
        maker: GroupMaker,
        run: RunSettings,
        counters: Counters,
        max_inflight: Callable[[], int],
        ready: Callable[[float], Awaitable[bool]],
        interrupt: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._buffer = buffer
        self._maker = maker
        self._run = run
        self._counters = counters
        self._max_inflight = max_inflight
        self._ready = ready
        self._interrupt = interrupt
        self._extender: asyncio.Task[None] | None = None
        self._work: dict[str, asyncio.Task[None]] = {}
        self._freed = asyncio.Event()
        self._draining = False
        self._left = asyncio.Event()
        """The loop leases no more: no answer with leases is under way."""
        self._failures = 0
        # A call for prompts may wait while others are in work: only the time without any work is idle.
        self._idle_since = time.monotonic()
        self.problem = ""
        self.run_ended = False
        """The buffer said so; a run that is opened again needs another loop."""
        self._puts: Batcher[tuple[str, Group], PutResult] = Batcher(
            self._put, max_items=256, max_weight=_PUT_BYTES, concurrency=2, weigh=_group_bytes
        )

    @property
    def draining(self) -> bool:
        """It takes no more prompts."""
        return self._draining

    @property
    def running_count(self) -> int:
        """Groups in flight."""
        return len(self._work)

    async def run(self) -> None:
        """Runs until cancelled or drained."""
        self._extender = asyncio.create_task(self._extend())
        try:
            while not self._draining:
                try:
                    await self._turn()
                except ServiceError as error:
                    if error.reason == "RUN_FINISHED":
                        self.run_ended = True
                        return
                    self.problem = f"Prompts cannot be leased: {error}"
                    log.warning("prompts cannot be leased", error=str(error))
                    await asyncio.sleep(1.0)
        finally:
            self._left.set()
            if not self._draining:
                self._extender.cancel()

    async def _turn(self) -> None:
        """Leases once and starts work on what came."""
        free = self._max_inflight() - len(self._work)
        if free <= 0:
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), _LEASE_WAIT)
            return
        if self._failures:
            await asyncio.sleep(min(0.05 * 2 ** min(self._failures, 10), _MAX_BACKOFF))
        if not await self._ready(_LEASE_WAIT):
            return
        leases = await self._buffer.lease_prompts(
            self._run.run_id, min(free, _MAX_LEASE_COUNT), _LEASE_WAIT, self._run.lease_ttl
        )
        if self._draining:
            if leases:
                await self._release([lease.lease_id for lease in leases], unharmed=True)
            return
        if leases and not self._work:
            self._counters.idle_seconds += time.monotonic() - self._idle_since
        for lease in leases:
            task = asyncio.create_task(self._handle(lease), name=lease.prompt.group_id)
            self._work[lease.lease_id] = task
            task.add_done_callback(lambda _, lease_id=lease.lease_id: self._finished(lease_id))

    def _finished(self, lease_id: str) -> None:
        self._work.pop(lease_id, None)
        if not self._work:
            self._idle_since = time.monotonic()
        self._freed.set()

    async def _handle(self, lease: Lease) -> None:
        # Every part has a deadline of its own; these hold what they forget, so that no lease is extended for ever.
        run = self._run
        seconds = run.generate_timeout + run.score.timeout + _PUT_SECONDS + (run.teacher.timeout if run.teacher else 0)
        group = None
        try:
            async with asyncio.timeout(seconds):
                group = await self._make(lease)
            seconds = _FULL_SECONDS + _PUT_SECONDS
            async with asyncio.timeout(seconds):
                if group is not None:
                    await self._store(lease, group)
        except TimeoutError:
            text = f"Group {lease.prompt.group_id} was not {'stored' if group else 'finished'} within {seconds:.0f} s."
            await self._give_back(lease, ServiceError(Code.DEADLINE_EXCEEDED, "GROUP_TIMEOUT", text))

    async def _make(self, lease: Lease) -> Group | None:
        """The group; None when there is none and the lease was given back."""
        try:
            return await self._maker.make(lease.prompt, lease.partial)
        except ServiceError as error:
            if error.reason == "HALTED":
                await self._release([lease.lease_id], unharmed=True)
            else:
                await self._give_back(lease, error)
        except Interrupted as stop:
            await self._hand_over(lease, stop.group)
        except Rejected as rejected:
            self._counters.rejected_group_count += 1
            self._failures, self.problem = 0, ""
            await self._release([lease.lease_id], f"FILTERED:{rejected.reason}")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("a group failed", group=lease.prompt.group_id)
            await self._give_back(lease, ServiceError(Code.INTERNAL, "FAILED", f"{type(error).__name__}: {error}"))
        return None

    async def _store(self, lease: Lease, group: Group) -> None:
        try:
            result = await self._puts.submit((lease.lease_id, group))
        except ServiceError as error:
            if error.retry_seconds is not None and error.code is Code.RESOURCE_EXHAUSTED:
                log.warning("a group is given back: the store stays full", group=group.group_id, error=str(error))
                await self._release([lease.lease_id], unharmed=True)
                return
            log.warning("a group could not be put; its lease will expire", group=group.group_id, error=str(error))
            return
        self._counters.count_put(result.outcome)
        if result.outcome == "INVALID":
            await self._give_back(lease, ServiceError(Code.INTERNAL, "GROUP_INVALID", result.message))
            return
        if result.outcome == "LEASE_LOST":
            log.info("a group came too late", group=group.group_id)
            return
        self._failures, self.problem = 0, ""
        self._counters.finished_group_count += 1

    async def _give_back(self, lease: Lease, error: ServiceError) -> None:
        """Releases a failed prompt for another attempt; evicts it when that is useless or was the last."""
        self._counters.failed_group_count += 1
        self._failures += 1
        if error.reason == AWAY:
            await self._wait_for_teacher(lease, error)
            return
        attempt = lease.attempt + 1
        hopeless = error.code is Code.INVALID_ARGUMENT and not may_pass(error)
        final = hopeless or attempt >= self._run.max_prompt_attempts
        reason = ("UNSCORED" if error.reason == "UNSCORED" else "FAILED") if final else ""
        if error.reason == "PROMPT_TOO_LONG":
            reason = error.reason
        log.warning(
            "a group failed", group=lease.prompt.group_id, attempt=attempt, evicted=reason or "no", error=str(error)
        )
        if self._failures >= 5:
            self.problem = f"{self._failures} groups failed in a row, the last one because: {error}"
        await self._release([lease.lease_id], reason)

    async def _wait_for_teacher(self, lease: Lease, error: ServiceError) -> None:
        """Releases a prompt whose teacher is away: that is no failure of its own, however long it takes."""
        log.warning("a group waits for its teacher", group=lease.prompt.group_id, error=str(error))
        self.problem = f"Groups wait for the teacher: {error}"
        await self._release([lease.lease_id], unharmed=True)

    async def _hand_over(self, lease: Lease, group: Group) -> None:
        """Gives a prompt back with what was made of it."""
        if not group.samples:
            await self._release([lease.lease_id], unharmed=True)
            return
        try:
            await self._buffer.release_leases(
                self._run.run_id, [lease.lease_id], unharmed=True, partials={lease.lease_id: group}
            )
        except ServiceError as error:  # too large, or a store that is full
            log.warning("what was made of a group is lost", group=group.group_id, error=str(error))
            await self._release([lease.lease_id], unharmed=True)
        else:
            self._counters.unfinished_group_count += 1

    async def _release(self, lease_ids: Sequence[str], reason: str = "", *, unharmed: bool = False) -> None:
        """Gives leases back, to a buffer that does not answer as long as a group is offered to it: what is not given
        back is nobody's until it expires. A drain waits for nothing."""
        began, pause = time.monotonic(), 0.1
        while True:
            try:
                return await self._buffer.release_leases(self._run.run_id, lease_ids, reason, unharmed=unharmed)
            except ServiceError as error:
                if error.reason == "RUN_FINISHED":
                    return
                if self._draining or not _passing(error) or time.monotonic() + pause > began + _PUT_SECONDS:
                    # They expire by themselves, or end with their run.
                    log.warning("leases were not released", count=len(lease_ids), error=str(error))
                    return
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _put(self, groups: list[tuple[str, Group]]) -> list[PutResult]:
        """Offers groups until the buffer answers; the same put twice is the same put."""
        began, pause = time.monotonic(), 0.1
        while True:
            try:
                return await self._buffer.put_groups(self._run.run_id, groups)
            except ServiceError as error:
                # A full store (RESOURCE_EXHAUSTED) says when to come again; a group that is too large does not.
                full = error.code is Code.RESOURCE_EXHAUSTED and error.retry_seconds is not None
                pause = max(pause, error.retry_seconds or 0.0)
                if not _passing(error) or time.monotonic() + pause > began + (_FULL_SECONDS if full else _PUT_SECONDS):
                    raise
                if full:
                    self.problem = f"Finished groups wait for the buffer: {error}"
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _extend(self) -> None:
        """Keeps the leases of what is in flight; work whose lease is lost is ended."""
        while True:
            await asyncio.sleep(self._run.lease_ttl / 3)
            if not self._work:
                continue
            try:
                lost = await self._buffer.extend_leases(self._run.run_id, list(self._work), self._run.lease_ttl)
            except ServiceError as error:
                log.warning("leases were not extended", error=str(error))
                continue
            for lease_id in lost:
                self._counters.lost_lease_count += 1
                if task := self._work.get(lease_id):
                    task.cancel()

    async def drain(self, max_wait: float, *, keep: bool = True) -> int:
        """Takes no more prompts, waits for those in flight, gives the rest back; returns how many those were.

        `keep`: with what was made of them, so that another node goes on from there. None of it counts as an attempt.
        """
        self._draining = True
        self._freed.set()
        await asyncio.gather(self._wait(max_wait), self._leave(keep))
        left = list(self._work)
        if left and keep and self._interrupt is not None:
            await self._interrupt()
            await self._wait(_INTERRUPT_SECONDS)
        rest = list(self._work)
        for lease_id in rest:
            self._work[lease_id].cancel()
        if rest:
            await asyncio.gather(*(self._work[i] for i in rest if i in self._work), return_exceptions=True)
            await self._release(rest, unharmed=True)
        if self._extender is not None:
            self._extender.cancel()
        return len(left)

    async def _leave(self, keep: bool) -> None:
        """Waits for the answer of a lease call that is under way: its leases would expire as failed attempts."""
        if self._extender is not None and keep:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), _LEASE_WAIT + 1.0)

    async def _wait(self, seconds: float) -> None:
        if tasks := list(self._work.values()):
            await asyncio.wait(tasks, timeout=seconds)


def _passing(error: ServiceError) -> bool:
    """The same call may succeed later."""
    return error.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED) or error.retry_seconds is not None


def _group_bytes(item: tuple[str, Group]) -> float:
    def size(sample: Sample) -> int:
        taught = sum(array.nbytes for array in vars(sample.teacher).values()) if sample.teacher else 0
        known = sample.tokens.nbytes + sample.loss_mask.nbytes + sample.log_probs.nbytes
        return known + taught + len(sample.response) + 256

    return sum(size(sample) for sample in item[1].samples)
