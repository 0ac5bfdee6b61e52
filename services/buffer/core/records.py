"""Values the buffer passes between its parts, as frozen dataclasses.

Payload is opaque here: `bytes` that the edge packed and will unpack. Times are milliseconds of the store's clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from services.common.records import Prompt


class RunState(enum.Enum):
    """State of a run."""

    ACTIVE = "ACTIVE"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


class GroupState(enum.Enum):
    """State of a group."""

    PENDING = "PENDING"
    LEASED = "LEASED"
    READY = "READY"
    RESERVED = "RESERVED"
    CONSUMED = "CONSUMED"
    EVICTED = "EVICTED"


class PutOutcome(enum.Enum):
    """What became of a group that was put."""

    STORED = "STORED"
    DUPLICATE = "DUPLICATE"
    LEASE_LOST = "LEASE_LOST"
    INVALID = "INVALID"


@dataclass(frozen=True)
class Checkpoint:
    """A step whose weights are safe on the trainer's disk; `frontier`: lowest ordinal that was not finished."""

    step: int
    path: str
    frontier: int


@dataclass(frozen=True)
class RunRecord:
    """A run as the store has it."""

    run_id: str
    state: RunState
    reason: str
    created_ms: int
    policy_version: int
    committed_step: int
    checkpoint_step: int
    checkpoint_path: str
    trainer_epoch: int
    reserved_version: int
    spec_json: str
    row_count: int
    skipped_count: int
    checkpoints: tuple[Checkpoint, ...] = ()
    """Those the run can be restored to with all their payload, oldest first."""


@dataclass(frozen=True)
class Created:
    """Answer of CreateRun."""

    run: RunRecord
    created: bool


@dataclass(frozen=True)
class LeaseRequest:
    """A node's wish for prompts."""

    request_id: str
    caller: str
    count: int
    ttl_seconds: float


@dataclass(frozen=True)
class Grant:
    """One ordinal in the hands of a node."""

    lease_id: str
    ordinal: int
    attempt: int
    deadline_ms: int
    partial: PartialKey | None = None


@dataclass(frozen=True)
class PartialKey:
    """Where the store keeps what an unfinished attempt had made."""

    token: str
    sample_count: int


@dataclass(frozen=True)
class Grants:
    """Answer of the store to a lease request."""

    grants: tuple[Grant, ...]
    policy_version: int
    now_ms: int
    repeated: bool


@dataclass(frozen=True)
class Drawn:
    """What an ordinal stands for.

    `reason`: why it cannot be given out (MALFORMED, PROMPT_TOO_LONG), with one sentence; empty when it can. The prompt
    of a malformed row has no text.
    """

    prompt: Prompt
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class PromptLease:
    """A grant with its prompt."""

    grant: Grant
    prompt: Prompt
    partial: StoredGroup | None = None
    """What an unfinished attempt had made."""


@dataclass(frozen=True)
class Leases:
    """Answer of LeasePrompts."""

    leases: tuple[PromptLease, ...]
    policy_version: int
    expire_ms: int


@dataclass(frozen=True)
class PackedGroup:
    """A finished, checked group ready to be stored.

    `heads` and `tensors`: per sample, the message without and with only its tensors; their concatenation is the
    whole sample. `headers`: what the trainer must know to plan, for all samples.
    """

    lease_id: str
    group_id: str
    ordinal: int
    headers: bytes
    summary: bytes
    heads: tuple[bytes, ...]
    tensors: tuple[bytes, ...]
    min_version: int | None
    rewards: tuple[float | None, ...]
    mean_response_length: float
    side_payloads: tuple[SideShape, ...] = ()
    """Payloads that its samples name and that were stored before."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all payload, side payloads left out."""
        return len(self.headers) + len(self.summary) + sum(map(len, self.heads)) + sum(map(len, self.tensors))

    @property
    def side_bytes(self) -> int:
        """Bytes of all side payloads."""
        return sum(one.size_bytes for one in self.side_payloads)


@dataclass(frozen=True)
class SideShape:
    """A large tensor beside a sample: `index` of the sample, rows along the first dimension."""

    index: int
    name: str
    row_count: int
    row_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return self.row_count * self.row_bytes


@dataclass(frozen=True)
class SideRows:
    """Consecutive rows of a side payload as bytes."""

    start: int
    count: int
    data: bytes


@dataclass(frozen=True)
class PutResult:
    """Outcome of one group."""

    group_id: str
    outcome: PutOutcome
    message: str = ""


@dataclass(frozen=True)
class GroupKey:
    """A READY group with the payload it has now: another token means that it was made again."""

    ordinal: int
    token: str


@dataclass(frozen=True)
class ReadyGroup:
    """What a function of the user may know of a READY group. `headers`: of all its samples, packed."""

    key: GroupKey
    headers: bytes
    min_version: int
    restored: bool
    """It was given back by a rollback."""


@dataclass(frozen=True)
class Question:
    """What the store must be told before it takes a batch: which groups to take (`pick`), or what to do with stale
    ones (`keys`)."""

    policy_version: int
    keys: tuple[GroupKey, ...]
    pick: bool


@dataclass(frozen=True)
class Batch:
    """A reserved batch: concatenated headers, empty when there were too few groups."""

    headers: bytes
    ready_count: int
    stale_count: int
    policy_version: int


@dataclass(frozen=True)
class StoredGroup:
    """Payload of one group; `samples` without tensors when those were freed."""

    summary: bytes
    samples: tuple[bytes, ...]


@dataclass(frozen=True)
class GroupRecord:
    """State of one group."""

    group_id: str
    ordinal: int
    epoch: int
    state: GroupState
    step: int | None
    caller: str
    expire_ms: int | None
    evict_reason: str
    lease_count: int
    min_version: int | None
    rewards: tuple[float | None, ...]
    mean_response_length: float | None
    dataset: str = ""
    """Data set of a mixture; empty when the run has one only."""


@dataclass(frozen=True)
class GroupFilter:
    """Which groups are wanted; empty fields want all."""

    states: tuple[GroupState, ...] = ()
    step: int | None = None
    evict_reasons: tuple[str, ...] = ()
    dataset: str = ""


@dataclass(frozen=True)
class Stats:
    """Counts of a run. drawn = pending + leased + ready + reserved + consumed + evicted, always."""

    state: RunState
    drawn: int
    pending: int
    leased: int
    ready: int
    reserved: int
    consumed: int
    evicted: int
    lease_expired: int
    stale: int
    capacity: int
    payload_bytes: int
    policy_version: int
    row_count: int
    evicted_by_reason: dict[str, int] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    oldest_age_seconds: dict[str, float] = field(default_factory=dict)
    """By open state: how long the group that is in it longest is in it."""
    drawn_by_dataset: dict[str, int] = field(default_factory=dict)
    store_used_bytes: int = 0
    store_limit_bytes: int = 0
    """0: no bound."""


@dataclass(frozen=True)
class Member:
    """A live process of a tier."""

    member_id: str
    tier: str
    address: str
    incarnation: str
    attributes: dict[str, str]
    expire_ms: int = 0
