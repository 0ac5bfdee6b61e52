"""Counters of a node since its start. Plain numbers; who publishes them is not known here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counters:
    """Sums since the node started. Seconds are summed over samples or groups, as the name says."""

    finished_group_count: int = 0
    generated_token_count: int = 0
    idle_seconds: float = 0.0
    generate_seconds: float = 0.0
    """Over samples."""
    score_seconds: float = 0.0
    """Over groups."""
    teacher_seconds: float = 0.0
    """Over groups."""
    failed_group_count: int = 0
    unscored_sample_count: int = 0
    lost_lease_count: int = 0
    rejected_group_count: int = 0
    """By the sampling filter."""
    unfinished_group_count: int = 0
    """Given back with what was made so far."""
    resumed_sample_count: int = 0
    """Taken up from what an earlier lease had made."""
    retried_request_count: int = 0
    """Requests sent again after the router gave them up."""
    continued_sample_count: int = 0
    """Samples taken up again from the tokens they had when an engine ended them half way."""
    pause_seconds: float = 0.0
    """Over engines and weight updates."""
    transfer_seconds: float = 0.0
    """Over engines and weight updates; an engine that stages serves meanwhile."""
    received_bytes: int = 0
    update_count: int = 0
    put_outcomes: dict[str, int] = field(default_factory=dict)

    def count_put(self, outcome: str) -> None:
        """Counts one answer of PutGroups by its name."""
        self.put_outcomes[outcome] = self.put_outcomes.get(outcome, 0) + 1
