"""A conversation with an engine as tokens: what the model wrote, and what the environment put between.

Appending keeps the rules: model tokens carry their log-probabilities and count in the loss (mask 1); tokens
of tools and environments carry none and do not count (mask 0, log-probability 0). Shapes: P prompt tokens,
R response tokens.

Invariants: mask and log-probs have R entries; version spans cover the model's tokens exactly as the engine
reported them, and an environment token belongs to the span before it (at the head: to the first span).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from services.common.errors import Code, ServiceError
from services.common.records import Sample, SampleStatus, VersionSpan
from services.rollout.core.completion import Generation
from services.rollout.core.recorded import Recorded

NumberT = TypeVar("NumberT", int, float)

_STATUS = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


def merge_spans(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """The same cover with neighbours of one version joined and empty spans left out."""
    merged: list[VersionSpan] = []
    for span in spans:
        if span.end == span.start:
            continue
        if merged and merged[-1].version == span.version:
            merged[-1] = VersionSpan(span.version, merged[-1].start, span.end)
        else:
            merged.append(span)
    return tuple(merged)


class Trajectory:
    """Tokens of one sample under construction.

    Args:
        prompt_tokens: P token ids.

    Attributes:
        reward: set by a generate function that scores by itself; then the reward service is not asked.
        metadata: JSON-serialisable notes that are stored with the sample.
    """

    def __init__(self, prompt_tokens: Sequence[int] | np.ndarray) -> None:
        self._tokens = _numbers(prompt_tokens, int)
        self.prompt_length = len(self._tokens)
        self._mask: list[int] = []
        self._log_probs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._status: SampleStatus | None = None
        self.turn_count = 0
        self.tool_seconds = 0.0
        self.reward: float | None = None
        self.metadata: dict[str, object] = {}
        self.engine_url: str | None = None
        self.rollout_index: int | None = None
        """Its rollout in the group, when rollouts give several."""
        self.recorded = Recorded()

    @classmethod
    def of(cls, sample: Sample) -> Trajectory:
        """The trajectory that a sample was made of, to be gone on with."""
        trajectory = cls(sample.tokens[: sample.prompt_length])
        if sample.response_length:
            trajectory.append_model(sample.tokens[sample.prompt_length :], sample.log_probs, sample.versions)
            trajectory.apply_mask(sample.loss_mask.tolist())
        trajectory.turn_count, trajectory.tool_seconds = sample.turn_count, sample.tool_seconds
        trajectory.reward = sample.reward
        trajectory.metadata = json.loads(sample.metadata_json) if sample.metadata_json else {}
        trajectory.engine_url = sample.engine_id or None
        trajectory.finish(sample.status)
        return trajectory

    @property
    def input_ids(self) -> list[int]:
        """Prompt and response so far: what the next turn starts from."""
        return list(self._tokens)

    @property
    def response_ids(self) -> list[int]:
        """Response so far."""
        return self._tokens[self.prompt_length :]

    @property
    def response_length(self) -> int:
        """R so far."""
        return len(self._tokens) - self.prompt_length

    @property
    def loss_mask(self) -> np.ndarray:
        """uint8 [R]."""
        return np.array(self._mask, np.uint8)

    @property
    def log_probs(self) -> np.ndarray:
        """float32 [R]."""
        return np.array(self._log_probs, np.float32)

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Spans over 0..R; empty when no engine has contributed."""
        if not self._spans:
            return ()
        spans = list(self._spans)
        spans[0] = VersionSpan(spans[0].version, 0, spans[0].end)
        for at in range(1, len(spans)):  # close the gaps that environment tokens left
            spans[at - 1] = VersionSpan(spans[at - 1].version, spans[at - 1].start, spans[at].start)
        spans[-1] = VersionSpan(spans[-1].version, spans[-1].start, self.response_length)
        return merge_spans(spans)

    @property
    def status(self) -> SampleStatus:
        """How it ended: what `finish` said, else by the last generation, else COMPLETED."""
        return self._status or SampleStatus.COMPLETED

    def append_generation(self, generation: Generation) -> None:
        """Appends what the model wrote in one turn."""
        start = self.response_length
        self.append_model(generation.output_ids, generation.log_probs, generation.versions)
        self.recorded.add(generation, start, len(self._tokens))
        self._status = _STATUS.get(generation.finish_reason, SampleStatus.COMPLETED)
        self.engine_url = generation.engine_url or self.engine_url

    def append_model(
        self,
        token_ids: Sequence[int] | np.ndarray,
        log_probs: Sequence[float] | np.ndarray,
        versions: Sequence[VersionSpan],
    ) -> None:
        """Appends model tokens [n] with log-probabilities [n] and spans over 0..n (relative to this turn)."""
        if len(token_ids) != len(log_probs):
            raise _invalid(f"{len(token_ids)} model tokens came with {len(log_probs)} log-probs")
        covered = sum(span.end - span.start for span in versions)
        if covered != len(token_ids):
            raise _invalid(f"version spans cover {covered} of {len(token_ids)} model tokens")
        offset = self.response_length
        self._spans += [
            VersionSpan(span.version, span.start + offset, span.end + offset)
            for span in versions
            if span.end > span.start
        ]
        self._tokens += _numbers(token_ids, int)
        self._mask += [1] * len(token_ids)
        self._log_probs += _numbers(log_probs, float)
        self.turn_count += 1

    def append_environment(self, token_ids: Sequence[int] | np.ndarray, seconds: float = 0.0) -> None:
        """Appends tokens of a tool or environment, which took `seconds`; they are left out of the loss."""
        self._tokens += [int(token) for token in token_ids]
        self._mask += [0] * len(token_ids)
        self._log_probs += [0.0] * len(token_ids)
        self.tool_seconds += seconds

    def apply_mask(self, mask: Sequence[int]) -> None:
        """Leaves tokens out of the loss after the fact: 0 where a token [R] is not to be trained."""
        if len(mask) != self.response_length:
            raise _invalid(f"the mask has {len(mask)} entries for {self.response_length} response tokens")
        self._mask = [kept and int(bool(value)) for kept, value in zip(self._mask, mask, strict=True)]
        self._log_probs = [value if kept else 0.0 for kept, value in zip(self._mask, self._log_probs, strict=True)]

    def finish(self, status: SampleStatus) -> None:
        """Overrides the status that the last generation gave."""
        self._status = status


def _numbers(values: Sequence[Any] | np.ndarray, kind: type[NumberT]) -> list[NumberT]:
    """Python numbers; an engine's arrays are of the right kind already and convert at once."""
    if isinstance(values, np.ndarray) and values.dtype.kind == ("f" if kind is float else "i"):
        return values.tolist()
    return [kind(value) for value in values]


def _invalid(why: str) -> ServiceError:
    return ServiceError(Code.INVALID_ARGUMENT, "TRAJECTORY_INVALID", f"A trajectory cannot be extended: {why}.")
