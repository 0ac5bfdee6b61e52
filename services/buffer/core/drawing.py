"""From granted ordinals to prompts: what cannot be used is evicted, so that another is drawn in its place.

Rows beyond those that were checked when the run was created are looked at here for the first time. Invariants: a
node is never handed a prompt that cannot be used; a data file that cannot be read costs no attempt; more malformed
rows than the run allows end it with the name of the last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from services.buffer.core import ids
from services.buffer.core.ports import Dataset, Store
from services.buffer.core.records import Grant, PromptLease, RunState
from services.common.errors import ServiceError
from services.common.telemetry import get_logger

MALFORMED = "MALFORMED"
TOO_LONG = "PROMPT_TOO_LONG"
UNDO = "UNDO"
"""Release reason that takes a lease back as if it had not been given."""
log = get_logger(__name__)


async def usable(store: Store, run_id: str, dataset: Dataset, grants: Sequence[Grant]) -> list[PromptLease]:
    """The grants whose prompt can be used. Raises DATA_*, CURRICULUM_FAILED after taking all of them back."""
    try:
        drawn = await dataset.draw([grant.ordinal for grant in grants])
    except ServiceError:
        # The file is the user's to mend; no prompt may count as failed meanwhile.
        await store.release(run_id, _leases(grants), UNDO)
        raise
    unusable: dict[str, list[Grant]] = defaultdict(list)
    last = ""
    for grant, found in zip(grants, drawn, strict=True):
        if found.reason:
            unusable[found.reason].append(grant)
            log.warning("a prompt was evicted", run=run_id, ordinal=grant.ordinal, why=found.message)
            last = found.message if found.reason == MALFORMED else last
    for reason, held in unusable.items():
        await store.release(run_id, _leases(held), reason)
    if last:
        await _end_when_too_many(store, run_id, dataset.malformed_limit, last)
    return [PromptLease(grant, found.prompt) for grant, found in zip(grants, drawn, strict=True) if not found.reason]


async def _end_when_too_many(store: Store, run_id: str, limit: int, last: str) -> None:
    count = (await store.stats(run_id)).evicted_by_reason.get(MALFORMED, 0)
    if count > limit:
        reason = (
            f"{count} rows drawn were malformed, more than max_malformed_rows {limit} allows, the last one because"
            f" {last.rstrip('.')}; correct the rows, or raise max_malformed_rows, and start the run again."
        )
        await store.finish_run(run_id, RunState.FAILED, reason, 0)


def _leases(grants: Sequence[Grant]) -> list[ids.LeaseId]:
    return [lease for grant in grants if (lease := ids.parse_lease_id(grant.lease_id))]
