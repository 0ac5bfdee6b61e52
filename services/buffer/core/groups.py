"""Whether a finished group fits its run. Knows samples, not how they travel or where they are kept."""

from __future__ import annotations

from services.buffer.core import ids
from services.common.records import Group


def group_problem(group: Group, run_id: str, sample_count: int) -> str:
    """One sentence about what is wrong with a group, or an empty string."""
    expected = ids.group_id(run_id, group.ordinal)
    if group.group_id != expected:
        return f"group_id {group.group_id!r} does not belong to ordinal {group.ordinal} of run {run_id} ({expected})."
    if len(group.samples) != sample_count:
        return (
            f"group {group.group_id} has {len(group.samples)} samples; n_samples_per_prompt of the run is"
            f" {sample_count}."
        )
    for index, sample in enumerate(group.samples):
        if sample.index != index or sample.group_id != expected or sample.sample_id != ids.sample_id(expected, index):
            return (
                f"sample {sample.sample_id!r} (group {sample.group_id!r}, index {sample.index}) stands at position"
                f" {index} of group {expected}, where {ids.sample_id(expected, index)} belongs."
            )
        if sample.prompt_length < 1:
            return f"sample {sample.sample_id} has no prompt tokens."
    return ""


def oldest_version(group: Group) -> int | None:
    """Oldest weight version of a group; None when no engine produced any of its tokens."""
    return min((sample.min_version for sample in group.samples if sample.versions), default=None)


def mean_response_length(group: Group) -> float:
    """Mean number of response tokens of the samples."""
    return sum(sample.response_length for sample in group.samples) / len(group.samples)
