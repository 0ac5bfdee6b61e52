"""A weight update as the trainer negotiates it: Prepare, Transfer, Commit or Abort, group by group.

Knows ranks and engines through ports. Invariants:
- The bytes that travel are those of the last `stage`; they stay the same until the next one, whatever the ranks
  train meanwhile, so a late joiner gets exactly the published version.
- Each weight group is a failure domain: what happens to one costs the others at most a deadline.
- Every update has an epoch of its own above all earlier ones: `session epoch × 1,000,000 + counter`.
- Not reentrant: the caller holds the ranks while `stage` or `push` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field

from services.common.errors import ServiceError
from services.common.telemetry import get_logger
from services.trainer.core.buckets import BucketPlan, plan_digest
from services.trainer.core.commands import (
    Checksums,
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
    """What an update did. `failed`: engine id → why. `seconds` by part; `pause_seconds`: the longest standstill;
    `verified_tensor_count`: checksums that engines compared before they served, over all engines."""

    version: int
    verified_tensor_count: int = 0
    committed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    pause_seconds: float = 0.0
    total_bytes: int = 0
    bucket_count: int = 0


@dataclass
class _Group:
    """One communicator of an update under way. `rules` by engine id."""

    spec: GroupSpec
    members: tuple[EngineView, ...]
    rules: dict[str, Rules] = field(default_factory=dict)


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

    @property
    def staged(self) -> bool:
        """True once weights were staged."""
        return self._plan is not None

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
        names = tuple(group.spec.name for group in groups)
        if not groups:
            return report
        try:
            with _timed(report, "prepare"):
                groups = await self._prepare(
                    epoch, version, groups, report, join_timeout or self._settings.join_timeout
                )
                await self._expect(groups)
            with _timed(report, "transfer"):
                groups = await self._transfer(epoch, groups, report)
            with _timed(report, "commit"):
                await self._commit(epoch, version, groups, report)
        except BaseException as error:
            await self._abandon(epoch, groups, str(error) or type(error).__name__)
            raise
        await self._ranks.call(0, LeaveGroups(names), _LEAVE_SECONDS)
        for engine_id, why in report.failed.items():
            log.warning("engine left out of a weight update", engine=engine_id, version=version, why=why)
        return report

    def _deal(self, epoch: int, engines: Sequence[EngineView], report: UpdateReport) -> list[_Group]:
        """Deals engines of one backend into groups of `group_size`."""
        by_backend: dict[str, list[EngineView]] = {}
        for engine in engines:
            backend = next((name for name in engine.backends if name in self._setup.backends), None)
            if backend is None:
                report.failed[engine.engine_id] = (
                    f"it has no collective backend of the trainer: it offers {', '.join(engine.backends) or 'none'},"
                    f" the trainer {', '.join(self._setup.backends)}"
                )
            else:
                by_backend.setdefault(backend, []).append(engine)
        groups = []
        for backend, members in by_backend.items():
            for start in range(0, len(members), self._settings.group_size):
                part = tuple(members[start : start + self._settings.group_size])
                spec = GroupSpec(
                    name=f"{self._settings.run_id}-{epoch}-{len(groups)}",
                    backend=backend,
                    master_address=self._settings.address,
                    master_port=self._settings.free_port(),
                    world_size=1 + sum(engine.rank_count for engine in part),
                )
                groups.append(_Group(spec, part))
        return groups

    async def _prepare(
        self, epoch: int, version: int, groups: list[_Group], report: UpdateReport, timeout: float
    ) -> list[_Group]:
        """All groups rendezvous at once; a group in which anyone failed is left out."""
        joining = self._ranks.call(
            0, JoinGroups(tuple(group.spec for group in groups), timeout), timeout + 2 * _GRACE_SECONDS
        )
        asking = [self._prepare_group(epoch, version, group, timeout) for group in groups]
        joined, *failures = await _all(joining, *asking)
        return await self._survivors(epoch, groups, failures, joined, report)

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
                if rules and key not in self._checksums:
                    self._checksums[key] = await self._ranks.call(0, Checksums(rules), self._settings.stage_timeout)

    async def _transfer(self, epoch: int, groups: list[_Group], report: UpdateReport) -> list[_Group]:
        """Bucket by bucket over all groups that still live."""
        assert self._plan
        timeout = self._settings.timeout
        count = len(self._plan.buckets)
        for index, tensors in enumerate(self._plan.buckets):
            if not groups:
                break
            names = tuple(group.spec.name for group in groups)
            sending = self._ranks.call(0, SendBucket(index, names, timeout), timeout + 2 * _GRACE_SECONDS)
            request = BucketRequest(epoch, index, count, tensors)
            receiving = [self._transfer_group(group, request) for group in groups]
            sent, *failures = await _all(sending, *receiving)
            groups = await self._survivors(epoch, groups, failures, sent, report)
        return groups

    async def _transfer_group(self, group: _Group, request: BucketRequest) -> dict[str, str]:
        failures: dict[str, str] = {}

        async def ask(engine: EngineView) -> None:
            try:
                await self._rollout.transfer(engine, request, self._settings.timeout + _GRACE_SECONDS)
            except ServiceError as error:
                failures[engine.engine_id] = error.message

        await _all(*(ask(engine) for engine in group.members))
        return failures

    async def _survivors(
        self,
        epoch: int,
        groups: list[_Group],
        failures: Sequence[dict[str, str]],
        own: Mapping[str, str | None],
        report: UpdateReport,
    ) -> list[_Group]:
        """Groups without a failure on either side; the others are aborted and left."""
        alive, broken = [], []
        for group, failed in zip(groups, failures, strict=True):
            mine = own.get(group.spec.name)
            if not failed and mine is None:
                alive.append(group)
                continue
            broken.append(group)
            why = next(iter(failed.values()), None) or f"the trainer's side failed: {mine}"
            for engine in group.members:
                report.failed[engine.engine_id] = failed.get(engine.engine_id, f"its weight group broke: {why}")
        if broken:
            await self._abort(epoch, broken, "the weight group broke")
            await self._ranks.call(0, LeaveGroups(tuple(group.spec.name for group in broken)), _LEAVE_SECONDS)
        return alive

    async def _commit(self, epoch: int, version: int, groups: list[_Group], report: UpdateReport) -> None:
        async def ask(group: _Group, engine: EngineView) -> None:
            rules = group.rules[engine.engine_id]
            expected = self._checksums[_key(rules)] if rules else {}
            try:
                paused = await self._rollout.commit(engine, epoch, version, expected, self._settings.timeout)
            except ServiceError as error:
                report.failed[engine.engine_id] = error.message
                await self._abort_one(engine, epoch, error.message)
            else:
                report.committed.append(engine.engine_id)
                report.verified_tensor_count += len(expected)
                report.pause_seconds = max(report.pause_seconds, paused)

        await _all(*(ask(group, engine) for group in groups for engine in group.members))

    async def _abandon(self, epoch: int, groups: Sequence[_Group], why: str) -> None:
        """After an error of our own: the engines must not wait for us until their deadline."""
        await asyncio.shield(self._abort(epoch, groups, why))
        with contextlib.suppress(RanksFailed):
            if self._ranks.failure is None:
                names = tuple(group.spec.name for group in groups)
                await asyncio.shield(self._ranks.call(0, LeaveGroups(names), _LEAVE_SECONDS))

    async def _abort(self, epoch: int, groups: Sequence[_Group], why: str) -> None:
        await _all(*(self._abort_one(engine, epoch, why) for group in groups for engine in group.members))

    async def _abort_one(self, engine: EngineView, epoch: int, why: str) -> None:
        # An engine that cannot be told gives the update up by its own deadline.
        with contextlib.suppress(ServiceError):
            await self._rollout.abort(engine, epoch, why, _ABORT_SECONDS)


def _key(rules: Rules) -> tuple:
    return tuple(sorted(((name, rule.sources, rule.padding_bytes) for name, rule in rules.items())))


@contextlib.contextmanager
def _timed(report: UpdateReport, part: str):
    began = time.monotonic()
    try:
        yield
    finally:
        report.seconds[part] = time.monotonic() - began


async def _all(*work: Awaitable | Coroutine) -> list:
    """Results in order. The first error cancels the rest, waits for their end and is raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
