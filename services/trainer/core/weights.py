"""A weight update as the trainer negotiates it: Prepare, Transfer, Commit or Abort, group by group.

Knows ranks and engines through ports. Invariants:
- The bytes that travel are those of the last `stage`; they stay the same until the next one, whatever the ranks
  train meanwhile, so a late joiner gets exactly the published version.
- Each weight group is a failure domain: after Prepare none waits for another, and a broken one is left at once.
- A group stands from update to update while its members are the same processes and every update in it was committed;
  after anything else it is left, and its name is never used again. The engines' side does the same.
- Every update has an epoch of its own above all earlier ones: `session epoch × 1,000,000 + counter`.
- Not reentrant: the caller holds the ranks while `stage` or `push` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import ServiceError
from services.common.telemetry import get_logger
from services.trainer.core.buckets import BucketPlan, plan_digest
from services.trainer.core.commands import (
    Checksums,
    Command,
    FinishBucket,
    GroupSpec,
    JoinGroups,
    LeaveGroups,
    SendBucket,
    SetupResult,
    StageWeights,
)
from services.trainer.core.ports import BucketRequest, PrepareRequest, Ranks, RanksFailed, Rollout, Rules
from services.trainer.core.records import EngineView

log = get_logger(__name__)

EPOCHS_PER_SESSION = 1_000_000
_LEAVE_SECONDS = 20.0
_ABORT_SECONDS = 5.0
_SEND_SECONDS = 20.0
"""Rank 0 only begins to send."""
_GRACE_SECONDS = 5.0
"""Between the deadline that the other side keeps and the moment we stop waiting for its answer."""


@dataclass(frozen=True)
class UpdateSettings:
    """`address` and `free_port` make the rendezvous of a group; `timeout` seconds bound each call of an update."""

    run_id: str
    session_epoch: int
    bucket_bytes: int
    group_size: int
    timeout: float
    join_timeout: float
    stage_timeout: float
    address: str
    free_port: Callable[[], int]


@dataclass
class UpdateReport:
    """What an update did. `failed`: engine id → why. `seconds` by part, of the slowest group; `pause_seconds`: the
    longest standstill; `verified_tensor_count`: checksums that engines compared before they served, over all engines;
    `new_group_count`: groups that did not stand before."""

    version: int
    verified_tensor_count: int = 0
    committed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    pause_seconds: float = 0.0
    total_bytes: int = 0
    bucket_count: int = 0
    new_group_count: int = 0


@dataclass
class _Group:
    """One communicator. `stands`: both sides joined it in an earlier update. `rules` of the present update, by engine
    id."""

    spec: GroupSpec
    members: tuple[EngineView, ...]
    stands: bool = False
    rules: dict[str, Rules] = field(default_factory=dict)

    @property
    def processes(self) -> tuple[tuple[str, str], ...]:
        """Engine ids and incarnations."""
        return tuple((engine.engine_id, engine.incarnation) for engine in self.members)


class WeightUpdater:
    """Brings engines to the staged weights.

    Args:
        ranks: the trainer's ranks; rank 0 is rank 0 of every group.
        rollout: the engines.
        setup: what rank 0 said of itself.
        settings: names, sizes and deadlines.
    """

    def __init__(self, ranks: Ranks, rollout: Rollout, setup: SetupResult, settings: UpdateSettings) -> None:
        self._ranks = ranks
        self._rollout = rollout
        self._setup = setup
        self._settings = settings
        self._counter = 0
        self._plan: BucketPlan | None = None
        self._checksums: dict[tuple, Mapping[str, str]] = {}
        self._standing: list[_Group] = []
        self._rank_lock = asyncio.Lock()

    @property
    def plan(self) -> BucketPlan | None:
        """What the staged weights travel in; None before the first `stage`."""
        return self._plan

    async def stage(self) -> float:
        """Makes the ranks' present weights the ones that `push` sends; returns the seconds it took."""
        began = time.monotonic()
        plans = await self._ranks.call_all(StageWeights(self._settings.bucket_bytes), self._settings.stage_timeout)
        self._plan = plans[0]
        self._checksums.clear()
        return time.monotonic() - began

    async def push(
        self, version: int, engines: Sequence[EngineView], join_timeout: float | None = None
    ) -> UpdateReport:
        """One attempt to bring `engines` to the staged weights as `version`; they have `join_timeout` seconds to meet.

        Raises:
            RanksFailed: and nothing else; what fails on an engine's side is in the report.
        """
        assert self._plan, "stage() comes first"
        self._counter += 1
        epoch = self._settings.session_epoch * EPOCHS_PER_SESSION + self._counter
        report = UpdateReport(version, total_bytes=self._plan.total_bytes, bucket_count=len(self._plan.buckets))
        groups = self._deal(epoch, engines, report)
        if not groups:
            return report
        taken = {engine.engine_id for group in groups if not group.stands for engine in group.members}
        await self._leave([group for group in self._standing if taken & dict(group.processes).keys()])
        try:
            with _timed(report, "prepare"):
                groups = await self._prepare(
                    epoch, version, groups, report, join_timeout or self._settings.join_timeout
                )
            with _timed(report, "checksums"):
                await self._expect(groups)
            await _all(*(self._carry(epoch, version, group, report) for group in groups))
        except BaseException as error:
            await self._abandon(epoch, groups, str(error) or type(error).__name__)
            raise
        for engine_id, why in report.failed.items():
            log.warning("engine left out of a weight update", engine=engine_id, version=version, why=why)
        return report

    async def keep(self, engines: Sequence[EngineView]) -> None:
        """Leaves the groups in which there is anyone else than `engines`: all that live."""
        live = {(engine.engine_id, engine.incarnation) for engine in engines}
        await self._leave([group for group in self._standing if not live.issuperset(group.processes)])

    def _deal(self, epoch: int, engines: Sequence[EngineView], report: UpdateReport) -> list[_Group]:
        """Groups that stand and hold none but `engines`; the other engines of one backend in groups of
        `group_size`."""
        here = {(engine.engine_id, engine.incarnation): engine for engine in engines}
        groups = []
        for group in self._standing:
            if here.keys() >= set(group.processes):
                members = tuple(here.pop(process) for process in group.processes)
                groups.append(_Group(group.spec, members, stands=True))
        by_backend: dict[str, list[EngineView]] = {}
        for engine in here.values():
            backend = next((name for name in engine.backends if name in self._setup.backends), None)
            if backend is None:
                report.failed[engine.engine_id] = (
                    f"it has no collective backend of the trainer: it offers {', '.join(engine.backends) or 'none'},"
                    f" the trainer {', '.join(self._setup.backends)}"
                )
            else:
                by_backend.setdefault(backend, []).append(engine)
        for backend, members in by_backend.items():
            for start in range(0, len(members), self._settings.group_size):
                part = tuple(members[start : start + self._settings.group_size])
                spec = GroupSpec(
                    name=f"{self._settings.run_id}-{epoch}-{report.new_group_count}",
                    backend=backend,
                    master_address=self._settings.address,
                    master_port=self._settings.free_port(),
                    world_size=1 + sum(engine.rank_count for engine in part),
                )
                groups.append(_Group(spec, part))
                report.new_group_count += 1
        return groups

    async def _prepare(
        self, epoch: int, version: int, groups: list[_Group], report: UpdateReport, timeout: float
    ) -> list[_Group]:
        """All new groups rendezvous at once; a group in which anyone failed is left out."""
        new = tuple(group.spec for group in groups if not group.stands)
        asking = [self._prepare_group(epoch, version, group, timeout) for group in groups]
        joined, *failures = await _all(self._join(new, timeout), *asking)
        alive = []
        for group, failed in zip(groups, failures, strict=True):
            mine = joined.get(group.spec.name)
            if failed or mine:
                await self._break(epoch, group, failed, mine, report)
            else:
                alive.append(group)
                if not group.stands:
                    self._standing.append(group)
        return alive

    async def _join(self, specs: tuple[GroupSpec, ...], timeout: float) -> Mapping[str, str | None]:
        return await self._rank(JoinGroups(specs, timeout), timeout + 2 * _GRACE_SECONDS) if specs else {}

    async def _prepare_group(self, epoch: int, version: int, group: _Group, timeout: float) -> dict[str, str]:
        """→ failures by engine id."""
        assert self._plan
        tensors = tuple(spec for bucket in self._plan.buckets for spec in bucket)
        failures: dict[str, str] = {}
        offsets, offset = [], 1
        for engine in group.members:
            offsets.append(offset)
            offset += engine.rank_count

        async def ask(engine: EngineView, rank_offset: int) -> None:
            request = PrepareRequest(
                run_id=self._settings.run_id,
                epoch=epoch,
                version=version,
                group=group.spec,
                rank_offset=rank_offset,
                plan_digest=plan_digest(tensors),
                torch_version=self._setup.torch_version,
                nccl_version=self._setup.nccl_version,
                collective_env=self._setup.collective_env,
                tensors=tensors,
            )
            try:
                group.rules[engine.engine_id] = await self._rollout.prepare(engine, request, timeout + _GRACE_SECONDS)
            except ServiceError as error:
                failures[engine.engine_id] = error.message

        await _all(*(ask(engine, rank) for engine, rank in zip(group.members, offsets, strict=True)))
        return failures

    async def _expect(self, groups: list[_Group]) -> None:
        """Computes what the engines must hold, before any of them is paused."""
        for group in groups:
            for rules in group.rules.values():
                key = _key(rules)
                if rules.by_name and key not in self._checksums:
                    command = Checksums(rules.by_name, rules.algorithm)
                    self._checksums[key] = await self._rank(command, self._settings.stage_timeout)

    async def _carry(self, epoch: int, version: int, group: _Group, report: UpdateReport) -> None:
        """Transfer and commit of one group."""
        with _timed(report, "transfer"):
            whole = await self._transfer(epoch, group, report)
        if whole:
            with _timed(report, "commit"):
                await self._commit(epoch, version, group, report)

    async def _transfer(self, epoch: int, group: _Group, report: UpdateReport) -> bool:
        """Bucket by bucket; False when the group broke."""
        assert self._plan
        timeout, names = self._settings.timeout, (group.spec.name,)
        count = len(self._plan.buckets)
        for index, tensors in enumerate(self._plan.buckets):
            await self._rank(SendBucket(index, names, timeout), _SEND_SECONDS)
            failed = await self._transfer_group(group, BucketRequest(epoch, index, count, tensors))
            own: Mapping[str, str | None] = {}
            if not failed:  # else our end of the broadcast may have no end
                own = await self._rank(FinishBucket(names), timeout + 2 * _GRACE_SECONDS)
            if failed or own[group.spec.name]:
                await self._break(epoch, group, failed, own.get(group.spec.name), report)
                return False
        return True

    async def _transfer_group(self, group: _Group, request: BucketRequest) -> dict[str, str]:
        failures: dict[str, str] = {}

        async def ask(engine: EngineView) -> None:
            try:
                await self._rollout.transfer(engine, request, self._settings.timeout + _GRACE_SECONDS)
            except ServiceError as error:
                failures[engine.engine_id] = error.message

        await _all(*(ask(engine) for engine in group.members))
        return failures

    async def _break(
        self, epoch: int, group: _Group, failed: Mapping[str, str], mine: str | None, report: UpdateReport
    ) -> None:
        """Ends a group: `failed` says why by engine id, `mine` on our side."""
        why = next(iter(failed.values()), None) or f"the trainer's side failed: {mine}"
        for engine in group.members:
            report.failed[engine.engine_id] = failed.get(engine.engine_id, f"its weight group broke: {why}")
        await self._leave([group])
        await self._abort(epoch, [group], "the weight group broke")

    async def _commit(self, epoch: int, version: int, group: _Group, report: UpdateReport) -> None:
        async def ask(engine: EngineView) -> bool:
            rules = group.rules[engine.engine_id]
            expected = self._checksums[_key(rules)] if rules.by_name else {}
            try:
                paused = await self._rollout.commit(engine, epoch, version, expected, self._settings.timeout)
            except ServiceError as error:
                report.failed[engine.engine_id] = error.message
                await self._abort_one(engine, epoch, error.message)
                return False
            report.committed.append(engine.engine_id)
            report.verified_tensor_count += len(expected)
            report.pause_seconds = max(report.pause_seconds, paused)
            return True

        if not all(await _all(*(ask(engine) for engine in group.members))):
            await self._leave([group])

    async def _abandon(self, epoch: int, groups: Sequence[_Group], why: str) -> None:
        """After an error of our own: the engines must not wait for us until their deadline."""
        await asyncio.shield(self._abort(epoch, groups, why))
        with contextlib.suppress(RanksFailed):
            if self._ranks.failure is None:
                await asyncio.shield(self._leave(groups))

    async def _leave(self, groups: Sequence[_Group]) -> None:
        """Our end of the groups is gone for good; the engines leave theirs by Abort or at their next Prepare."""
        names = tuple(group.spec.name for group in groups)
        self._standing = [group for group in self._standing if group.spec.name not in names]
        if names:
            await self._rank(LeaveGroups(names), _LEAVE_SECONDS)

    async def _rank(self, command: Command, timeout: float) -> Any:
        """Answer of rank 0, which takes one command at a time."""
        async with self._rank_lock:
            return await self._ranks.call(0, command, timeout)

    async def _abort(self, epoch: int, groups: Sequence[_Group], why: str) -> None:
        await _all(*(self._abort_one(engine, epoch, why) for group in groups for engine in group.members))

    async def _abort_one(self, engine: EngineView, epoch: int, why: str) -> None:
        # An engine that cannot be told gives the update up by its own deadline.
        with contextlib.suppress(ServiceError):
            await self._rollout.abort(engine, epoch, why, _ABORT_SECONDS)


def _key(rules: Rules) -> tuple:
    parts = ((name, rule.sources, rule.padding_bytes) for name, rule in rules.by_name.items())
    return (rules.algorithm, *sorted(parts))


@contextlib.contextmanager
def _timed(report: UpdateReport, part: str):
    began = time.monotonic()
    try:
        yield
    finally:
        report.seconds[part] = max(report.seconds.get(part, 0.0), time.monotonic() - began)


async def _all(*work: Awaitable | Coroutine) -> list:
    """Results in order. The first error cancels the rest, waits for their end and is raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
