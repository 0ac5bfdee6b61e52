"""Whether a finished group fits its run. Knows the shape of samples, not their tensors nor how they travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.buffer.core import ids


@dataclass(frozen=True, slots=True)
class SampleShape:
    """What is checked of a sample; counts are entries of its tensors."""

    sample_id: str
    group_id: str
    index: int
    prompt_length: int
    token_count: int
    mask_count: int
    log_prob_count: int
    spans: tuple[tuple[int, int, int], ...]
    """(version, first response token, one past the last), in order."""
    rollout: int = 0
    """Number of its rollout in the group; a rollout may give several samples."""

    @property
    def response_length(self) -> int:
        """Number of response tokens."""
        return self.token_count - self.prompt_length

    def problem(self) -> str:
        """One sentence about a broken invariant, or an empty string."""
        length = self.response_length
        if not 0 < self.prompt_length <= self.token_count:
            return (
                f"sample {self.sample_id}: prompt_length {self.prompt_length} does not fit {self.token_count} tokens."
            )
        for name, count in (("loss_mask", self.mask_count), ("log_probs", self.log_prob_count)):
            if count != length:
                return f"sample {self.sample_id}: {name} has {count} entries for {length} response tokens."
        reached = 0
        for _, start, end in self.spans:
            if start != reached or end < start:
                break
            reached = end
        if self.spans and reached != length:
            edges = [(start, end) for _, start, end in self.spans]
            return f"sample {self.sample_id}: version spans {edges} do not cover its {length} response tokens."
        return ""


def group_problem(run_id: str, group_id: str, ordinal: int, samples: Sequence[SampleShape], expected_count: int) -> str:
    """One sentence about what is wrong with a group, or an empty string."""
    expected = ids.group_id(run_id, ordinal)
    if group_id != expected:
        return f"group_id {group_id!r} does not belong to ordinal {ordinal} of run {run_id} ({expected})."
    rollouts = list(dict.fromkeys(sample.rollout for sample in samples))
    if len(rollouts) != expected_count:
        return (
            f"group {group_id} has samples of {len(rollouts)} rollouts; n_samples_per_prompt of the run is"
            f" {expected_count}."
        )
    for index, sample in enumerate(samples):
        if sample.index != index or sample.group_id != expected or sample.sample_id != ids.sample_id(expected, index):
            return (
                f"sample {sample.sample_id!r} (group {sample.group_id!r}, index {sample.index}) stands at position"
                f" {index} of group {expected}, where {ids.sample_id(expected, index)} belongs."
            )
        problem = sample.problem()
        if problem:
            return problem
    numbers = [sample.rollout for sample in samples]
    if numbers != sorted(numbers) or rollouts != list(range(expected_count)):
        return f"group {group_id} numbers its samples' rollouts {numbers}; count from 0, one rollout's side by side."
    return ""


def partial_problem(run_id: str, group_id: str, ordinal: int, samples: Sequence[SampleShape], sample_count: int) -> str:
    """One sentence about what is wrong with an unfinished group, or an empty string: any samples, in order of index."""
    expected = ids.group_id(run_id, ordinal)
    if group_id != expected:
        return f"group_id {group_id!r} does not belong to ordinal {ordinal} of run {run_id} ({expected})."
    before = -1
    for sample in samples:
        right = before < sample.index < sample_count and sample.group_id == expected
        if not right or sample.sample_id != ids.sample_id(expected, sample.index):
            return (
                f"sample {sample.sample_id!r} (group {sample.group_id!r}, index {sample.index}) has no place in the"
                f" unfinished group {expected} of {sample_count} samples."
            )
        if problem := sample.problem():
            return problem
        before = sample.index
    return ""


def oldest_version(samples: Sequence[SampleShape]) -> int | None:
    """Oldest weight version of a group; None when no engine produced any of its tokens."""
    return min((span[0] for sample in samples for span in sample.spans), default=None)


def mean_response_length(samples: Sequence[SampleShape]) -> float:
    """Mean number of response tokens."""
    return sum(sample.response_length for sample in samples) / max(1, len(samples))
