"""Domain values that travel between tiers, as frozen dataclasses.

They mirror `tetrarch.common.v1`; `services.common.convert` maps one to the other. Shapes: P prompt tokens,
R response tokens.

Invariants of a `Sample`: `tokens` has P + R entries; `loss_mask` and `log_probs` have R; `versions` cover
0..R in order without gaps (or are empty, for data no engine produced); `log_probs` is 0 where the mask is 0.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np


class SampleStatus(enum.IntEnum):
    """How a generation ended; numbers equal the proto's."""

    COMPLETED = 1
    TRUNCATED = 2
    ABORTED = 3
    FAILED = 4


@dataclass(frozen=True)
class Prompt:
    """A prompt drawn from a data set of a run. `tokens`: int32 [P].

    `dataset` and what follows are those of a set of a mixture; empty, and fields that are None, mean the run's.
    """

    group_id: str
    ordinal: int
    epoch: int
    row: int
    text: str
    label: str
    tokens: np.ndarray
    metadata_json: str = ""
    messages_json: str = ""
    dataset: str = ""
    sampling: SamplingParams | None = None
    rm_type: str = ""
    rm_options_json: str = ""


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) produced by one weight version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class TeacherLogProbs:
    """What a teacher says of a response: `sampled` float32 [R], of its tokens; `top_ids` int32 [R, k] and `top` float32
    [R, k], its k most likely tokens at every place, most likely first, and their log-probs; k may be 0."""

    sampled: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray

    def problem(self, length: int) -> str:
        """What does not fit a response of `length` tokens, or an empty string."""
        if self.sampled.shape != (length,):
            return f"teacher_log_probs have shape {list(self.sampled.shape)} for {length} tokens"
        if self.top.ndim != 2 or len(self.top) != length or self.top_ids.shape != self.top.shape:
            shapes = f"{list(self.top_ids.shape)} and {list(self.top.shape)}"
            return f"teacher_top_ids and teacher_top_log_probs have shapes {shapes} for {length} tokens"
        return ""


@dataclass(frozen=True)
class Sample:
    """One answer. `tokens`: int32 [P + R]; `loss_mask`: uint8 [R]; `log_probs`: float32 [R]."""

    sample_id: str
    group_id: str
    index: int
    status: SampleStatus
    prompt_length: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    log_probs: np.ndarray
    response: str = ""
    reward: float | None = None
    unscored_reason: str = ""
    reward_details: dict[str, float] = field(default_factory=dict)
    versions: tuple[VersionSpan, ...] = ()
    turn_count: int = 1
    tool_seconds: float = 0.0
    metadata_json: str = ""
    engine_id: str = ""
    teacher: TeacherLogProbs | None = None
    rollout_index: int | None = None
    """Rollout of the group it came from, when rollouts give several samples; None: one of its own, number `index`."""
    side: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Large tensors by name, which travel and are stored beside the sample: empty where nobody asked for them."""

    @property
    def response_length(self) -> int:
        """Number of response tokens, environment tokens included."""
        return len(self.tokens) - self.prompt_length

    @property
    def min_version(self) -> int:
        """Oldest weight version in the response; 0 when no engine produced it."""
        return min((span.version for span in self.versions), default=0)

    @property
    def max_version(self) -> int:
        """Newest weight version in the response; 0 when no engine produced it."""
        return max((span.version for span in self.versions), default=0)

    def problem(self) -> str:
        """One sentence about a broken invariant, or an empty string."""
        length = self.response_length
        if not 0 < self.prompt_length <= len(self.tokens):
            return f"sample {self.sample_id}: prompt_length {self.prompt_length} does not fit {len(self.tokens)} tokens"
        for name in ("loss_mask", "log_probs"):
            if len(getattr(self, name)) != length:
                return f"sample {self.sample_id}: {name} has {len(getattr(self, name))} entries for {length} tokens"
        if self.versions:
            edges = [(span.start, span.end) for span in self.versions]
            contiguous = edges[0][0] == 0 and edges[-1][1] == length
            if not contiguous or any(a[1] != b[0] for a, b in itertools.pairwise(edges)):
                return f"sample {self.sample_id}: version spans {edges} do not cover its {length} response tokens"
        if self.teacher is not None and (problem := self.teacher.problem(length)):
            return f"sample {self.sample_id}: {problem}"
        return ""


@dataclass(frozen=True)
class Group:
    """All samples of one prompt, in order of index."""

    group_id: str
    ordinal: int
    samples: tuple[Sample, ...]
    generate_seconds: float = 0.0
    score_seconds: float = 0.0

    @property
    def min_version(self) -> int:
        """Oldest weight version in the group."""
        return min((sample.min_version for sample in self.samples), default=0)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings; None means the engine's default. `temperature` 0 is greedy decoding."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def overlaid(self, other: SamplingParams | None) -> SamplingParams:
        """These settings where `other` leaves them open (None, or no stops), else those of `other`."""
        given = {name: value for name, value in vars(other).items() if value not in (None, ())} if other else {}
        return replace(self, **given)
