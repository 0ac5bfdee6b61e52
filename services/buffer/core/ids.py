"""Ids that carry their meaning, so that a repeated put is the same put and no index from id to row is needed.

group id = run id, '-', ordinal; sample id = group id, '-', index; lease id = ordinal, '.', lease count of the
group, '.', rollback count of the run. All three counts only grow, so a lease id never comes twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.common.errors import Code, ServiceError, invalid_field

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LEASE_ID = re.compile(r"(\d{1,12})\.(\d{1,15})\.(\d{1,15})")


@dataclass(frozen=True)
class LeaseId:
    """A parsed lease id."""

    text: str
    ordinal: int
    count: int
    rollback: int


def check_run_id(run_id: str) -> str:
    """The run id, or INVALID_FIELD."""
    if not _RUN_ID.fullmatch(run_id):
        raise invalid_field(
            "run_id", run_id, "use 1 to 64 letters, digits, '-', '_' or '.', beginning with a letter or digit"
        )
    return run_id


def group_id(run_id: str, ordinal: int) -> str:
    """Id of the group that an ordinal opens."""
    return f"{run_id}-{ordinal}"


def sample_id(group: str, index: int) -> str:
    """Id of a sample of a group."""
    return f"{group}-{index}"


def parse_group_id(run_id: str, text: str) -> int:
    """Ordinal of a group id. Raises GROUP_NOT_FOUND."""
    head, _, tail = text.rpartition("-")
    if head != run_id or not _is_number(tail):
        raise ServiceError(
            Code.NOT_FOUND,
            "GROUP_NOT_FOUND",
            f"No group {text!r} in run {run_id}; groups are called {run_id}-<ordinal>.",
            group_id=text,
            run_id=run_id,
        )
    return int(tail)


def parse_sample_id(run_id: str, text: str) -> tuple[int, int]:
    """(ordinal, index) of a sample id. Raises SAMPLE_NOT_FOUND."""
    head, _, index = text.rpartition("-")
    owner, _, ordinal = head.rpartition("-")
    if owner != run_id or not _is_number(ordinal) or not _is_number(index):
        raise sample_not_found(run_id, text)
    return int(ordinal), int(index)


def sample_not_found(run_id: str, text: str) -> ServiceError:
    """The error for a sample that is not stored."""
    return ServiceError(
        Code.NOT_FOUND,
        "SAMPLE_NOT_FOUND",
        f"Sample {text!r} of run {run_id} is not stored; take the batch of its step again.",
        sample_id=text,
        run_id=run_id,
    )


def parse_lease_id(text: str) -> LeaseId | None:
    """Parts of a lease id; None when it is not one of ours (such a lease is simply not held)."""
    match = _LEASE_ID.fullmatch(text)
    return LeaseId(text, *(int(part) for part in match.groups())) if match else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12
