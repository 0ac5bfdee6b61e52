"""Ports of the rollout node towards the buffer, the reward service and the tokenizer.

Every failure of an implementation is a `ServiceError`; UNAVAILABLE means that trying again makes sense.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.common.records import Group, Prompt, Sample, TeacherLogProbs


@dataclass(frozen=True)
class Lease:
    """A prompt in the hands of this node. `attempt`: how many attempts at it failed before. `partial`: what an earlier
    lease had made when it was given back."""

    lease_id: str
    prompt: Prompt
    attempt: int
    partial: Group | None = None


@dataclass(frozen=True)
class PutResult:
    """What became of a group: STORED, DUPLICATE, LEASE_LOST or INVALID (with a sentence)."""

    group_id: str
    outcome: str
    message: str = ""


@dataclass(frozen=True)
class ActiveRun:
    """A run that the buffer lists as active, with its settings as JSON."""

    run_id: str
    spec_json: str
    birth: str = ""
    """Tells a run from another one of the same id, made anew."""
    policy_version: int = 0
    """Newest published version; 0 before the first."""


class PromptBuffer(Protocol):
    """The buffer as a rollout node uses it."""

    async def newest_active_run(self) -> ActiveRun | None:
        """The newest run in state ACTIVE."""
        ...

    async def lease_prompts(self, run_id: str, max_count: int, max_wait: float, ttl: float) -> list[Lease]:
        """At most `max_count` leases, after at most `max_wait` seconds; possibly none."""
        ...

    async def extend_leases(self, run_id: str, lease_ids: Sequence[str], ttl: float) -> set[str]:
        """Moves deadlines to `ttl` seconds from now; returns leases that are lost."""
        ...

    async def release_leases(
        self, run_id: str, lease_ids: Sequence[str], evict_reason: str = "", *, unharmed: bool = False,
        partials: Mapping[str, Group] | None = None,
    ) -> None:  # fmt: skip
        """Gives prompts back, or evicts them. `unharmed`: they did not fail, so it counts as no attempt.
        `partials`: what was made so far under some of the leases, to be gone on from."""
        ...

    async def put_groups(self, run_id: str, groups: Sequence[tuple[str, Group]]) -> list[PutResult]:
        """Stores (lease id, group) pairs; one result each, in order."""
        ...

    def eval_prompts(self, run_id: str, dataset: str) -> AsyncIterator[list[Prompt]]:
        """Pages of an evaluation set in file order. NOT_FOUND/DATASET_NOT_FOUND lists the known ones."""
        ...

    async def register(self, member_id: str, address: str, incarnation: str, attributes: Mapping[str, str]) -> None:
        """Adds this node to the registry of live members, or renews it."""
        ...

    async def unregister(self, member_id: str) -> None:
        """Removes this node from the registry."""
        ...


@dataclass(frozen=True)
class ScoreItem:
    """One answer to score."""

    item_id: str
    group_id: str
    prompt: str
    response: str
    label: str
    metadata_json: str


@dataclass(frozen=True)
class Score:
    """A reward, or the reason why there is none."""

    reward: float | None
    unscored_reason: str = ""
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoreCall:
    """What the reward service needs beside the items. `budget` in seconds."""

    grader: str
    custom_path: str
    options_json: str
    grouped: bool
    budget: float


class Scorer(Protocol):
    """The reward service as a rollout node uses it."""

    async def score(self, call: ScoreCall, items: Sequence[ScoreItem]) -> list[Score]:
        """One score per item, in order."""
        ...


class Teacher(Protocol):
    """The teacher of an on-policy distillation."""

    async def log_probs(self, sample: Sample, top_k: int, timeout: float) -> TeacherLogProbs:
        """Log-probs of a sample's response within `timeout` seconds; with the `top_k` most likely tokens.
        UNAVAILABLE and DEADLINE_EXCEEDED mean that asking again makes sense."""
        ...

    async def close(self) -> None:
        """Closes its connections."""
        ...


class Tokenizer(Protocol):
    """Text ⇄ token ids of the run's checkpoint."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]:
        """Ids of `text` without special tokens around it."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, without special tokens."""
        ...
