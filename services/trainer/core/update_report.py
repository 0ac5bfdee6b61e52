"""A weight update in numbers: its deadline, how long slow engines are waited for, and what it did. Pure."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from services.trainer.core.buckets import BucketPlan

LEAST_COMMIT_SECONDS = 5.0
"""A commit that begins just before the deadline is not cut off at once."""
_LEAST_PATIENCE, _PATIENCE = 2.0, 3.0
"""With a group that took `s` seconds, the others have max(least, patience × s) more."""
_LEAST_AGAIN, _AGAIN = 0.2, 1.0
"""The same for engines that were too slow last time: a link that stays slow must not cost every update that much."""


@dataclass
class UpdateReport:
    """What an update did. `failed`: engine id → why, `reasons`: how these failures are called, where they say anything
    about the way of the bytes, `late`: those of them that were only too slow. `seconds` by part, of the slowest group
    that was committed, "stragglers": beyond it, "files": until they were written; `file_bytes`: what they take,
    `changed_share`: the elements in them. `wire_seconds`: the longest an engine was receiving; `pause_seconds`: the
    longest standstill; `staged_count`: engines that served on meanwhile; `verified_tensor_count`: checksums that
    engines compared before they served, over all engines, `unverified`: engines that serve and cannot compare any;
    `new_group_count`: groups that did not stand before."""

    version: int
    verified_tensor_count: int = 0
    committed: list[str] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0
    wire_seconds: float = 0.0
    pause_seconds: float = 0.0
    staged_count: int = 0
    total_bytes: int = 0
    file_bytes: int = 0
    changed_share: float = 1.0
    bucket_count: int = 0
    new_group_count: int = 0


@dataclass
class Update:
    """One push. Times are of `time.monotonic`."""

    epoch: int
    version: int
    plan: BucketPlan
    join_timeout: float
    began: float
    deadline: float
    report: UpdateReport
    last_success: float = 0.0

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(self.deadline - time.monotonic(), 0.0)

    def patience(self, *, slow: bool) -> float:
        """Seconds that groups still have; `slow`: all of them were late in the update before."""
        if not self.last_success:
            return self.left + 2 * LEAST_COMMIT_SECONDS  # every call has its own deadline
        took = self.last_success - self.began
        more = max(_LEAST_AGAIN, _AGAIN * took) if slow else max(_LEAST_PATIENCE, _PATIENCE * took)
        return max(self.last_success + more - time.monotonic(), 0.0)
