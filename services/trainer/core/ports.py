"""The outside world as the controller's core sees it. Every failure is a `ServiceError`; every call has a deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.common.errors import Code, ServiceError
from services.trainer.core.buckets import BucketPlan
from services.trainer.core.commands import ChecksumRule, Command, GroupSpec
from services.trainer.core.records import Batch, EngineView, EvalResult, GroupCounts, NodeView, Run, Session


class RanksFailed(ServiceError):
    """A rank died, did not answer in time or reported an error: the world must be started anew.

    `answered` is True when the rank itself reported it, so that the same input would fail again; `cause` is then the
    reason that it gave.
    """

    def __init__(self, rank: int, message: str, *, answered: bool, cause: str = "") -> None:
        super().__init__(Code.INTERNAL, "RANKS_FAILED", message, rank=rank)
        self.rank = rank
        self.answered = answered
        self.cause = cause


class Buffer(Protocol):
    """The buffer service. Calls with an epoch raise FENCED when a newer trainer holds the run."""

    async def get_run(self, run_id: str) -> Run: ...

    async def active_runs(self) -> Sequence[Run]:
        """Newest first."""
        ...

    async def begin_session(self, run_id: str) -> Session: ...

    async def finish_run(self, run_id: str, epoch: int, state: str, reason: str) -> Run:
        """`state`: FINISHED, FAILED or STOPPED."""
        ...

    async def take_batch(self, run_id: str, epoch: int, step: int, group_count: int, max_wait: float) -> Batch | None:
        """None when there are too few groups after `max_wait` seconds. Raises DATA_EXHAUSTED."""
        ...

    async def commit_step(self, run_id: str, epoch: int, step: int) -> int: ...

    async def record_checkpoint(self, run_id: str, epoch: int, step: int, path: str) -> None: ...

    async def restore_run(self, run_id: str, epoch: int, step: int) -> tuple[int, int]:
        """→ groups returned to READY, leases cancelled."""
        ...

    async def reserve_version(self, run_id: str, epoch: int) -> int: ...

    async def publish_version(self, run_id: str, epoch: int, version: int, step_count: int) -> None:
        """The present version again, with more steps, moves admission on and makes nothing older."""
        ...

    async def group_rows(self, run_id: str, group_ids: Sequence[str], step: int) -> list[dict[str, Any]]:
        """Rows of a file of samples (`services.common.sample_file`), groups as named. `step`: from 1."""
        ...

    async def counts(self, run_id: str) -> GroupCounts: ...


class Ranks(Protocol):
    """The Megatron ranks: one command at a time, but for those of `commands.ASIDE`. Raises RanksFailed, and the same
    again after the first."""

    @property
    def failure(self) -> RanksFailed | None:
        """Why the ranks cannot be used any more; None while they can."""
        ...

    async def start(self) -> None: ...

    async def call_all(self, command: Command, timeout: float) -> list[Any]: ...

    async def call(self, rank: int, command: Command, timeout: float) -> Any: ...

    async def stop(self) -> None: ...


class WatchedRanks(Ranks, Protocol):
    """Ranks whose failure can be waited for."""

    async def failed(self) -> RanksFailed:
        """`failure`, as soon as there is one."""
        ...


@dataclass(frozen=True)
class PrepareRequest:
    """What an engine must know to take part in an update. `group`: over which the bytes travel, `rank_offset` being the
    engine's first rank in it; without one they are in files at `weights_path`."""

    run_id: str
    epoch: int
    version: int
    group: GroupSpec | None
    weights_path: str
    rank_offset: int
    plan: BucketPlan
    torch_version: str
    nccl_version: str
    collective_env: Mapping[str, str]


@dataclass(frozen=True)
class Prepared:
    """How an engine takes the bytes and checks what it then holds. `staged`: it serves on meanwhile. `rules`: held
    tensor's name → names whose bytes make it up; empty when it cannot say what it holds. `algorithm`: one of
    `services.checksums.names`."""

    staged: bool = False
    algorithm: str = ""
    rules: Mapping[str, ChecksumRule] = field(default_factory=dict)


@dataclass(frozen=True)
class Received:
    """What an engine says of a transfer: bytes, and seconds from the first that was asked for to the last."""

    byte_count: int
    seconds: float


class Rollout(Protocol):
    """Rollout nodes and the weight service of their engines."""

    async def nodes(self) -> list[NodeView]:
        """Live nodes by the registry; those that do not answer are left out."""
        ...

    async def prepare(self, engine: EngineView, request: PrepareRequest, timeout: float) -> Prepared: ...

    async def transfer(self, engine: EngineView, epoch: int, timeout: float) -> Received:
        """Waits until all bytes of the plan are there."""
        ...

    async def commit(
        self, engine: EngineView, epoch: int, version: int, checksums: Mapping[str, str], timeout: float
    ) -> float:
        """→ seconds during which generation stood still."""
        ...

    async def abort(self, engine: EngineView, epoch: int, reason: str, timeout: float) -> None: ...

    async def evaluate(
        self, node: NodeView, run_id: str, dataset: str, min_version: int, timeout: float
    ) -> EvalResult: ...


@dataclass(frozen=True)
class CheckpointMarker:
    """Whose checkpoints a directory holds. `first_step`: steps the loaded weights contained when the run began."""

    run_id: str
    first_step: int


class CheckpointFiles(Protocol):
    """Directories of trainer checkpoints."""

    def latest(self, directory: str) -> str | None:
        """Path of the newest complete checkpoint in a directory, or None."""
        ...

    def marker(self, directory: str) -> CheckpointMarker | None: ...

    def mark(self, directory: str, marker: CheckpointMarker) -> None: ...

    def check_export(self, directory: str) -> None:
        """Raises EXPORT_REFUSED for a place where a user's export would destroy something, or could not be written."""
        ...


class Journal(Protocol):
    """The run's history: metrics.jsonl, TensorBoard, Prometheus and the stream of events."""

    def write(self, kind: str, step: int, metrics: Mapping[str, float], message: str) -> None:
        """`kind`: step, eval, update_weights, checkpoint, restore or notice."""
        ...

    def close(self) -> None:
        """Nothing is written after it."""
        ...
