"""From granted ordinals to prompts: what cannot be used is evicted, so that another is drawn in its place.

Rows beyond those that were checked when the run was created are looked at here for the first time. Invariants: a
node is never handed a prompt that cannot be used; a data file that cannot be read costs no attempt; a run whose rows
cannot be used ends with the name of the last one.
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
    last: dict[str, str] = {}
    for grant, found in zip(grants, drawn, strict=True):
        if found.reason:
            unusable[found.reason].append(grant)
            last[found.reason] = found.message.rstrip(".")
            say = log.warning if found.reason == MALFORMED else log.info
            say("a prompt was evicted", run=run_id, ordinal=grant.ordinal, why=found.message)
    for reason, held in unusable.items():
        await store.release(run_id, _leases(held), reason)
    leases = [PromptLease(grant, found.prompt) for grant, found in zip(grants, drawn, strict=True) if not found.reason]
    if MALFORMED in last or (last and not leases):
        await _end_when_hopeless(store, run_id, dataset, last)
    return leases


async def _end_when_hopeless(store: Store, run_id: str, dataset: Dataset, last: dict[str, str]) -> None:
    """Fails a run with too many malformed rows, or with hardly a prompt that is short enough: it would never end."""
    stats = await store.stats(run_id)
    malformed, too_long = (stats.evicted_by_reason.get(reason, 0) for reason in (MALFORMED, TOO_LONG))
    if malformed > dataset.malformed_limit and MALFORMED in last:
        why = (
            f"{malformed} rows drawn were malformed, more than max_malformed_rows {dataset.malformed_limit} allows, the"
            f" last one because {last[MALFORMED]}; correct the rows, or raise max_malformed_rows"
        )
    elif too_long >= dataset.row_count and TOO_LONG in last and too_long > 0.99 * stats.drawn:
        why = f"{too_long} of {stats.drawn} prompts were too long, as {last[TOO_LONG]}; raise rollout_max_prompt_len"
    else:
        return
    await store.finish_run(run_id, RunState.FAILED, f"{why}, and start the run again.", 0)


def _leases(grants: Sequence[Grant]) -> list[ids.LeaseId]:
    return [lease for grant in grants if (lease := ids.parse_lease_id(grant.lease_id))]
