"""The buffer's use cases: runs, leases, batches, versions.

Stateless between calls but for an index of the data files, which any server rebuilds from what the store keeps;
everything that must survive is in the store. It knows neither gRPC nor Redis. Invariants: no call waits past
its `max_wait`; a prompt is leased only when its data can be read.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from services.buffer.core import ids
from services.buffer.core.drawing import UNDO, usable
from services.buffer.core.looking import list_groups, with_datasets, with_origins, without_clock
from services.buffer.core.partial import with_partials
from services.buffer.core.plan import RunPlan, fixed_differences
from services.buffer.core.ports import Dataset, DatasetLoader, Store, UserFunctions
from services.buffer.core.records import (
    Batch,
    Created,
    Grants,
    GroupFilter,
    GroupRecord,
    LeaseRequest,
    Leases,
    PackedGroup,
    PutOutcome,
    PutResult,
    RunRecord,
    RunState,
    Stats,
    StoredGroup,
)
from services.buffer.core.side import SideUse
from services.buffer.core.taking import Taking
from services.buffer.core.waiting import Changes
from services.common.errors import Code, ServiceError, invalid_field
from services.common.records import Prompt

MAX_TTL_SECONDS = 24 * 3600.0
MAX_LEASED_AT_ONCE = 1024
FETCH_BATCH = 32
_LEASE_ROUNDS = 16
_RECLAIM_RUNS = 100
_REASON = re.compile(r"[A-Z][A-Z0-9_]{0,62}(:[ -~]{1,64})?")


@dataclass
class _Opened:
    """A run's data set in this process; `incarnation` tells a new run from an old one of the same id, and settings that
    another server changed."""

    incarnation: tuple[int, int]
    dataset: Dataset


@dataclass
class Buffer:
    """Use cases over a store, a loader of data sets, and functions of users."""

    store: Store
    loader: DatasetLoader
    functions: UserFunctions
    changes: Changes = field(default_factory=Changes)
    side: SideUse = field(init=False)
    _taking: Taking = field(init=False)
    _opened: dict[str, _Opened] = field(default_factory=dict)
    _opening: dict[str, asyncio.Lock] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.side = SideUse(self.store)
        self._taking = Taking(self.store, self.functions)

    # -- runs

    async def create_run(self, run_id: str, spec_json: str, plan: RunPlan) -> Created:
        """Creates a run, or opens it again when nothing differs that must not.

        Raises RUN_EXISTS, DATA_*, FUNCTION_NOT_LOADABLE.
        """
        ids.check_run_id(run_id)
        await self.functions.check(spec_json)
        async with self._opening.setdefault(run_id, asyncio.Lock()):
            known = await self.store.find_run(run_id)
            if known is None:
                dataset = await self.loader.load(run_id, spec_json, None)
                created = await self.store.create_run(run_id, spec_json, plan, dataset)
                record = await self.store.get_run(run_id)
                if created:
                    self._opened[run_id] = _Opened(await self.store.run_incarnation(run_id), dataset)
                    return Created(record, created=True)
                known = record
            await self._reopen(known, spec_json, plan)
        self.changes.notify(run_id)
        return Created(await self.store.get_run(run_id), created=False)

    async def _reopen(self, known: RunRecord, spec_json: str, plan: RunPlan) -> None:
        differing = fixed_differences(known.spec_json, spec_json)
        if differing:
            raise ServiceError(
                Code.ALREADY_EXISTS,
                "RUN_EXISTS",
                f"Run {known.run_id} exists with other settings: {'; '.join(differing)}; give this run another run_id,"
                " or set the keys back to go on with it.",
                run_id=known.run_id,
                keys=", ".join(differing),
            )
        skipped = await self.store.skipped_rows(known.run_id)
        dataset = await self.loader.load(known.run_id, spec_json, skipped)
        self._check_unchanged(known, dataset)
        if not await self.store.update_run(known, spec_json, plan):
            raise ServiceError(
                Code.ABORTED, "RUN_CHANGED", f"Run {known.run_id} was opened by another caller just now; try again."
            )
        incarnation = await self.store.run_incarnation(known.run_id)
        # Another caller may have opened it once more meanwhile.
        if (await self.store.get_run(known.run_id)).spec_json == spec_json:
            self._opened[known.run_id] = _Opened(incarnation, dataset)

    async def delete_run(self, run_id: str, *, force: bool) -> int:
        """Deletes all the store has of a run; → number of keys. Raises RUN_ACTIVE, RUN_DELETING."""
        count = await self.store.delete_run(ids.check_run_id(run_id), force=force)
        self._opened.pop(run_id, None)
        self.changes.notify(run_id)
        return count

    async def get_run(self, run_id: str) -> RunRecord:
        """The run. Raises RUN_NOT_FOUND."""
        return await self.store.get_run(run_id)

    async def list_runs(self, states: Sequence[RunState], start: int, count: int) -> tuple[list[RunRecord], bool]:
        """(runs, whether more follow), newest first, skipping `start`."""
        return await self.store.list_runs(states, start, count)

    async def finish_run(self, run_id: str, state: RunState, reason: str, trainer_epoch: int) -> RunRecord:
        """Ends a run; the first end is kept. Raises FENCED."""
        if state is RunState.ACTIVE:
            raise invalid_field("state", state.value, "a run ends as FINISHED, FAILED or STOPPED")
        await self.store.finish_run(run_id, state, reason, trainer_epoch)
        self.changes.notify(run_id)
        return await self.store.get_run(run_id)

    async def begin_session(self, run_id: str, caller: str) -> tuple[int, RunRecord]:
        """Fences earlier trainers; returns the new epoch and the run. Raises RUN_FINISHED."""
        epoch = await self.store.begin_session(run_id, caller)
        return epoch, await self.store.get_run(run_id)

    # -- leases

    async def lease_prompts(self, run_id: str, request: LeaseRequest, max_wait: float) -> Leases:
        """Leases prompts within the admission limit. Raises RUN_FINISHED, INVALID_FIELD, DATA_*."""
        if not request.request_id or len(request.request_id) > 64:
            raise invalid_field("request_id", request.request_id, "use a UUID of this request")
        if not 1 <= request.count <= MAX_LEASED_AT_ONCE:
            raise invalid_field("max_prompt_count", request.count, f"use 1 to {MAX_LEASED_AT_ONCE}")
        _check_ttl(request.ttl_seconds)
        dataset = await self._dataset(run_id)

        def settled(answer: Grants) -> bool:
            return bool(answer.grants) or answer.repeated

        deadline, rounds = time.monotonic() + max_wait, 0
        while True:
            wish = replace(request, request_id=f"{request.request_id}/{rounds}") if rounds else request
            wait = max(0.0, deadline - time.monotonic())
            answer = await self.changes.until(run_id, wait, lambda wish=wish: self.store.lease(run_id, wish), settled)
            leases = await with_partials(self.store, run_id, await usable(self.store, run_id, dataset, answer.grants))
            rounds += 1
            # When none of them could be used, others are asked for in the same call.
            if leases or not answer.grants or rounds == _LEASE_ROUNDS:
                break
        expire = min((lease.grant.deadline_ms for lease in leases), default=answer.now_ms)
        return Leases(tuple(leases), answer.policy_version, expire)

    async def extend_leases(self, run_id: str, lease_ids: Sequence[str], ttl: float) -> tuple[int, list[str]]:
        """(new deadline in ms, leases that are no longer held)."""
        _check_ttl(ttl)
        known, foreign = _parse_leases(lease_ids)
        deadline, lost = await self.store.extend(run_id, known, ttl)
        return deadline, foreign + lost

    async def release_leases(
        self,
        run_id: str,
        lease_ids: Sequence[str],
        reason: str,
        partials: Sequence[PackedGroup] = (),
        *,
        drained: bool = False,
    ) -> tuple[int, list[str]]:
        """(leases given back, leases that were no longer held). `partials`: what was made under some of them.

        Raises INVALID_FIELD, STORE_FULL.
        """
        if reason and (reason == UNDO or not _REASON.fullmatch(reason)):
            raise invalid_field(
                "evict_reason",
                reason,
                "use up to 63 capitals, digits and _, not UNDO; a detail of up to 64 signs may follow a colon",
            )
        if reason and partials:
            raise invalid_field("partial_groups", len(partials), "an evicted prompt leaves nothing to go on from")
        by_lease = {group.lease_id: group for group in partials}
        if unknown := by_lease.keys() - set(lease_ids):
            raise invalid_field("partial_groups", min(unknown), "name its lease in lease_ids too")
        known, foreign = _parse_leases(lease_ids)
        fate = UNDO if drained and not reason else reason
        released, lost = await self.store.release(run_id, known, fate, by_lease)
        self.changes.notify(run_id)
        return released, foreign + lost

    async def reclaim(self, caller: str) -> int:
        """Leases of a node that was started again go to others now, not when they expire; → how many."""
        count = 0
        for run in (await self.store.list_runs([RunState.ACTIVE], 0, _RECLAIM_RUNS))[0]:
            count += await self.store.reclaim(run.run_id, caller)
            self.changes.notify(run.run_id)
        return count

    async def samples_per_group(self, run_id: str) -> int:
        """Samples that a complete group of the run has. Raises RUN_NOT_FOUND."""
        return await self.store.samples_per_group(run_id)

    async def put_groups(self, run_id: str, groups: Sequence[PackedGroup | PutResult]) -> list[PutResult]:
        """Outcome of every group, in order; groups that the edge refused already come as their result."""
        packed = [group for group in groups if isinstance(group, PackedGroup)]
        answers = iter(await self.store.put(run_id, packed) if packed else ())
        results = [next(answers) if isinstance(group, PackedGroup) else group for group in groups]
        if any(result.outcome is PutOutcome.STORED for result in results):
            self.changes.notify(run_id)
        return results

    # -- batches

    async def take_batch(self, run_id: str, trainer_epoch: int, step: int, count: int, max_wait: float) -> Batch:
        """Reserves `count` groups for a step. Raises FENCED, STEP_OUT_OF_ORDER, DATA_EXHAUSTED, RUN_FINISHED."""
        if count < 1:
            raise invalid_field("group_count", count, "a batch has at least one group")
        batch = await self.changes.until(
            run_id,
            max_wait,
            lambda: self._taking.take(run_id, trainer_epoch, step, count),
            lambda answer: bool(answer.headers),
        )
        self.changes.notify(run_id)
        return batch

    async def fetch_samples(self, run_id: str, sample_ids: Sequence[str]):
        """Yields lists of packed samples in the order asked. Raises SAMPLE_NOT_FOUND."""
        await self.store.run_incarnation(run_id)
        wanted = [ids.parse_sample_id(run_id, text) for text in sample_ids]
        for start in range(0, len(wanted), FETCH_BATCH):
            part = await self.store.samples(run_id, wanted[start : start + FETCH_BATCH])
            for text, sample in zip(sample_ids[start : start + FETCH_BATCH], part, strict=True):
                if sample is None:
                    raise ids.sample_not_found(run_id, text)
            yield part

    async def commit_step(self, run_id: str, trainer_epoch: int, step: int) -> int:
        """Groups consumed by the step. Raises FENCED, STEP_OUT_OF_ORDER."""
        count = await self.store.commit(run_id, trainer_epoch, step)
        self.changes.notify(run_id)
        return count

    async def record_checkpoint(self, run_id: str, trainer_epoch: int, step: int, path: str) -> int:
        """Lowest ordinal that is not finished. Raises FENCED, STEP_OUT_OF_ORDER."""
        return await self.store.record_checkpoint(run_id, trainer_epoch, step, path)

    async def restore_run(self, run_id: str, trainer_epoch: int, step: int) -> tuple[int, int]:
        """(groups returned, leases cancelled). Raises FENCED, STEP_NOT_RESTORABLE."""
        if step < -1:
            raise invalid_field("step", step, "use -1 to start over, or the last step of a checkpoint")
        answer = await self.store.restore(run_id, trainer_epoch, step)
        self.changes.notify(run_id)
        return answer

    # -- versions

    async def reserve_version(self, run_id: str, trainer_epoch: int) -> int:
        """A version above every one before. Raises FENCED."""
        return await self.store.reserve_version(run_id, trainer_epoch)

    async def publish_version(self, run_id: str, trainer_epoch: int, version: int, step_count: int) -> None:
        """Makes a version current. Raises FENCED, INVALID_FIELD."""
        await self.store.publish_version(run_id, trainer_epoch, version, step_count)
        self.changes.notify(run_id)

    # -- looking in

    async def stats(self, run_id: str) -> Stats:
        """Counts of a run, those of its data sets only while this server holds the run's data."""
        stats = await self.store.stats(run_id)
        opened = self._opened.get(run_id)
        return await with_datasets(stats, opened.dataset) if opened else stats

    async def watch(self, run_id: str, min_interval: float) -> AsyncIterator[Stats]:
        """Counts whenever they changed, at most once in `min_interval` seconds, until the run has ended.

        Raises SERVER_DRAINING when this server is about to end: ask another.
        """
        await self._dataset_if_readable(run_id)
        last = None
        while True:
            stats = await self.stats(run_id)
            if (seen := without_clock(stats)) != last:
                last = seen
                yield stats
            if stats.state is not RunState.ACTIVE:
                return
            if await self.changes.closing(min_interval):
                raise ServiceError(
                    Code.UNAVAILABLE, "SERVER_DRAINING", "This buffer server is about to end; watch again."
                )

    async def list_groups(
        self, run_id: str, start: int, count: int, wanted: GroupFilter
    ) -> tuple[list[GroupRecord], bool]:
        """(groups from ordinal `start` on, whether more follow)."""
        dataset = await self._dataset_if_readable(run_id)
        return await list_groups(self.store, dataset, run_id, (start, count), wanted)

    async def get_group(self, run_id: str, group_id: str) -> tuple[GroupRecord, Prompt, StoredGroup | None]:
        """State, prompt and, while stored, payload of a group. Raises GROUP_NOT_FOUND."""
        await self.store.run_incarnation(run_id)
        record, stored = await self.store.get_group(run_id, ids.parse_group_id(run_id, group_id))
        dataset = await self._dataset(run_id)
        (record,) = await with_origins(dataset, [record])
        return record, (await dataset.draw([record.ordinal]))[0].prompt, stored

    async def eval_prompts(self, run_id: str, name: str, start: int, count: int) -> tuple[list[Prompt], int]:
        """(prompts, rows in all) of an evaluation set. Raises DATASET_NOT_FOUND."""
        dataset = await self._dataset(run_id)
        return await dataset.eval_prompts(name, start, count)

    async def _dataset(self, run_id: str) -> Dataset:
        """The run's data set, indexed again when this process has not seen the run. Raises RUN_NOT_FOUND, DATA_*."""
        incarnation = await self.store.run_incarnation(run_id)
        opened = self._opened.get(run_id)
        if opened and opened.incarnation == incarnation:
            return opened.dataset
        async with self._opening.setdefault(run_id, asyncio.Lock()):
            opened = self._opened.get(run_id)
            if opened and opened.incarnation == incarnation:
                return opened.dataset
            run = await self.store.get_run(run_id)
            dataset = await self.loader.load(run_id, run.spec_json, await self.store.skipped_rows(run_id))
            self._check_unchanged(run, dataset)
            self._opened[run_id] = _Opened(incarnation, dataset)
            return dataset

    async def _dataset_if_readable(self, run_id: str) -> Dataset | None:
        """The run's data set; None when its files cannot be read: looking in must go on. Raises RUN_NOT_FOUND."""
        try:
            return await self._dataset(run_id)
        except ServiceError as error:
            if not error.reason.startswith("DATA_"):
                raise
            return None

    @staticmethod
    def _check_unchanged(run: RunRecord, dataset: Dataset) -> None:
        """Ordinals name rows: a file with another number of rows would give prompts twice, or lose them."""
        if dataset.row_count != run.row_count:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "DATA_MALFORMED",
                f"The data file of run {run.run_id} has {dataset.row_count} usable rows, but {run.row_count} when the"
                " run was created; put the file back, or start a run with another run_id.",
                run_id=run.run_id,
            )


def _check_ttl(seconds: float) -> None:
    if not 0 < seconds <= MAX_TTL_SECONDS:
        raise invalid_field("ttl", seconds, f"use more than 0 and at most {MAX_TTL_SECONDS:.0f} seconds")


def _parse_leases(texts: Sequence[str]) -> tuple[list[ids.LeaseId], list[str]]:
    """(our leases, ids that no lease of ours can have)."""
    parsed = [(text, ids.parse_lease_id(text)) for text in texts]
    return [lease for _, lease in parsed if lease], [text for text, lease in parsed if not lease]
