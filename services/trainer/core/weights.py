"""A weight update as the trainer negotiates it: Prepare, Transfer, Commit or Abort, group by group.

Knows engines through ports, and how bytes reach them through `update_groups.Carrier`. Invariants:
- The bytes that travel are those of the last `stage`; they stay the same until the next one, whatever the ranks
  train meanwhile, so a late joiner gets exactly the published version. `stage` needs the ranks for itself; `push` does
  not, and several may run at once for different engines.
- Each weight group is a failure domain: none waits for another, and a broken one is left at once. When the others have
  the version, one that is behind has a moment more, and is then left as well.
- Every update has an epoch of its own above all earlier ones: `session epoch × 1,000,000 + counter`.
- An update has one deadline, which all its calls share.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import Code, ServiceError
from services.common.fault_points import reach_async
from services.common.telemetry import get_logger
from services.trainer.core.buckets import BucketPlan
from services.trainer.core.commands import Checksums, Command, SetupResult, StageWeights
from services.trainer.core.file_carrier import FileTransport
from services.trainer.core.ports import Prepared, PrepareRequest, Ranks, Received, Rollout
from services.trainer.core.records import EngineView
from services.trainer.core.update_groups import Group, GroupTable
from services.trainer.core.update_report import LEAST_COMMIT_SECONDS, Update, UpdateReport

log = get_logger(__name__)

EPOCHS_PER_SESSION = 1_000_000
_COMMAND_SECONDS = 20.0
"""For commands that rank 0 answers at once."""
_ABORT_SECONDS = 5.0
_TELL_SECONDS = 1.0
"""For engines to answer an Abort before an error is passed on; they are told all the same."""
_LOOK_SECONDS = 1.0
"""While engines wait for bytes, our own side is asked whether any can come."""


@dataclass(frozen=True)
class UpdateSettings:
    """`address` and `free_port` make the rendezvous of a group; `timeout` seconds bound an update, `join_timeout` of
    them the meeting of a new group's members."""

    run_id: str
    session_epoch: int
    bucket_bytes: int
    group_size: int
    timeout: float
    join_timeout: float
    stage_timeout: float
    address: str
    free_port: Callable[[], int]


class WeightUpdater:
    """Brings engines to the staged weights.

    Args:
        ranks: the trainer's ranks; rank 0 is rank 0 of every group.
        rollout: the engines.
        setup: what rank 0 said of itself.
        settings: names, sizes and deadlines.
        files: another way for bytes.
    """

    def __init__(
        self,
        ranks: Ranks,
        rollout: Rollout,
        setup: SetupResult,
        settings: UpdateSettings,
        files: FileTransport | None = None,
    ) -> None:
        self._ranks = ranks
        self._rollout = rollout
        self._setup = setup
        self._settings = settings
        self._counter = 0
        self._plan: BucketPlan | None = None
        self._checksums: dict[tuple, asyncio.Task] = {}
        place = (settings.run_id, settings.address, settings.free_port)
        self._groups = GroupTable(self._rank, setup, settings.group_size, place)
        self._background: set[asyncio.Task] = set()
        self._slow: set[str] = set()
        """Engines that were too slow for the last update that they were in."""
        self._files = files or FileTransport(None, None)

    @property
    def plan(self) -> BucketPlan | None:
        """What the staged weights travel in; None before the first `stage`."""
        return self._plan

    async def stage(self, version: int = 0) -> float:
        """Makes the ranks' present weights the ones that `push` sends, as `version`; returns the seconds it took to
        begin. No `push` may be under way."""
        began = time.monotonic()
        await self._files.settled()
        command = StageWeights(self._settings.bucket_bytes, version)
        plans = await self._ranks.call_all(command, self._settings.stage_timeout)
        self._plan = plans[0]
        self._checksums.clear()
        return time.monotonic() - began

    async def keep(self, engines: Sequence[EngineView]) -> None:
        """Leaves the groups in which there is anyone else than `engines`: all that live."""
        await self._groups.keep(engines)
        self._files.keep(engines)

    async def close(self) -> None:
        """Ends what goes on in the background."""
        await self._files.close()

    def published(self, version: int, step: int) -> None:
        """The staged weights serve as `version` of `step`: their files are seen to, in the background."""
        known = {key: task for key, task in self._checksums.items() if task.done() and not task.cancelled()}
        values = {key: task.result() for key, task in known.items() if not task.exception()}
        self._files.published(version, step, values)

    async def push(
        self, version: int, engines: Sequence[EngineView], join_timeout: float | None = None
    ) -> UpdateReport:
        """One attempt to bring `engines` to the staged weights as `version`; they have `join_timeout` seconds to meet.
        When it is cancelled, the engines that have not committed are told.

        Raises:
            RanksFailed: and nothing else; what fails on an engine's side is in the report.
        """
        assert self._plan, "stage() comes first"
        self._counter += 1
        epoch = self._settings.session_epoch * EPOCHS_PER_SESSION + self._counter
        report = UpdateReport(version, total_bytes=self._plan.total_bytes, bucket_count=len(self._plan.buckets))
        in_files, others = await self._files.deal(f"{self._settings.run_id}-{epoch}", engines, report)
        groups, report.failed = self._groups.deal(epoch, others)
        report.reasons = dict.fromkeys(report.failed, "INCOMPATIBLE")
        groups += in_files
        report.new_group_count = sum(not group.stands for group in groups)
        began = time.monotonic()
        join = min(join_timeout or self._settings.join_timeout, self._settings.timeout)
        update = Update(epoch, version, self._plan, join, began, began + self._settings.timeout, report)
        open_groups = {group.name: group for group in groups}
        try:
            await reach_async("trainer.before_prepare")
            await self._groups.begin(groups, join)
            await self._carry_all(update, open_groups)
        except BaseException as error:
            await self._abandon(update, list(open_groups.values()), str(error) or type(error).__name__)
            raise
        self._slow = (self._slow - set(report.committed)) | set(report.late)
        self._files.learn(engines, report)
        for engine_id, why in report.failed.items():
            log.warning("engine left out of a weight update", engine=engine_id, version=version, why=why)
        report.total_seconds = time.monotonic() - began
        if update.last_success:
            report.seconds["stragglers"] = time.monotonic() - update.last_success
        return report

    async def _carry_all(self, update: Update, groups: dict[str, Group]) -> None:
        """Every group for itself; those that are done are taken out of `groups`."""
        tasks = {asyncio.create_task(self._carry(update, group)): group for group in groups.values()}
        waiting = set(tasks)
        try:
            while waiting:
                slow = all(self._slow & {engine.engine_id for engine in tasks[task].members} for task in waiting)
                patience = update.patience(slow=slow)
                done, waiting = await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                    groups.pop(tasks[task].name)
                if not done:
                    break
        finally:
            await _cancel(tasks)  # those that failed together with the first as well
        waited = time.monotonic() - update.began
        for task in waiting:
            group = groups.pop(tasks[task].name)
            if not task.cancelled():  # it was done at the last moment
                task.result()
            else:
                update.report.late += [engine.engine_id for engine in group.members]
                when = "when the others had the version" if update.last_success else "the deadline of an update"
                why = f"it was not done after {waited:.1f} s, {when}"
                await self._break(update, group, {}, why)

    async def _carry(self, update: Update, group: Group) -> None:
        """All steps of one group."""
        seconds: dict[str, float] = {}
        with _timed(seconds, "prepare"):
            failed = await self._prepare(update, group)
        if failed:
            return await self._break(update, group, failed)
        # Computed while the bytes travel.
        expected = [self._expect(prepared) for prepared in group.prepared.values() if prepared.rules]
        with _timed(seconds, "transfer"):
            failed, own = await self._transfer(update, group)
        if failed or own:
            return await self._break(update, group, failed, own)
        with _timed(seconds, "checksums"):
            await _all(*map(asyncio.shield, expected))
        await reach_async("trainer.before_commit")
        with _timed(seconds, "commit"):
            whole = await self._commit(update, group)
        if whole:
            update.last_success = time.monotonic()
            parts = update.report.seconds
            parts |= {part: max(parts.get(part, 0.0), value) for part, value in seconds.items()}
        return None

    async def _prepare(self, update: Update, group: Group) -> dict[str, str]:
        """→ failures by engine id."""
        failures: dict[str, str] = {}
        known = {spec.name for bucket in update.plan.buckets for spec in bucket}

        async def ask(engine: EngineView, rank_offset: int) -> None:
            request = PrepareRequest(
                run_id=self._settings.run_id,
                epoch=update.epoch,
                version=update.version,
                group=group.carrier.spec,
                weights_path=group.carrier.weights_path,
                rank_offset=rank_offset,
                plan=update.plan,
                torch_version=self._setup.torch_version,
                nccl_version=self._setup.nccl_version,
                collective_env=self._setup.collective_env,
            )
            try:
                prepared = await self._rollout.prepare(engine, request, min(update.join_timeout, update.left))
                _check_rules(engine, prepared, known)
                group.prepared[engine.engine_id] = prepared
            except ServiceError as error:
                failures[engine.engine_id] = error.message
                update.report.reasons[engine.engine_id] = error.reason

        offsets, offset = [], 1
        for engine in group.members:
            offsets.append(offset)
            offset += engine.rank_count
        await _all(*(ask(engine, rank) for engine, rank in zip(group.members, offsets, strict=True)))
        return failures

    def _expect(self, prepared: Prepared) -> asyncio.Task:
        """What an engine must hold, computed once for all engines alike."""
        key = _key(prepared)
        if key not in self._checksums:
            call = self._ranks.call(0, Checksums(prepared.rules, prepared.algorithm), self._settings.stage_timeout)
            self._checksums[key] = task = asyncio.create_task(call)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # told to whoever waits for it
        return self._checksums[key]

    async def _transfer(self, update: Update, group: Group) -> tuple[dict[str, str], str | None]:
        """→ failures by engine id, and ours. What is still going on after the first failure is cut off."""
        failures: dict[str, str] = {}

        async def ask(engine: EngineView) -> Received:
            try:
                return await self._rollout.transfer(engine, update.epoch, update.left)
            except ServiceError as error:
                failures[engine.engine_id] = error.message
                update.report.reasons[engine.engine_id] = error.reason
                raise

        asking = [asyncio.create_task(ask(engine)) for engine in group.members]
        own = None
        try:
            await group.carrier.send(update.left)
            await reach_async("trainer.mid_transfer")
            waiting = set(asking)
            while waiting and not failures and not own:
                done, waiting = await asyncio.wait(waiting, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
                own = None if done else await group.carrier.error()
            if failures:
                own = await group.carrier.error()
        finally:
            await _cancel(asking)
        if failures or own:
            return failures, own
        longest = max(task.result().seconds for task in asking)
        update.report.wire_seconds = max(update.report.wire_seconds, longest)
        return {}, None

    async def _commit(self, update: Update, group: Group) -> bool:
        """False when any of the group failed."""
        report = update.report

        async def ask(engine: EngineView) -> bool:
            prepared = group.prepared[engine.engine_id]
            expected: Mapping[str, str] = self._checksums[_key(prepared)].result() if prepared.rules else {}
            timeout = max(update.left, LEAST_COMMIT_SECONDS)
            try:
                paused = await self._rollout.commit(engine, update.epoch, update.version, expected, timeout)
            except ServiceError as error:
                report.failed[engine.engine_id] = error.message
                report.reasons[engine.engine_id] = error.reason
                self._abort(update.epoch, [engine], error.message)
                return False
            report.committed.append(engine.engine_id)
            report.verified_tensor_count += len(expected)
            report.unverified += [] if prepared.rules else [engine.engine_id]
            report.staged_count += prepared.staged
            report.pause_seconds = max(report.pause_seconds, paused)
            return True

        whole = all(await _all(*(ask(engine) for engine in group.members)))
        if not whole:
            await self._groups.leave([group])
        return whole

    async def _break(self, update: Update, group: Group, failed: Mapping[str, str], own: str | None = None) -> None:
        """Ends a group: `failed` says why by engine id, `own` on our side."""
        ours = f"the trainer's side: {own}" if failed else own
        why = "; ".join(text for text in (next(iter(failed.values()), None), ours if own else None) if text)
        members = [engine for engine in group.members if engine.engine_id not in update.report.committed]
        for engine in members:
            text = f"its weight group broke: {why}" if failed else str(own)
            if own and engine.engine_id not in update.report.late:
                update.report.reasons.setdefault(engine.engine_id, "GROUP_BROKE")
            update.report.failed[engine.engine_id] = failed.get(engine.engine_id, text)
        self._abort(update.epoch, members, f"the weight group broke: {why}")
        await self._groups.leave([group])

    async def _abandon(self, update: Update, groups: Sequence[Group], why: str) -> None:
        """After an error of our own: the engines must not wait for us until their deadline."""
        done = update.report.committed
        members = [engine for group in groups for engine in group.members if engine.engine_id not in done]
        told = self._abort(update.epoch, members, why)
        leaving = self._in_background(self._leave_quietly(groups))
        await asyncio.wait([leaving, *told], timeout=_TELL_SECONDS)

    async def _leave_quietly(self, groups: Sequence[Group]) -> None:
        with contextlib.suppress(ServiceError):  # ranks that have failed have left
            await self._groups.leave(groups)

    async def _rank(self, command: Command) -> Any:
        return await self._ranks.call(0, command, _COMMAND_SECONDS)

    def _abort(self, epoch: int, engines: Sequence[EngineView], why: str) -> list[asyncio.Task]:
        """Tells engines, in the background: one that cannot be told gives the update up by its own deadline."""
        return [self._in_background(self._abort_one(engine, epoch, why)) for engine in engines]

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _abort_one(self, engine: EngineView, epoch: int, why: str) -> None:
        with contextlib.suppress(ServiceError):
            await self._rollout.abort(engine, epoch, why, _ABORT_SECONDS)


def _check_rules(engine: EngineView, prepared: Prepared, known: set[str]) -> None:
    for name, rule in prepared.rules.items():
        if missing := [source for source in rule.sources if source not in known]:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "UNKNOWN_TENSOR",
                f"Engine {engine.engine_id} would check {name} by tensor {missing[0]}, which the trainer does not send:"
                " it serves another model than the one that is trained.",
                engine_id=engine.engine_id,
                tensor=missing[0],
            )


def _key(prepared: Prepared) -> tuple:
    parts = ((name, rule.sources, rule.padding_bytes) for name, rule in prepared.rules.items())
    return (prepared.algorithm, *sorted(parts))


@contextlib.contextmanager
def _timed(seconds: dict[str, float], part: str):
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[part] = time.monotonic() - began


async def _all(*work: Awaitable | Coroutine) -> list:
    """Results in order. The first error cancels the rest, waits for their end and is raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Collection[asyncio.Future]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
