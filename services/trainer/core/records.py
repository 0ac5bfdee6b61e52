"""What the controller knows of a run, a batch and the rollout nodes, as frozen values.

Steps count from 0. "Step s" in a record of a checkpoint, a push or an evaluation is the last step contained, -1
before the first; a "step count" is one more.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.records import SampleStatus


@dataclass(frozen=True)
class SampleHeader:
    """What the manifest says of a sample. `reward` is None when it could not be scored."""

    sample_id: str
    group_id: str
    prompt_length: int
    response_length: int
    trained_token_count: int
    reward: float | None
    min_version: int
    max_version: int
    status: SampleStatus
    index: int = 0
    rollout_index: int | None = None
    """Rollout of the group that it comes from, when rollouts give several samples."""

    @property
    def rollout(self) -> int:
        """Number of its rollout in the group."""
        return self.index if self.rollout_index is None else self.rollout_index

    @property
    def rollout_id(self) -> str:
        """Unique in the run."""
        return self.sample_id if self.rollout_index is None else f"{self.group_id}/{self.rollout_index}"

    @property
    def length(self) -> int:
        """All its tokens."""
        return self.prompt_length + self.response_length


@dataclass(frozen=True)
class Batch:
    """The manifest of a step, samples by group then index."""

    samples: tuple[SampleHeader, ...]
    ready_group_count: int
    stale_group_count: int
    policy_version: int


@dataclass(frozen=True)
class Run:
    """A run as the buffer knows it. Steps are -1 before the first."""

    run_id: str
    active: bool
    state: str
    reason: str
    committed_step: int
    checkpoint_step: int
    checkpoint_path: str
    policy_version: int
    spec_json: str


@dataclass(frozen=True)
class Session:
    """A trainer's hold on a run. Every mutating call of the buffer carries the epoch."""

    epoch: int
    run: Run


@dataclass(frozen=True)
class GroupCounts:
    """Groups of a run by state, for messages."""

    pending: int
    leased: int
    ready: int
    reserved: int
    consumed: int
    evicted: Mapping[str, int] = field(default_factory=dict)


class EngineState(enum.IntEnum):
    """State of an engine; numbers equal the proto's."""

    STARTING = 1
    STALE = 2
    READY = 3
    UPDATING = 4
    DRAINING = 5
    DEAD = 6


@dataclass(frozen=True)
class EngineView:
    """An engine as its node reports it. `address` is the node's gRPC server; `backends` best first."""

    engine_id: str
    address: str
    incarnation: str
    state: EngineState
    rank_count: int
    weight_version: int
    backends: tuple[str, ...]

    @property
    def joinable(self) -> bool:
        """True when it can take part in a weight update."""
        return self.state in (EngineState.STALE, EngineState.READY, EngineState.UPDATING)

    def behind(self, version: int) -> bool:
        """True when it should be brought up at `version` by itself."""
        late = self.state is EngineState.STALE or (self.state is EngineState.READY and self.weight_version < version)
        return late and self.weight_version <= version


@dataclass(frozen=True)
class NodeView:
    """A rollout node. Counters grow from the start of its process."""

    node_id: str
    address: str
    run_id: str
    engines: tuple[EngineView, ...]
    running_group_count: int
    finished_group_count: int
    generated_token_count: int
    idle_seconds: float
    generate_seconds: float
    score_seconds: float
    problem: str


@dataclass(frozen=True)
class EvalResult:
    """Result of an evaluation of one data set."""

    dataset: str
    mean_reward: float
    scored_count: int
    unscored_count: int
    mean_response_length: float
    truncated_fraction: float
    min_version: int
    max_version: int
    seconds: float
