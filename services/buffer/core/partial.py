"""Unfinished groups: what a node had made when it gave a prompt back, handed to the node that leases it next.

Invariant: an answer to a lease request stays below the size of a message; prompts whose share does not fit are taken
back as if they had not been given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.buffer.core import ids
from services.buffer.core.ports import Store
from services.buffer.core.records import PromptLease

_ANSWER_BYTES = 8 << 20


async def with_partials(store: Store, run_id: str, leases: Sequence[PromptLease]) -> list[PromptLease]:
    """The leases with what earlier ones had made; those that do not fit into an answer are released."""
    if not any(lease.grant.partial for lease in leases):
        return list(leases)
    stored = await store.partials(run_id, [lease.grant for lease in leases])
    given: list[PromptLease] = []
    size = 0
    for lease, partial in zip(leases, stored, strict=True):
        size += sum(map(len, partial.samples)) if partial else 0
        if given and size > _ANSWER_BYTES:
            break
        given.append(replace(lease, partial=partial))
    rest = [ids.parse_lease_id(lease.grant.lease_id) for lease in leases[len(given) :]]
    if rest:
        await store.release(run_id, [lease for lease in rest if lease], "UNDO")
    return given
